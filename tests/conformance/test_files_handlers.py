"""The conformance tests of files handlers pass for correct handlers, and fail for broken ones."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from ckptcore_orbax import SavesToDirectoryAsyncHandler
from ckptcore_testing import FilesExample, FilesHandlerTests

from ckptcore.builtin.files import SavesToDirectoryHandler
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Continuation
from tests.conformance.test_broken_plugins import suite_of


class Diary:
    """An object that writes its entries in the first phase."""

    def __init__(self, *entries: str) -> None:
        self.entries = list(entries)

    def save(self, directory: Path) -> Continuation | None:
        """Write a file for each entry."""
        for number, entry in enumerate(self.entries):
            (directory / f"{number:04}").mkdir()
            (directory / f"{number:04}" / "entry.txt").write_text(entry)
        (directory / "count").write_text(str(len(self.entries)))
        return None

    def load(self, directory: Path) -> None:
        """Read all entries."""
        count = int((directory / "count").read_text())
        self.entries = [(directory / f"{number:04}" / "entry.txt").read_text() for number in range(count)]


class LateDiary(Diary):
    """An object that copies its entries, and writes them in the second phase."""

    def save(self, directory: Path) -> Continuation | None:
        """Return a function that writes a copy of the entries."""
        held = Diary(*self.entries)

        def write() -> None:
            held.save(directory)

        return write


class AwaitedDiary:
    """An object that saves itself asynchronously."""

    def __init__(self, *entries: str) -> None:
        self.entries = list(entries)

    async def save(self, directory: Any) -> Awaitable[None]:
        """Return a function to call in the background."""
        return self._write(directory, json.dumps(self.entries))

    async def _write(self, directory: Any, text: str) -> None:
        path = await directory.await_creation()
        (path / "entries.json").write_text(text)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Return a function to call in the background."""
        return self._read(directory)

    async def _read(self, directory: Any) -> None:
        self.entries = json.loads((directory / "entries.json").read_text())


def example_of(kind: Any) -> FilesExample:
    return FilesExample(
        kind.__name__,
        lambda: kind("a", "b"),
        lambda: kind("c"),
        lambda diary: diary.entries.append("later"),
        lambda diary: tuple(diary.entries),
    )


class TestFiles(FilesHandlerTests):
    """Objects with plain methods."""

    handler = SavesToDirectoryHandler()
    examples = (example_of(Diary), example_of(LateDiary))


class TestAwaitedFiles(FilesHandlerTests):
    """Objects with coroutines."""

    handler = SavesToDirectoryAsyncHandler()
    examples = (example_of(AwaitedDiary),)


class OwnHandler:
    """A handler for a type without methods for files. It returns a new object."""

    priority = 100

    def save(self, value: Diary, directory: Path) -> Continuation | None:
        text = json.dumps(value.entries)

        def write() -> None:
            (directory / "entries.json").write_text(text)

        return write

    def load(self, like: Diary, directory: Path) -> object:
        return Diary(*json.loads((directory / "entries.json").read_text()))


EXAMPLE = example_of(Diary)


class TestOfOurOwn(FilesHandlerTests):
    """A handler of a plugin."""

    handler = OwnHandler()
    examples = (EXAMPLE,)


class LooksLater(OwnHandler):
    def save(self, value: Diary, directory: Path) -> Continuation | None:
        def write() -> None:
            (directory / "entries.json").write_text(json.dumps(value.entries))

        return write


class RemembersOneDirectory(OwnHandler):
    def save(self, value: Diary, directory: Path) -> Continuation | None:
        self.directory = directory
        text = json.dumps(value.entries)

        def write() -> None:
            (self.directory / "entries.json").write_text(text)

        return write


class ForgetsTheRest(OwnHandler):
    def save(self, value: Diary, directory: Path) -> Continuation | None:
        super().save(value, directory)
        return None


class ClearsWhatItSaves(OwnHandler):
    def save(self, value: Diary, directory: Path) -> Continuation | None:
        rest = super().save(value, directory)
        value.entries.clear()
        return rest


class LoadsNothing(OwnHandler):
    def load(self, like: Diary, directory: Path) -> object:
        return like


class ReadsLater(OwnHandler):
    """A handler that reads after `load` returned, when the directory no longer exists."""

    class Lazy(Diary):
        directory: Path

        @property
        def entries(self) -> list[str]:
            return list(json.loads((self.directory / "entries.json").read_text()))

        @entries.setter
        def entries(self, entries: list[str]) -> None:
            pass

    def load(self, like: Diary, directory: Path) -> object:
        made = self.Lazy()
        made.directory = directory
        return made


class NeedsItsOwnLoop(SavesToDirectoryAsyncHandler):
    """A handler that fails like `asyncio.run` if an event loop runs."""

    def save(self, value: AwaitedDiary, directory: Path) -> Continuation | None:
        import asyncio

        text = json.dumps(value.entries)

        async def write() -> None:
            (directory / "entries.json").write_text(text)

        writing = write()
        try:
            asyncio.run(writing)
        finally:
            writing.close()
        return None


@pytest.mark.parametrize(
    ("handler", "test", "error"),
    [
        (LooksLater, "test_a_save_has_the_state_at_the_time_of_the_call", AssertionError),
        (RemembersOneDirectory, "test_overlapping_saves_are_independent", OSError),
        (ForgetsTheRest, "test_load_restores_what_was_saved", OSError),
        (ClearsWhatItSaves, "test_save_does_not_change_the_object", AssertionError),
        (LoadsNothing, "test_loading_without_files_is_an_error", pytest.fail.Exception),
        (LoadsNothing, "test_load_restores_what_was_saved", AssertionError),
        (ReadsLater, "test_load_restores_what_was_saved", OSError),
        (NeedsItsOwnLoop, "test_the_handler_works_inside_an_event_loop", RuntimeError),
    ],
)
def test_a_broken_handler_is_detected(handler: type, test: str, error: type[BaseException], tmp_path: Path) -> None:
    suite = type("Suite", (FilesHandlerTests,), {"handler": handler()})()
    with pytest.raises(error):
        getattr(suite, test)(EXAMPLE, tmp_path)


class Greedy:
    """A plugin that claims every type."""

    @hookimpl
    def ckpt_files_handler(self, value_type: type) -> object:
        return OwnHandler()


def test_a_plugin_that_claims_all_types_is_detected() -> None:
    with pytest.raises(AssertionError, match="ckpt_files_handler handles"):
        suite_of(Greedy()).test_the_plugin_claims_no_unrelated_type()
