"""What every checkpointable handler must do, as tests to inherit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ckptcore.protocols import CheckpointableHandler

__all__ = ["CheckpointableExample", "CheckpointableHandlerTests"]


@dataclass(frozen=True, slots=True)
class CheckpointableExample:
    """An object to test a handler with.

    Attributes:
        name: shown in the names of the tests.
        make: makes the object, new each time, always with the same state.
        make_other: makes an object that can take that state and has another.
        fingerprint: the state of an object, found without the handler, as something that compares with ``==``: bytes,
            numbers, strings, tuples and dicts of them.
    """

    name: str
    make: Callable[[], Any]
    make_other: Callable[[], Any]
    fingerprint: Callable[[Any], object]


class CheckpointableHandlerTests:
    """Inherit, give `handler` and `examples`, and pytest collects the tests.

    Attributes:
        handler: the handler.
        examples: objects of every sort it takes.
    """

    handler: CheckpointableHandler
    examples: Sequence[CheckpointableExample] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per example."""
        if "example" in metafunc.fixturenames:
            metafunc.parametrize("example", list(self.examples), ids=[one.name for one in self.examples])

    def copied(self, state: object) -> object:
        """A state with arrays of its own, as a load gives it: containers and leaves copied deeply."""
        return copy.deepcopy(state)

    def test_has_examples(self) -> None:
        assert self.examples, "give the class attribute `examples` at least one CheckpointableExample"
        assert type(self.handler.priority) is int

    def test_examples_differ(self, example: CheckpointableExample) -> None:
        assert example.fingerprint(example.make()) == example.fingerprint(example.make())
        assert example.fingerprint(example.make()) != example.fingerprint(example.make_other())

    def test_flatten_leaves_the_object_alone(self, example: CheckpointableExample) -> None:
        value = example.make()
        state = self.handler.flatten(value)
        assert state is not value, "flatten gives a tree, not the object again"
        self.handler.flatten(value)
        assert example.fingerprint(value) == example.fingerprint(example.make())

    def test_restore_puts_the_state_into_another_object(self, example: CheckpointableExample) -> None:
        state = self.copied(self.handler.flatten(example.make()))
        target = example.make_other()
        self.handler.restore(target, state)
        assert example.fingerprint(target) == example.fingerprint(example.make())

    def test_restore_into_itself_changes_nothing(self, example: CheckpointableExample) -> None:
        target = example.make()
        # The arrays of this state may be those of the target: what could be filled in place already was.
        self.handler.restore(target, self.handler.flatten(target))
        assert example.fingerprint(target) == example.fingerprint(example.make())

    def test_unflatten_takes_a_loaded_state(self, example: CheckpointableExample) -> None:
        state = self.copied(self.handler.flatten(example.make()))
        loaded = self.handler.unflatten(example.make_other(), state)
        target = example.make_other()
        again = self.handler.flatten(loaded) if type(loaded) is type(target) else loaded
        self.handler.restore(target, again)
        assert example.fingerprint(target) == example.fingerprint(example.make())
