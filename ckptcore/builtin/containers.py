"""Containers: dicts, lists, tuples, named tuples, dataclasses, classes of attrs, sets and deques."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ckptcore.builtin.stateful import state_to_load
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from ckptcore.model.tree import Attribute
from ckptcore.protocols import CheckpointableHandler, ContainerHandler, Flattened, Priority


def _qualified(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _Dict(ContainerHandler):
    """dict, OrderedDict and subclasses. Attributes of an instance are kept."""

    priority = Priority.EXACT

    def flatten(self, value: dict[Any, Any]) -> Flattened:
        value_type = type(value)
        if value_type is dict:
            return Flattened("dict", tuple(value), tuple(value.values()))
        kind = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
        note = None if value_type is OrderedDict else _qualified(value)
        if kind == "dict":
            return Flattened("dict", tuple(value), tuple(value.values()), note)
        attributes = {name: held for name, held in vars(value).items() if _is_json(held)}
        return Flattened("OrderedDict", tuple(value), tuple(value.values()), note, attributes or None)

    def unflatten(self, like: dict[Any, Any], children: Sequence[object]) -> object:
        if type(like) is dict:
            return dict(zip(like, children, strict=True))
        result = copy.copy(like)
        for key, child in zip(like, children, strict=True):
            result[key] = child
        return result

    def replaceable(self, target: dict[Any, Any]) -> Collection[int]:
        return range(len(target))

    def replace(self, target: dict[Any, Any], children: Mapping[int, object]) -> None:
        keys = list(target)
        for position, child in children.items():
            target[keys[position]] = child


def _is_json(held: object) -> bool:
    """Return True if a value does not change when it is encoded to JSON and decoded."""
    if isinstance(held, dict):
        return all(type(key) is str for key in held) and all(map(_is_json, held.values()))
    if type(held) is list:
        return all(map(_is_json, held))
    return held is None or type(held) in (bool, int, str)


class _List(ContainerHandler):
    """list and subclasses."""

    priority = Priority.EXACT

    def flatten(self, value: list[Any]) -> Flattened:
        note = None if type(value) is list else _qualified(value)
        return Flattened("list", range(len(value)), value, note)

    def unflatten(self, like: list[Any], children: Sequence[object]) -> object:
        if type(like) is list:
            return list(children)
        result = copy.copy(like)
        result[:] = children
        return result

    def replaceable(self, target: list[Any]) -> Collection[int]:
        return range(len(target))

    def replace(self, target: list[Any], children: Mapping[int, object]) -> None:
        for position, child in children.items():
            target[position] = child


class _Tuple(ContainerHandler):
    """tuple, without subclasses."""

    priority = Priority.EXACT

    def flatten(self, value: tuple[Any, ...]) -> Flattened:
        return Flattened("tuple", range(len(value)), value)

    def unflatten(self, like: tuple[Any, ...], children: Sequence[object]) -> object:
        return tuple(children)


class _NamedTuple(ContainerHandler):
    """Named tuples of `collections.namedtuple` and `typing.NamedTuple`."""

    priority = Priority.EXACT

    def flatten(self, value: Any) -> Flattened:
        return Flattened("object", tuple([Attribute(name) for name in value._fields]), tuple(value), _qualified(value))

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        return type(like)._make(children)


class _Dataclass(ContainerHandler):
    """Instances of dataclasses and of attrs: every field that is set is a child. Other attributes are kept."""

    priority = Priority.FALLBACK

    def flatten(self, value: Any) -> Flattened:
        names = _field_names(value)
        children = tuple([getattr(value, name) for name in names])
        return Flattened("object", tuple([Attribute(name) for name in names]), children, _qualified(value))

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        result = copy.copy(like)
        for name, child in zip(_field_names(like), children, strict=True):
            object.__setattr__(result, name, child)  # works for frozen dataclasses too
        return result

    def replaceable(self, target: Any) -> Collection[int]:
        setter: object = type(target).__setattr__  # frozen classes override it to raise an error
        return range(len(_field_names(target)) if setter is object.__setattr__ else 0)

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        names = _field_names(target)
        for position, child in children.items():
            setattr(target, names[position], child)


def _field_names(value: Any) -> list[str]:
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else type(value).__attrs_attrs__
    return [field.name for field in fields if hasattr(value, field.name)]


def container_handler(value_type: type) -> ContainerHandler | None:
    """Return the handler for containers of a type, or None."""
    if issubclass(value_type, dict):
        return _Dict()
    if issubclass(value_type, list):
        return _List()
    if value_type is tuple:
        return _Tuple()
    if issubclass(value_type, tuple) and hasattr(value_type, "_fields") and hasattr(value_type, "_make"):
        return _NamedTuple()
    if dataclasses.is_dataclass(value_type) or hasattr(value_type, "__attrs_attrs__"):
        return _Dataclass()
    return None


BUILTIN_CONTAINERS: Final = (_Dict, _List, _Tuple)
"""The types of the handlers of dicts, lists and tuples."""


_IN_SETS: Final = (type(None), bool, int, float, complex, str, bytes, np.generic)


class _Collection(CheckpointableHandler):
    """A collection that is stored as a list. A load replaces all of its elements with the stored elements."""

    priority = Priority.EXACT
    is_object = False

    def unflatten(self, like: Any, state: Any) -> object:
        """Return a collection with the attributes of `like` and the loaded elements."""
        result = copy.copy(like)
        getattr(result, "__dict__", {}).update(getattr(like, "__dict__", {}))  # `copy.copy` of a deque omits them
        self.restore(result, state)
        return result


class _Deque(_Collection):
    """`collections.deque` and subclasses. A load keeps the ``maxlen`` of the requested deque."""

    def flatten(self, value: deque[Any]) -> object:
        """Return the elements as a list."""
        return list(value)

    def flatten_to_load(self, value: deque[Any], stored: object) -> object:
        """Return the stored elements, with the types of the deque's own elements.

        Raises:
            TreeMismatchError: the stored value is not a list, or is longer than ``maxlen``.
        """
        elements = _expect_list(value, stored)
        if value.maxlen is not None and len(elements) > value.maxlen:
            difference = f"{len(elements)} elements are stored, a deque of at most {value.maxlen} is requested"
            raise TreeMismatchError(f"{difference}; request one with maxlen={len(elements)} or more", [difference])
        return state_to_load(list(value), list(elements))

    def restore(self, target: deque[Any], state: Any) -> None:
        """Replace the elements."""
        target.clear()
        target.extend(state)


class _Set(_Collection):
    """`set` and subclasses. The elements are numbers, text, bytes, None, or tuples of them."""

    def flatten(self, value: set[Any]) -> object:
        """Return the elements as a sorted list, which is equal on all processes.

        Raises:
            UnsupportedLeafError: an element has another type.
        """
        for element in value:
            _expect_plain(element)
        try:
            return sorted(value)
        except TypeError:  # elements of several types
            return sorted(value, key=lambda element: (type(element).__qualname__, repr(element)))

    def flatten_to_load(self, value: set[Any], stored: object) -> object:
        """Return the stored elements."""
        return state_to_load([], list(_expect_list(value, stored)))

    def restore(self, target: set[Any], state: Any) -> None:
        """Replace the elements."""
        target.clear()
        target.update(state)


def collection_handler(value_type: type) -> CheckpointableHandler | None:
    """Return the handler for sets and deques of a type, or None."""
    if issubclass(value_type, deque):
        return _Deque()
    return _Set() if issubclass(value_type, set) else None


def _expect_list(value: object, stored: object) -> Sequence[Any]:
    if isinstance(stored, list | tuple):
        return stored
    difference = f"a {type(value).__qualname__} is requested, a {type(stored).__qualname__} is stored"
    raise TreeMismatchError(f"{difference}; request what is stored", [difference])


def _expect_plain(element: object) -> None:
    if type(element) is tuple:
        for child in element:
            _expect_plain(child)
    elif type(element) not in _IN_SETS and not isinstance(element, np.generic):
        raise UnsupportedLeafError(
            f"a set with a {type(element).__module__}.{type(element).__qualname__} is not stored, only one of numbers, "
            "text, bytes and None, and tuples of these: save a list of its elements"
        )
