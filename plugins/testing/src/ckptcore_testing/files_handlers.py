"""What every handler of objects that write their own files must do, as tests to inherit."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptcore.protocols import Continuation, FilesHandler

__all__ = ["FilesExample", "FilesHandlerTests"]


@dataclass(frozen=True, slots=True)
class FilesExample:
    """An object to test a handler with.

    Attributes:
        name: shown in the names of the tests.
        make: makes the object, new each time, always with the same state.
        make_other: makes an object that can take that state and has another.
        change: changes the state of an object, as the program does that goes on while a save is written.
        fingerprint: the state of an object, found without the handler, as something that compares with ``==``.
    """

    name: str
    make: Callable[[], Any]
    make_other: Callable[[], Any]
    change: Callable[[Any], object]
    fingerprint: Callable[[Any], object]


class FilesHandlerTests:
    """Inherit, give `handler` and `examples`, and pytest collects the tests.

    Attributes:
        handler: the handler.
        examples: objects of every sort it takes.
    """

    handler: FilesHandler
    examples: Sequence[FilesExample] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per example."""
        if "example" in metafunc.fixturenames:
            metafunc.parametrize("example", list(self.examples), ids=[one.name for one in self.examples])

    def test_has_examples(self) -> None:
        assert self.examples, "give the class attribute `examples` at least one FilesExample"
        assert type(self.handler.priority) is int

    def test_examples_differ(self, example: FilesExample) -> None:
        expected = example.fingerprint(example.make())
        assert expected == example.fingerprint(example.make())
        assert expected != example.fingerprint(example.make_other())
        changed = example.make()
        example.change(changed)
        assert expected != example.fingerprint(changed)

    def test_load_restores_what_was_saved(self, example: FilesExample, tmp_path: Path) -> None:
        stored = self._saved(example.make(), tmp_path)
        loaded = self.handler.load(example.make_other(), stored)
        shutil.rmtree(stored)  # as the caller does
        assert example.fingerprint(loaded) == example.fingerprint(example.make())

    def test_save_leaves_the_object_alone(self, example: FilesExample, tmp_path: Path) -> None:
        value = example.make()
        self._saved(value, tmp_path)
        assert example.fingerprint(value) == example.fingerprint(example.make())

    def test_a_save_holds_the_state_of_when_it_was_called(self, example: FilesExample, tmp_path: Path) -> None:
        value = example.make()
        directory = _empty(tmp_path / "saved")
        rest = self.handler.save(value, directory)
        example.change(value)
        _finish(rest)
        loaded = self.handler.load(example.make_other(), _stored(directory, tmp_path))
        assert example.fingerprint(loaded) == example.fingerprint(example.make()), "what was saved is what came later"

    def test_saves_that_overlap_stay_apart(self, example: FilesExample, tmp_path: Path) -> None:
        directories = [_empty(tmp_path / name) for name in ("first", "second")]
        rests = [
            self.handler.save(make(), directory)
            for make, directory in zip((example.make, example.make_other), directories, strict=True)
        ]
        for rest in reversed(rests):
            _finish(rest)
        first = self.handler.load(example.make_other(), directories[0])
        second = self.handler.load(example.make(), directories[1])
        assert example.fingerprint(first) == example.fingerprint(example.make())
        assert example.fingerprint(second) == example.fingerprint(example.make_other())

    def test_it_works_where_an_event_loop_runs(self, example: FilesExample, tmp_path: Path) -> None:
        async def program() -> object:
            stored = self._saved(example.make(), tmp_path)
            return self.handler.load(example.make_other(), stored)

        assert example.fingerprint(asyncio.run(program())) == example.fingerprint(example.make())

    def test_nothing_is_loaded_where_the_files_are_missing(self, example: FilesExample, tmp_path: Path) -> None:
        with pytest.raises(Exception):  # noqa: B017  # of whatever sort
            self.handler.load(example.make_other(), _empty(tmp_path / "empty"))

    def _saved(self, value: object, tmp_path: Path) -> Path:
        """A directory with a finished save of a value, at another place than where it was written."""
        directory = _empty(tmp_path / "saved")
        _finish(self.handler.save(value, directory))
        return _stored(directory, tmp_path)


def _empty(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _stored(directory: Path, tmp_path: Path) -> Path:
    """What a load is given: the files of a save, at another place."""
    stored = tmp_path / "stored"
    shutil.copytree(directory, stored)
    shutil.rmtree(directory)
    return stored


def _finish(rest: Continuation | None) -> None:
    """Run the rest of a save as the core does: on another thread."""
    if rest is None:
        return
    assert callable(rest), f"save returns None or a function without arguments, found {rest!r:.100}"
    failures: list[BaseException] = []

    def work() -> None:
        try:
            rest()
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
