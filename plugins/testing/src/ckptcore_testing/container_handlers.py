"""Conformance tests of container handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest

from ckptcore.model import Attribute
from ckptcore.model.tree import NodeKind
from ckptcore.protocols import ContainerHandler, Flattened


@dataclass(frozen=True, slots=True)
class ContainerExample:
    """A container for tests of a handler.

    Attributes:
        name: the name in test ids.
        make: creates a new container.
        children: returns the children without the handler, in the handler's order.
        same_static: returns True if two containers are equal apart from their children.
    """

    name: str
    make: Callable[[], Any]
    children: Callable[[Any], Sequence[Any]]
    same_static: Callable[[Any, Any], bool] = lambda first, second: True


class ContainerHandlerTests:
    """Conformance tests of a container handler. Subclass it and define `handler` and `examples`.

    Attributes:
        handler: the handler.
        examples: containers of every kind that it supports, also empty ones.
    """

    handler: ContainerHandler
    examples: Sequence[ContainerExample] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise tests with the examples."""
        if "example" in metafunc.fixturenames:
            metafunc.parametrize("example", list(self.examples), ids=[example.name for example in self.examples])

    def replacement(self, child: object) -> object:
        """Return another child for the same position. Default: a new array."""
        return np.zeros(())

    def test_there_are_examples(self) -> None:
        assert self.examples, "define the class attribute `examples` with at least one ContainerExample"
        assert type(self.handler.priority) is int

    def test_flatten_returns_every_child_under_a_unique_key(self, example: ContainerExample) -> None:
        value = example.make()
        flattened = self.handler.flatten(value)
        _assert_flattened(flattened)
        expected = example.children(value)
        assert len(flattened.children) == len(expected)
        for child, expected_child in zip(flattened.children, expected, strict=True):
            assert child is expected_child, "flatten hands out the children themselves, in order"

    def test_flatten_is_repeatable(self, example: ContainerExample) -> None:
        value = example.make()
        first, second = self.handler.flatten(value), self.handler.flatten(value)
        assert (first.kind, first.type) == (second.kind, second.type)
        assert list(first.keys) == list(second.keys)
        assert all(map(_is, first.children, second.children))

    def test_flatten_has_equal_keys_for_equal_containers(self, example: ContainerExample) -> None:
        first, second = self.handler.flatten(example.make()), self.handler.flatten(example.make())
        assert list(first.keys) == list(second.keys), "a second process would save other paths"
        assert (first.kind, first.type) == (second.kind, second.type)

    def test_unflatten_is_the_inverse_of_flatten(self, example: ContainerExample) -> None:
        value = example.make()
        children = list(self.handler.flatten(value).children)
        made = self.handler.unflatten(value, children)
        assert type(made) is type(value)
        assert made is not value or not children, "unflatten must create a new container"
        assert example.same_static(made, value), "unflatten must keep static data"
        assert list(self.handler.flatten(made).keys) == list(self.handler.flatten(value).keys)
        assert all(map(_is, example.children(made), children))

    def test_unflatten_accepts_other_children(self, example: ContainerExample) -> None:
        value = example.make()
        before = list(example.children(value))
        others = [self.replacement(child) for child in self.handler.flatten(value).children]
        made = self.handler.unflatten(value, tuple(others))
        assert all(map(_is, example.children(made), others)), "children must be in the order of flatten"
        assert len(example.children(made)) == len(others)
        assert all(map(_is, example.children(value), before)), "the container it is like was changed"
        assert len(example.children(value)) == len(before)

    def test_replace_changes_the_container_itself(self, example: ContainerExample) -> None:
        value = example.make()
        before, children = example.children(value), list(self.handler.flatten(value).children)
        replaceable = self.handler.replaceable(value)
        others = {position: self.replacement(children[position]) for position in replaceable}
        if others:
            self.handler.replace(value, others)
        expected = [others.get(position, child) for position, child in enumerate(before)]
        assert all(map(_is, example.children(value), expected)), "replace must change only the given children"
        assert len(example.children(value)) == len(before)
        assert type(self.handler.is_object(value)) is type(self.handler.keeps_identity(value)) is bool
        assert type(self.handler.remedy) is str


def _assert_flattened(flattened: Flattened) -> None:
    """Fail unless the result of flatten conforms to the protocol."""
    keys = list(flattened.keys)
    assert flattened.kind in get_args(NodeKind), f"expected one of {get_args(NodeKind)}, found {flattened.kind!r}"
    assert len(keys) == len(flattened.children), "one key for each child"
    assert len(set(keys)) == len(keys), f"keys are unique, found {keys}"
    assert all(type(key) in (int, bool, str, tuple, Attribute) for key in keys), f"invalid keys: {keys}"
    if flattened.kind in ("list", "tuple"):
        assert keys == list(range(len(keys))), f"the keys of a {flattened.kind} are its indices, found {keys}"
    assert flattened.type is None or (type(flattened.type) is str and flattened.type)
    if flattened.kind == "object":
        assert flattened.type is not None, "an object needs the name of its type"


def _is(first: object, second: object) -> bool:
    return first is second
