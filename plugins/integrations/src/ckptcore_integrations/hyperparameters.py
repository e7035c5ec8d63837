"""Hyperparameters of a training, of any type. They are saved as plain data, and regain their types if this is safe.

Each value is saved in a plain form that any program reads: text, numbers, lists, dicts and arrays. A list with the type
of each value, by path, is saved too. A load uses this list to restore the types. A load imports nothing that the
checkpoint names, and calls only the constructors in the table of this module. Values of other types are saved as text.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import inspect
import ipaddress
import json
import operator
import pathlib
import re
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

import ckptcore
from ckptcore import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import logger_named
from ckptcore.protocols import Layout

logger = logger_named("ckptcore.integrations.hyperparameters")

_Path: TypeAlias = tuple[str | int, ...]
_Type: TypeAlias = list[str | int]
"""The path of a value in a state, followed by the name of its type."""

_ATOMS: Final = (type(None), bool, int, float, complex, str, bytes)
_MOST_LEVELS: Final = 50
_MOST_CHARACTERS: Final = 1000
_ARRAY: Final = "numpy.ndarray"
_FROZEN: Final = "parameter without gradients"
_TYPES: Final = "ckptcore_types"
"""Name of the entry of a saved state that has the types of values, as JSON."""


class Notes:
    """Conversion of states with notes, such as hyperparameters. Warns once of values that will load as text."""

    def __init__(self, names: Collection[str], *, layout: str | Layout, context: Context) -> None:
        """Choose the notes.

        Args:
            names: the entries of a state that are notes.
            layout: the layout of the saves.
            context: the options of saves of this process alone.
        """
        self._names = names
        self._layout = layout
        self._context = context
        self._has_warned = False

    def plain(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with its notes in plain form. A note that cannot be converted becomes text."""
        conversion = _Conversion(self._is_savable)
        result = dict(state)
        for name, value in state.items():
            if name in self._names:
                result[name] = conversion.convert(value, (name,))
            else:
                conversion.types.extend(_paths_of_arrays(value, (name,)))
        if conversion.types:
            result[_TYPES] = json.dumps(conversion.types)
        if conversion.changed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "hyperparameters that a load returns as text, or in another plain form: %s. Give them to the module "
                "when it is loaded, or leave them out, as by save_hyperparameters(ignore=[...])",
                ", ".join(conversion.changed),
            )
        return result

    @staticmethod
    def restore(state: dict[str, Any]) -> None:
        """Restore the types of the notes of a loaded state, where this is safe. Other notes remain plain."""
        types = state.pop(_TYPES, None)
        try:
            typed = [(path, name) for *path, name in json.loads(types)] if isinstance(types, str) else []
        except (TypeError, ValueError, RecursionError):  # a hostile checkpoint
            return
        for path, name in typed:
            try:
                _replace_at(state, path, functools.partial(_decode, name))
            except Exception as error:  # noqa: BLE001  # any constructor can fail, but a note must not fail a load
                # The cause is another version of a library, a class that is not imported, or a hostile checkpoint.
                logger.debug("%s stays in its plain form: %s", _dotted(tuple(path)), error)

    def _is_savable(self, array: object) -> bool:
        try:
            ckptcore.check({"": array}, layout=self._layout, context=self._context)
        except CheckpointError:
            return False
        return True


def _paths_of_arrays(value: object, path: _Path) -> Iterator[_Type]:
    """Return the types of the NumPy arrays in plain containers. A load with PyTorch returns tensors for them."""
    if type(value) is np.ndarray:
        yield [*path, _ARRAY]
    elif type(value) in (dict, list, tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):  # type: ignore[arg-type]
            if type(key) in (str, int):
                yield from _paths_of_arrays(part, (*path, key))


class _Conversion:
    """A conversion to the plain form, with the types that it found."""

    def __init__(self, is_savable: Callable[[object], bool]) -> None:
        self._is_savable = is_savable
        self._containers: list[int] = []
        self.types: list[_Type] = []
        self.changed: list[str] = []

    def convert(self, value: Any, path: _Path) -> object:
        """Return the plain form of a value."""
        if type(value) in _ATOMS:
            return value
        if id(value) in self._containers or len(self._containers) > _MOST_LEVELS:
            return self._text(value, path)
        self._containers.append(id(value))
        types, changed = len(self.types), len(self.changed)
        try:
            return self._convert(value, path)
        except Exception:  # noqa: BLE001  # any object can fail, but a note must not fail a save
            del self.types[types:], self.changed[changed:]
            return self._text(value, path)
        finally:
            self._containers.pop()

    def _convert(self, value: Any, path: _Path) -> object:
        kind = type(value)
        if kind in (dict, list, tuple):
            return self._container(value, path)
        if isinstance(value, np.ndarray | np.generic | torch.Tensor):
            return self._array(value, path)
        if isinstance(value, enum.Enum) and _is_named(value):
            return self._of_program("enum", value.name or "", value, path)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self._of_program("named tuple", self._parts(tuple(value), path), value, path)
        if (name := _name(kind)) in _KINDS:
            plain = self._parts(_KINDS[name].encode(value), path)
            self.types.append([*path, name])
            return plain
        if _has_fields(kind):
            return self._of_program("fields", self._parts(_fields(value), path), value, path)
        if isinstance(value, type) and _name(value) in _TYPES_OF_HYPERPARAMETERS:
            self.types.append([*path, "type"])
            return _name(value)
        if isinstance(value, Mapping | list | tuple):
            self._note(value, path)
            return self._container(value, path)
        base: Any
        for base in (str, bytes, int, float):
            if isinstance(value, base):
                self._note(value, path)
                made: object = base(value)
                return made
        return self._text(value, path)

    def _array(self, value: Any, path: _Path) -> object:
        # A tensor subclass may be a shard of a tensor that other processes save too.
        if not isinstance(value, np.generic) and type(value) not in (np.ndarray, torch.Tensor, torch.nn.Parameter):
            return self._text(value, path)
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            return self._text(value, path)
        if not self._is_savable(value):
            return self._text(value, path)
        if not isinstance(value, np.generic) and type(value) is not torch.Tensor:
            is_frozen = isinstance(value, torch.nn.Parameter) and not value.requires_grad
            self.types.append([*path, _FROZEN if is_frozen else _name(type(value))])
        return value

    def _container(self, value: Any, path: _Path) -> object:
        if not isinstance(value, Mapping):
            return self._parts((list if isinstance(value, list) else tuple)(value), path)
        if all(type(key) in (str, int) for key in value):
            return self._parts(dict(value.items()), path)
        plain = self._parts([list(pair) for pair in value.items()], path)
        self.types.append([*path, "pairs"])
        return plain

    def _parts(self, value: Any, path: _Path) -> object:
        """Convert the parts of a dict, list or tuple."""
        if isinstance(value, dict):
            return {key: self.convert(part, (*path, key)) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.convert(part, (*path, index)) for index, part in enumerate(value)])
        return value

    def _of_program(self, kind: str, plain: object, value: object, path: _Path) -> object:
        """Return the plain form of an object whose class is defined by the program. A load finds the class by name."""
        value_class = type(value)
        if _imported(value_class.__module__, value_class.__qualname__) is value_class:
            self.types.append([*path, f"{kind}:{value_class.__module__}:{value_class.__qualname__}"])
        else:
            self._note(value, path)
        return plain

    def _text(self, value: object, path: _Path) -> str:
        self._note(value, path)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return _name(value)
        try:
            return repr(value)[:_MOST_CHARACTERS].encode(errors="backslashreplace").decode()
        except Exception:  # noqa: BLE001  # any object can fail
            return f"<{_name(type(value))}>"

    def _note(self, value: object, path: _Path) -> None:
        self.changed.append(f"{_dotted(path)} ({_name(type(value))})")


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _has_fields(kind: type) -> bool:
    """Return True for dataclasses and attrs classes that are not modules."""
    return (dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")) and not issubclass(
        kind, torch.nn.Module
    )


def _fields(value: Any) -> dict[str, object]:
    names = [field.name for field in getattr(value, "__attrs_attrs__", None) or dataclasses.fields(value)]
    return {**{name: getattr(value, name) for name in names}, **getattr(value, "__dict__", {})}


def _with_fields(kind: type, fields: Mapping[str, object]) -> object:
    """Return an object with these fields. Does not call `__init__`, which may do anything."""
    made: Any = object.__new__(kind)
    for name, value in fields.items():
        if isinstance(inspect.getattr_static(kind, name, None), types.MemberDescriptorType):  # a slot
            object.__setattr__(made, name, value)
        else:
            vars(made)[name] = value
    return made


def _imported(module: str, qualname: str) -> object:
    """Return an object of a module that the program has imported, or None. Runs no code."""
    member: object = sys.modules.get(module)
    for part in qualname.split("."):
        member = vars(member).get(part) if isinstance(member, types.ModuleType | type) else None
    return member


def _replace_at(container: Any, path: Sequence[Any], replace: Callable[[Any], object]) -> Any:
    """Replace a part of nested containers, and return the container. Tuples are rebuilt."""
    if not path:
        return replace(container)
    parts = list(container) if isinstance(container, tuple) else container
    parts[path[0]] = _replace_at(parts[path[0]], path[1:], replace)
    return tuple(parts) if isinstance(container, tuple) else parts


def _is_named(value: enum.Enum) -> bool:
    """Return True if names of members describe the whole value. A flag can have bits without a name."""
    if not value.name:
        return bool(value == type(value)(0))
    return all(member in type(value).__members__ for member in value.name.split("|"))


def _decode(name: str, plain: Any) -> object:
    """Return a value of a type.

    Raises:
        LookupError: the type is unknown, or its class is not imported.
        ValueError, TypeError and other errors of constructors: the plain form does not fit the type.
    """
    if name in _KINDS:
        return _KINDS[name].decode(plain)
    if name == _ARRAY:
        return plain.numpy() if isinstance(plain, torch.Tensor) else plain
    if name == "type":
        return _class(_TYPES_OF_HYPERPARAMETERS[plain])
    kind, module, qualname = name.split(":")
    value_class = _imported(module, qualname)
    if not isinstance(value_class, type):
        raise TypeError(f"{module}.{qualname} is no class that is imported")
    if kind == "enum" and issubclass(value_class, enum.Flag):
        members = [value_class.__members__[member] for member in plain.split("|") if member]
        return functools.reduce(operator.or_, members, value_class(0))
    if kind == "enum" and issubclass(value_class, enum.Enum):
        return value_class.__members__[plain]
    if (
        kind == "named tuple"
        and issubclass(value_class, tuple)
        and len(plain) == len(getattr(value_class, "_fields", ()))
    ):
        return tuple.__new__(value_class, plain)
    if kind == "fields" and _has_fields(value_class):
        return _with_fields(value_class, plain)
    raise LookupError(name)


class _Kind(NamedTuple):
    """A type that a load may create.

    Attributes:
        encode: returns the parts of a value, which are converted next.
        decode: returns the value that consists of these parts.
    """

    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


def _datetime_parts(value: datetime.datetime | datetime.time) -> list[object]:
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo, value.fold]


def _with_zone(naive: Any, zone: object, fold: int) -> object:
    return naive.replace(tzinfo=zone, fold=fold)


def _torch_constant(text: str) -> object:
    constant = getattr(torch, text.removeprefix("torch."))
    if not isinstance(constant, torch.dtype | torch.layout | torch.memory_format):
        raise TypeError(f"{text} is no constant")
    return constant


def _class(module_and_name: str) -> Any:
    module, _, name = module_and_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _config_parts(config: Any) -> object:
    """Return the parts of an OmegaConf container, with references resolved to values."""
    to_container = _class("omegaconf.OmegaConf").to_container
    try:
        return to_container(config, resolve=True)
    except Exception:  # noqa: BLE001  # a resolver of the program can fail
        return to_container(config, resolve=False)


def _config(parts: Any) -> object:
    """Return an OmegaConf container without references, because a reference can call a resolver of the program."""
    return _class("omegaconf.OmegaConf").create(_without_references(parts))


def _without_references(parts: Any) -> Any:
    if isinstance(parts, dict):
        return {key: _without_references(part) for key, part in parts.items()}
    if isinstance(parts, list):
        return list(map(_without_references, parts))
    return _REFERENCE.sub(r"\1\1\\${", parts) if isinstance(parts, str) else parts


_REFERENCE: Final = re.compile(r"(\\*)\$\{")
"""The start of a reference of OmegaConf, with the backslashes before it: an odd number of them escapes it."""


def _of_text(constructor: Callable[[Any], object]) -> _Kind:
    return _Kind(str, constructor)


_TYPES_OF_HYPERPARAMETERS: Final = {
    "dict": "builtins.dict",
    "argparse.Namespace": "argparse.Namespace",
    "lightning.fabric.utilities.data.AttributeDict": "lightning.fabric.utilities.data.AttributeDict",
    "omegaconf.dictconfig.DictConfig": "omegaconf.DictConfig",
    "omegaconf.listconfig.ListConfig": "omegaconf.ListConfig",
}
"""Classes that a checkpoint may name as the type of its hyperparameters, with the paths from which to import them."""

_KINDS: Final[Mapping[str, _Kind]] = {
    "pairs": _Kind(list, dict),  # a dict with a key that is neither text nor a number
    "set": _Kind(list, set),
    "frozenset": _Kind(list, frozenset),
    "bytearray": _Kind(bytes, lambda content: bytearray(memoryview(content))),  # bytearray(int) would allocate
    "range": _Kind(lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "slice": _Kind(lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)),
    "collections.deque": _Kind(
        lambda value: [list(value), value.maxlen], lambda parts: collections.deque(parts[0], parts[1])
    ),
    "collections.OrderedDict": _Kind(
        lambda value: [list(pair) for pair in value.items()], lambda pairs: collections.OrderedDict(pairs)
    ),
    "argparse.Namespace": _Kind(lambda value: dict(vars(value)), lambda parts: argparse.Namespace(**parts)),
    "types.SimpleNamespace": _Kind(lambda value: dict(vars(value)), lambda parts: types.SimpleNamespace(**parts)),
    "lightning.fabric.utilities.data.AttributeDict": _Kind(
        dict, lambda parts: _class("lightning.fabric.utilities.data.AttributeDict")(parts)
    ),
    "pathlib.PosixPath": _of_text(pathlib.Path),
    "pathlib.WindowsPath": _of_text(pathlib.Path),
    "pathlib.PurePosixPath": _of_text(pathlib.PurePosixPath),
    "pathlib.PureWindowsPath": _of_text(pathlib.PureWindowsPath),
    "datetime.datetime": _Kind(
        _datetime_parts, lambda parts: _with_zone(datetime.datetime.fromisoformat(parts[0]), parts[1], parts[2])
    ),
    "datetime.time": _Kind(
        _datetime_parts, lambda parts: _with_zone(datetime.time.fromisoformat(parts[0]), parts[1], parts[2])
    ),
    "datetime.date": _of_text(datetime.date.fromisoformat),
    "datetime.timedelta": _Kind(
        lambda value: [value.days, value.seconds, value.microseconds], lambda parts: datetime.timedelta(*parts)
    ),
    "datetime.timezone": _Kind(lambda value: list(value.__getinitargs__()), lambda parts: datetime.timezone(*parts)),
    "zoneinfo.ZoneInfo": _Kind(lambda value: value.key, zoneinfo.ZoneInfo),
    "decimal.Decimal": _of_text(decimal.Decimal),
    "fractions.Fraction": _Kind(
        lambda value: [value.numerator, value.denominator], lambda parts: fractions.Fraction(*parts)
    ),
    "uuid.UUID": _of_text(uuid.UUID),
    **{
        f"ipaddress.{kind.__name__}": _of_text(kind)
        for kind in (
            ipaddress.IPv4Address,
            ipaddress.IPv4Interface,
            ipaddress.IPv4Network,
            ipaddress.IPv6Address,
            ipaddress.IPv6Interface,
            ipaddress.IPv6Network,
        )
    },
    "torch.dtype": _of_text(_torch_constant),
    "torch.layout": _of_text(_torch_constant),
    "torch.memory_format": _of_text(_torch_constant),
    "torch.device": _of_text(torch.device),
    "torch.Size": _Kind(list, torch.Size),
    "torch.nn.parameter.Parameter": _Kind(lambda value: value, torch.nn.Parameter),
    _FROZEN: _Kind(lambda value: value, lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    **{_name(type(np.dtype(code))): _Kind(lambda value: value.str, np.dtype) for code in "?bhilqBHILQefdgFDGSUmM"},
    "omegaconf.dictconfig.DictConfig": _Kind(_config_parts, _config),
    "omegaconf.listconfig.ListConfig": _Kind(_config_parts, _config),
}
"""Types that a load may create, by name. Their constructors run no code of the program."""
