"""Containers: dicts, lists, tuples, named tuples, dataclasses and classes of attrs."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptcore.model.tree import Attribute
from ckptcore.protocols import ContainerHandler, Flattened, Priority


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
    """Return True if a value is the same after a trip through JSON."""
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
        setter: object = type(target).__setattr__  # frozen classes refuse
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


def is_builtin_container(handler: ContainerHandler | None) -> bool:
    """Return True for a handler of dicts, lists or tuples of this module."""
    return isinstance(handler, _Dict | _List | _Tuple)
