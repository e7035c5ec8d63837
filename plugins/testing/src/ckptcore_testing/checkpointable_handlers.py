"""Conformance tests of checkpointable handlers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ckptcore.protocols import CheckpointableHandler


@dataclass(frozen=True, slots=True)
class CheckpointableExample:
    """An object for tests of a handler.

    Attributes:
        name: the name in test ids.
        make: creates a new object, always with the same state.
        make_other: creates a compatible object with another state.
        fingerprint: returns the state of an object without the handler, in a form that can be compared with ``==``:
            bytes, numbers and strings, or tuples and dicts of such values.
    """

    name: str
    make: Callable[[], Any]
    make_other: Callable[[], Any]
    fingerprint: Callable[[Any], object]


class CheckpointableHandlerTests:
    """Conformance tests of a checkpointable handler. Subclass it and define `handler` and `examples`.

    Attributes:
        handler: the handler.
        examples: objects of every kind that it supports.
    """

    handler: CheckpointableHandler
    examples: Sequence[CheckpointableExample] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise tests with the examples."""
        if "example" in metafunc.fixturenames:
            metafunc.parametrize("example", list(self.examples), ids=[example.name for example in self.examples])

    def copied(self, state: object) -> object:
        """Return a deep copy of a state, in place of a save and a load."""
        return copy.deepcopy(state)

    def test_there_are_examples(self) -> None:
        assert self.examples, "define the class attribute `examples` with at least one CheckpointableExample"
        assert type(self.handler.priority) is int

    def test_examples_differ(self, example: CheckpointableExample) -> None:
        assert example.fingerprint(example.make()) == example.fingerprint(example.make())
        assert example.fingerprint(example.make()) != example.fingerprint(example.make_other())

    def test_flatten_does_not_change_the_object(self, example: CheckpointableExample) -> None:
        value = example.make()
        state = self.handler.flatten(value)
        assert state is not value, "flatten must return a tree, not the object"
        self.handler.flatten(value)
        assert example.fingerprint(value) == example.fingerprint(example.make())

    def test_a_value_with_elements_has_memory(self, example: CheckpointableExample) -> None:
        assert self.handler.has_memory(example.make()) is True

    def test_restore_copies_the_state_into_another_object(self, example: CheckpointableExample) -> None:
        state = self.copied(self.handler.flatten(example.make()))
        target = example.make_other()
        self.handler.restore(target, state)
        assert example.fingerprint(target) == example.fingerprint(example.make())

    def test_restoring_its_own_state_changes_nothing(self, example: CheckpointableExample) -> None:
        target = example.make()
        # The state may contain the arrays of the target, as after a load that filled them in place.
        self.handler.restore(target, self.handler.flatten(target))
        assert example.fingerprint(target) == example.fingerprint(example.make())

    def test_unflatten_accepts_a_loaded_state(self, example: CheckpointableExample) -> None:
        state = self.copied(self.handler.flatten(example.make()))
        loaded = self.handler.unflatten(example.make_other(), state)
        if not self.handler.is_object:  # a new value of the same type
            assert type(loaded) is type(example.make())
            assert example.fingerprint(loaded) == example.fingerprint(example.make())
        target = example.make_other()
        again = self.handler.flatten(loaded) if type(loaded) is type(target) else loaded
        self.handler.restore(target, again)
        assert example.fingerprint(target) == example.fingerprint(example.make())
