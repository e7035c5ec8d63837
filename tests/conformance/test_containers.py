"""The container handlers of the core satisfy the protocol."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from ckptcore_testing import ContainerExample, ContainerHandlerTests

from ckptcore.builtin.containers import container_handler
from ckptcore.protocols import ContainerHandler


class Pair(NamedTuple):
    """A typed named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    """A dataclass."""

    weight: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    weight: Any
    bias: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass with slots."""

    weight: Any
    bias: Any


class Registry(dict[str, Any]):
    """A dict with an additional attribute."""

    label = "class"


def _registry() -> Registry:
    registry = Registry(a=np.ones(1), b=np.ones(2))
    registry.label = "instance"
    return registry


class Items(list[Any]):
    """A subclass of list."""


def _handler(value: object) -> ContainerHandler:
    handler = container_handler(type(value))
    assert handler is not None
    return handler


def _mapping(name: str, make: Callable[[], Any]) -> ContainerExample:
    return ContainerExample(name, make, lambda value: list(value.values()))


def _fields(name: str, make: Callable[[], Any]) -> ContainerExample:
    def children(value: Any) -> Sequence[Any]:
        return [getattr(value, field.name) for field in dataclasses.fields(value)]

    return ContainerExample(name, make, children)


class TestDicts(ContainerHandlerTests):
    handler = _handler({})
    examples = (
        _mapping("dict", lambda: {"b": np.ones(1), "a": np.ones(2), 0: None, "0": "zero"}),
        _mapping("empty dict", dict),
        _mapping("OrderedDict", lambda: OrderedDict(b=np.ones(1), a=np.ones(2))),
        _mapping("defaultdict", lambda: defaultdict(list, {"x": np.ones(1)})),
        ContainerExample(
            "subclass", _registry, lambda value: list(value.values()), lambda first, second: first.label == second.label
        ),
    )


class TestLists(ContainerHandlerTests):
    handler = _handler([])
    examples = (
        ContainerExample("list", lambda: [np.ones(1), [], "three"], list),
        ContainerExample("empty list", list, list),
        ContainerExample("subclass", lambda: Items([np.ones(1), 2]), list),
    )


class TestTuples(ContainerHandlerTests):
    handler = _handler(())
    examples = (ContainerExample("tuple", lambda: (np.ones(1), (), 3), list),)


class TestNamedTuples(ContainerHandlerTests):
    handler = _handler(Pair(1, 2))
    examples = (ContainerExample("NamedTuple", lambda: Pair(np.ones(1), None), list),)


class TestDataclasses(ContainerHandlerTests):
    handler = _handler(Plain(1, 2))
    examples = (
        _fields("plain", lambda: Plain(np.ones(1), np.ones(2))),
        _fields("frozen", lambda: Frozen(np.ones(1), np.ones(2))),
        _fields("slots", lambda: Slotted(np.ones(1), np.ones(2))),
    )
