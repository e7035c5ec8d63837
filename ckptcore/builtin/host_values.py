"""Leaves that are stored as a short text or number: paths, times, enum members, ranges and the like.

Without a template they load in a plain form: text, a number, or a list. With a value of their type they load as that
type. The type comes from the caller, never from the checkpoint.
"""

from __future__ import annotations

import datetime
import enum
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from ckptcore.builtin.host_leaves import HostValueHandler
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from ckptcore.model.arrays import Box, HostArray, dtype_from_name, name_of_dtype
from ckptcore.model.metadata import LeafRecord, ValueRecord
from ckptcore.model.tree import JSON, text_from_json, text_to_json
from ckptcore.protocols import LeafHandler


class ValueForm(NamedTuple):
    """The stored form of the values of some types.

    Attributes:
        kind: its name in records.
        encode: returns a value as JSON, which is also what a load without a template returns.
        decode: returns the value of a type for such JSON. It may be hostile: raises ValueError, TypeError or KeyError.
    """

    kind: str
    encode: Callable[[Any], JSON]
    decode: Callable[[type, Any], object]


class ValueFormHandler(HostValueHandler):
    """Values with a `ValueForm`."""

    def __init__(self, form: ValueForm) -> None:
        self._form = form

    def describe(self, leaf: Any) -> LeafRecord:
        """Return the value in its plain form."""
        return ValueRecord(self._form.kind, self._form.encode(leaf))

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Return a value of the type of `abstract`.

        Raises:
            TreeMismatchError: the stored value is none of that type.
        """
        kind = type(abstract)
        if not isinstance(stored, ValueRecord):
            difference = f"a {kind.__qualname__} is requested, an array is stored"
            raise TreeMismatchError(f"{difference}; request an array", [difference])
        try:
            return self._form.decode(kind, stored.value)
        except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
            difference = f"kind: the stored {stored.kind} {str(stored.value)[:80]!r} is no {kind.__qualname__}"
            raise TreeMismatchError(f"{difference} ({error})", [difference]) from error


def form_handler(leaf_type: type) -> LeafHandler | None:
    """Return the handler for values of a type, or None."""
    form = _EXACT.get(f"{leaf_type.__module__}.{leaf_type.__qualname__}")
    if form is None and issubclass(leaf_type, enum.Enum):
        form = _FLAG if issubclass(leaf_type, enum.Flag) else _MEMBER
    elif form is None and issubclass(leaf_type, pathlib.PurePath):
        form = _PATH
    elif form is None and issubclass(leaf_type, np.dtype):
        form = _DTYPE
    return None if form is None else ValueFormHandler(form)


def _of_text(kind: str) -> ValueForm:
    """Return the form of a type whose text its constructor reads."""
    return ValueForm(kind, str, lambda leaf_type, text: leaf_type(_text(text)))


def _text(value: object) -> str:
    if not isinstance(value, str | dict):
        raise TypeError("it is not text")
    return text_from_json(value)


def _encode_datetime(value: datetime.datetime) -> JSON:
    """Return ISO 8601. The name of a zone follows in brackets, as in RFC 9557; ``[fold]`` marks a repeated hour."""
    zone = getattr(value.tzinfo, "key", None)
    if isinstance(zone, str):
        return f"{value.isoformat()}[{zone}]"
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise UnsupportedLeafError(
            f"a datetime with the time zone {value.tzinfo!r} has no portable name; save value.astimezone("
            "datetime.timezone.utc)"
        )
    return value.isoformat() + ("[fold]" if value.fold else "")


def _decode_datetime(leaf_type: Any, text: object) -> object:
    moment, _, suffix = _text(text).removesuffix("]").partition("[")
    value = leaf_type.fromisoformat(moment)
    if suffix == "fold":
        return value.replace(fold=1)
    if suffix:
        import zoneinfo  # only values with a named zone need it

        return value.astimezone(zoneinfo.ZoneInfo(suffix))
    return value


def _encode_time(value: datetime.time) -> JSON:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise UnsupportedLeafError("a time with a named zone has no offset; save the time and the name of its zone")
    return value.isoformat() + ("[fold]" if value.fold else "")


def _decode_time(leaf_type: Any, text: object) -> object:
    moment, _, suffix = _text(text).partition("[")
    return leaf_type.fromisoformat(moment).replace(fold=int(bool(suffix)))


def _encode_dtype(value: np.dtype[Any]) -> JSON:
    name = name_of_dtype(value)
    if dtype_from_name(name) != value:
        raise UnsupportedLeafError(f"a dtype of the other byte order, {value.str!r}, is saved as text: str(dtype.str)")
    return name


def _int_to_json(value: int) -> JSON:
    return value if abs(value) < 1 << 53 else hex(value)


def _int_from_json(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError("it is not a number")
    return int(value, 16) if isinstance(value, str) else value


def _element_to_json(element: Any) -> JSON:
    if type(element) is str:
        return text_to_json(element)
    is_small = type(element) is int and abs(element) < 1 << 53
    if element is None or type(element) is bool or is_small or (type(element) is float and math.isfinite(element)):
        return cast(JSON, element)
    if type(element) is tuple:
        return list(map(_element_to_json, element))
    raise UnsupportedLeafError(
        f"a frozenset with a {type(element).__qualname__} is not stored, only one of finite numbers, text and None, "
        "and tuples of these: save list(value)"
    )


def _element_from_json(element: Any) -> Any:
    if isinstance(element, list | tuple):
        return tuple(map(_element_from_json, element))
    return text_from_json(element) if isinstance(element, dict) else element


def _elements(value: frozenset[Any]) -> JSON:
    return sorted(map(_element_to_json, value), key=lambda element: (type(element).__name__, repr(element)))


_PATH: Final = ValueForm("path", lambda value: text_to_json(str(value)), lambda leaf_type, text: leaf_type(_text(text)))
_MEMBER: Final = ValueForm(
    "enum",
    lambda member: text_to_json(member.name),
    lambda leaf_type, name: leaf_type[_text(name)],  # type: ignore[index]  # an Enum
)
_FLAG: Final = ValueForm(
    "flag", lambda value: _int_to_json(value.value), lambda leaf_type, value: leaf_type(_int_from_json(value))
)
_DTYPE: Final = ValueForm("dtype", _encode_dtype, lambda _, name: dtype_from_name(_text(name)))

_EXACT: Final[Mapping[str, ValueForm]] = {
    "datetime.datetime": ValueForm("datetime", _encode_datetime, _decode_datetime),
    "datetime.date": ValueForm(
        "date", datetime.date.isoformat, lambda _, text: datetime.date.fromisoformat(_text(text))
    ),
    "datetime.time": ValueForm("time", _encode_time, _decode_time),
    "datetime.timedelta": ValueForm(
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda _, parts: datetime.timedelta(*parts),
    ),
    "builtins.range": ValueForm(
        "range",
        lambda value: [_int_to_json(part) for part in (value.start, value.stop, value.step)],
        lambda _, parts: range(*map(_int_from_json, parts)),
    ),
    "builtins.frozenset": ValueForm(
        "frozenset", _elements, lambda _, parts: frozenset(map(_element_from_json, list(parts)))
    ),
    "decimal.Decimal": _of_text("decimal"),
    "fractions.Fraction": _of_text("fraction"),
    "uuid.UUID": _of_text("uuid"),
    **{
        f"ipaddress.IPv{version}{kind}": _of_text("address")
        for version in (4, 6)
        for kind in ("Address", "Interface", "Network")
    },
}
"""Forms of types whose subclasses may have more content, such as times with nanoseconds."""
