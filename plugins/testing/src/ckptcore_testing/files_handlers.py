"""Conformance tests of handlers of objects that write their own files."""

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


@dataclass(frozen=True, slots=True)
class FilesExample:
    """An object for tests of a handler.

    Attributes:
        name: the name in test ids.
        make: creates a new object, always with the same state.
        make_other: creates a compatible object with another state.
        change: changes the state of an object, like a program that continues during a background save.
        fingerprint: returns the state of an object without the handler, in a form that can be compared with ``==``.
    """

    name: str
    make: Callable[[], Any]
    make_other: Callable[[], Any]
    change: Callable[[Any], object]
    fingerprint: Callable[[Any], object]


class FilesHandlerTests:
    """Conformance tests of a files handler. Subclass it and define `handler` and `examples`.

    Attributes:
        handler: the handler.
        examples: objects of every kind that it supports.
    """

    handler: FilesHandler
    examples: Sequence[FilesExample] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise tests with the examples."""
        if "example" in metafunc.fixturenames:
            metafunc.parametrize("example", list(self.examples), ids=[example.name for example in self.examples])

    def test_there_are_examples(self) -> None:
        assert self.examples, "define the class attribute `examples` with at least one FilesExample"
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
        shutil.rmtree(stored)  # as the core does after a load
        assert example.fingerprint(loaded) == example.fingerprint(example.make())

    def test_save_does_not_change_the_object(self, example: FilesExample, tmp_path: Path) -> None:
        value = example.make()
        self._saved(value, tmp_path)
        assert example.fingerprint(value) == example.fingerprint(example.make())

    def test_a_save_has_the_state_at_the_time_of_the_call(self, example: FilesExample, tmp_path: Path) -> None:
        value = example.make()
        directory = _empty(tmp_path / "saved")
        rest = self.handler.save(value, directory)
        example.change(value)
        _finish(rest)
        loaded = self.handler.load(example.make_other(), _stored(directory, tmp_path))
        assert example.fingerprint(loaded) == example.fingerprint(example.make()), "the save contains a later state"

    def test_overlapping_saves_are_independent(self, example: FilesExample, tmp_path: Path) -> None:
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

    def test_the_handler_works_inside_an_event_loop(self, example: FilesExample, tmp_path: Path) -> None:
        async def program() -> object:
            stored = self._saved(example.make(), tmp_path)
            return self.handler.load(example.make_other(), stored)

        assert example.fingerprint(asyncio.run(program())) == example.fingerprint(example.make())

    def test_loading_without_files_is_an_error(self, example: FilesExample, tmp_path: Path) -> None:
        with pytest.raises(Exception):  # noqa: B017  # any type of error is allowed
            self.handler.load(example.make_other(), _empty(tmp_path / "empty"))

    def _saved(self, value: object, tmp_path: Path) -> Path:
        """Save a value, and move its files to another directory after the save. Return the new directory."""
        directory = _empty(tmp_path / "saved")
        _finish(self.handler.save(value, directory))
        return _stored(directory, tmp_path)


def _empty(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _stored(directory: Path, tmp_path: Path) -> Path:
    """Move the files of a save to another directory, and return it."""
    stored = tmp_path / "stored"
    shutil.copytree(directory, stored)
    shutil.rmtree(directory)
    return stored


def _finish(rest: Continuation | None) -> None:
    """Run the rest of a save on another thread, like the core."""
    if rest is None:
        return
    assert callable(rest), f"save must return None or a function without arguments, found {rest!r:.100}"
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
