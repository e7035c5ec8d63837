"""Columns: long lists, tuples and dicts of plain numbers and text, each stored as one value.

If a million numbers were a million leaves, each number would cost a handler call, a record, a path and a row of the
root. A column costs only its bytes: the root has the numbers as one array in base64. The record of a column has the
kind ``list``, ``tuple`` or ``dict``.

The record's value has ``items``, and ``keys`` for a dict. Each of them groups its values by type: ``int`` is
``[bytes per number, base64]`` in two's complement and little-endian, ``float`` is base64 of float64, ``bool`` is base64
of bytes, and ``str`` is a list of texts. ``long``, a list of hexadecimal texts, replaces ``int`` if a number exceeds 64
bits. If there are several types, ``types`` has the type of each value, in one byte per value.

``runs`` describes the containers in a list of lists. A run is a number of values, or ``[kind, runs, times]`` for equal
containers in a row. A hostile column cannot expand much: each value takes at least a byte of the column, and the number
of containers per value is limited.
"""

from __future__ import annotations

import binascii
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import ValueRecord
from ckptcore.model.tree import JSON, text_from_json, text_to_json

COLUMN_KINDS: Final[Mapping[type, str]] = {list: "list", tuple: "tuple", dict: "dict"}
"""For each type of column, the kind of its record."""

COLUMN_VALUES: Final = 1000
"""Minimum number of values of a column. Values of shorter containers are leaves, which other software finds by name."""

_TYPES: Final[tuple[type, ...]] = (type(None), bool, int, float, str)
"""The types of values in columns. Their positions are their codes in ``types``."""
_NAMES: Final = ("none", "bool", "int", "float", "str")
_PLAIN: Final = frozenset(_TYPES)
_SEQUENCES: Final = frozenset({list, tuple})
_MAX_DEPTH: Final = 3
"""Maximum depth of nested lists and tuples in a column. Limits the containers for each value of a hostile column."""
_MAX_TEXT: Final = 1 << 12
"""Maximum number of characters of a text in a column. A container with a longer text is no column."""


def is_column(value: object) -> bool:
    """Return True for a list, tuple or dict that is saved as a column, because it is long and has only plain values.

    A column is a dict of plain values whose keys have the type int or str, or a list or tuple of plain values. Lists
    and tuples may be nested. Plain values have exactly the types int, float, bool, str or None. A text has at most
    `_MAX_TEXT` characters. Subclasses are no columns.
    """
    if type(value) is dict:
        return len(value) >= COLUMN_VALUES and _are_values(value.values()) and {*map(type, value)} <= {int, str}
    return type(value) in _SEQUENCES and (_count(value, _MAX_DEPTH) or 0) >= COLUMN_VALUES  # type: ignore[arg-type]


def is_plain(value: object, depth: int = 8) -> bool:
    """Return True for a plain value, and for a list, tuple or dict of any length whose nested values are all plain."""
    if isinstance(value, dict):
        return depth > 0 and all(is_plain(child, depth - 1) for child in value.values())
    if isinstance(value, list) or type(value) is tuple:
        left = {*map(type, value)} - _PLAIN
        return not left or (depth > 0 and all(type(child) in _PLAIN or is_plain(child, depth - 1) for child in value))
    return type(value) in _PLAIN


def _count(value: Sequence[object], depth: int) -> int | None:
    """Return the number of values in nested lists and tuples; None if they contain anything else."""
    types = {*map(type, value)}
    if types <= _PLAIN:
        return len(value) if _are_values(value) else None
    if not depth or not types <= _PLAIN | _SEQUENCES:
        return None
    total = 0
    for child in value:
        count = _count(child, depth - 1) if type(child) in _SEQUENCES else 1  # type: ignore[arg-type]  # a sequence
        if count is None or (type(child) is str and len(child) > _MAX_TEXT):
            return None
        total += count
    return total


def _are_values(values: Iterable[object]) -> bool:
    types = {*map(type, values)}
    if not types <= _PLAIN:
        return False
    return str not in types or all(len(value) <= _MAX_TEXT for value in values if type(value) is str)


# --- encoding ---------------------------------------------------------------------------------------------------------


def column_record(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> ValueRecord:
    """Return the record of a column."""
    if isinstance(value, dict):
        return ValueRecord("dict", {"keys": _encode(list(value)), "items": _encode(list(value.values()))})
    kind = COLUMN_KINDS[type(value)]
    if {*map(type, value)} <= _PLAIN:
        return ValueRecord(kind, {"items": _encode(value)})
    items: list[object] = []
    return ValueRecord(kind, {"runs": _runs(value, items), "items": _encode(items)})


def _runs(value: Sequence[Any], items: list[object]) -> list[JSON]:
    """Return the containers in a list as runs, and append its values to `items`. Equal neighbours form one run."""
    runs: list[Any] = []
    for is_value, children in itertools.groupby(value, lambda child: type(child) in _PLAIN):
        if is_value:
            before = len(items)
            items.extend(children)
            runs.append(len(items) - before)
            continue
        for child in children:
            run = [COLUMN_KINDS[type(child)], _runs(child, items)]
            if runs and isinstance(runs[-1], list) and runs[-1][:2] == run and _has_values(run[1]):
                runs[-1][2] += 1
            else:
                runs.append([*run, 1])
    return runs


def _encode(values: Sequence[Any]) -> dict[str, JSON]:
    types = {*map(type, values)}
    if len(types) == 1 and type(None) not in types:
        return _encode_type(values, *types)
    codes = bytes(map(_TYPES.index, map(type, values)))
    encoded: dict[str, JSON] = {"types": _text(codes)}
    for kind in _TYPES[1:]:
        if kind in types:
            encoded.update(_encode_type([value for value in values if type(value) is kind], kind))
    return encoded


def _encode_type(values: Sequence[Any], kind: type) -> dict[str, JSON]:
    """Encode values of one type."""
    if kind is str:
        return {"str": list(map(text_to_json, values))}
    if kind is bool:
        return {"bool": _text(bytes(values))}
    if kind is float:
        return {"float": _text(np.array(values, "<f8").data)}
    try:
        numbers = np.array(values, "<i8")
    except OverflowError:
        return {"long": list(map(hex, values))}
    width = max(_width(int(numbers.min())), _width(int(numbers.max())))
    return {"int": [width, _text(np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, 8)[:, :width]).data)]}


def _width(number: int) -> int:
    """Return the number of bytes that an integer takes in two's complement."""
    return ((number if number >= 0 else ~number).bit_length() + 8) // 8


def _text(data: bytes | memoryview) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


# --- decoding ---------------------------------------------------------------------------------------------------------


def column_value(record: ValueRecord) -> Any:
    """Return the list, tuple or dict of a column; the record may be hostile.

    Raises:
        CorruptCheckpointError: the record is not a column.
    """
    try:
        return _decode(record.kind, record.value)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, StopIteration, RecursionError) as error:
        raise CorruptCheckpointError(f"a saved {record.kind} of plain values cannot be read: {error!r}") from error


def _decode(kind: str, encoded: Any) -> Any:
    items = _decode_items(encoded["items"])
    if kind == "dict":
        keys = _decode_items(encoded["keys"])
        decoded = dict(zip(keys, items, strict=True))
        if len(decoded) != len(keys) or not {*map(type, keys)} <= {int, str}:
            raise ValueError("duplicate or invalid keys")
        return decoded
    if "runs" in encoded:
        rest = iter(items)
        items = list(_build_runs(encoded["runs"], rest, _MAX_DEPTH))
        if next(rest, rest) is not rest:
            raise ValueError("more values than the containers have")
    return tuple(items) if kind == "tuple" else items


def _build_runs(runs: Any, items: Iterator[Any], depth: int) -> Iterator[Any]:
    for run in runs:
        if type(run) is int:
            values = list(itertools.islice(items, run))
            if len(values) != run:
                raise ValueError("fewer values than the containers have")
            yield from values
            continue
        kind, inner, times = run
        if (
            depth == 0
            or kind not in ("list", "tuple")
            or type(times) is not int
            or (times > 1 and not _has_values(inner))
        ):
            raise ValueError(f"invalid run {str(run)[:80]}")
        for _ in range(times):
            child = list(_build_runs(inner, items, depth - 1))
            yield tuple(child) if kind == "tuple" else child


def _has_values(runs: Any) -> bool:
    """Return True if a container and all containers in it have values. Values limit how often a container repeats."""
    return bool(runs) and all(run > 0 if type(run) is int else _has_values(run[1]) for run in runs)


def _decode_items(encoded: Any) -> list[Any]:
    """Return the values in order. Their number follows from the bytes, so a short text cannot state a long list."""
    columns = {name: _decode_type(name, column) for name, column in encoded.items() if name != "types"}
    if "types" not in encoded:
        (values,) = columns.values()
        return values
    codes = binascii.a2b_base64(encoded["types"], strict_mode=True)
    of_code = [iter(columns.get(name, ())) for name in _NAMES]
    of_code[0] = itertools.repeat(None)
    if "long" in columns:
        of_code[2] = iter(columns["long"])
    values = [next(of_code[code]) for code in codes]
    if sum(map(len, columns.values())) != len(codes) - codes.count(0):
        raise ValueError("more values than types")
    return values


def _decode_type(name: str, column: Any) -> list[Any]:
    """Decode values of one type."""
    if name == "str":
        return list(map(text_from_json, column))
    if name == "long":
        return [int(number, 16) for number in column]
    if name == "int":
        width, text = column
        narrow = np.frombuffer(binascii.a2b_base64(text, strict_mode=True), np.uint8).reshape(-1, width)
        wide = np.zeros((len(narrow), 8), np.uint8)
        wide[:, 8 - width :] = narrow
        numbers: HostArray = wide.view("<i8")[:, 0] >> 8 * (8 - width)  # a shift extends the sign
        return list(numbers.tolist())
    data = binascii.a2b_base64(column, strict_mode=True)
    if name == "bool":
        return list(map(bool, data))
    if name != "float":
        raise ValueError(f"unknown type {name[:80]!r}")
    return list(np.frombuffer(data, "<f8").tolist())


def column_array(record: ValueRecord) -> HostArray | None:
    """Return the numbers of a list or tuple as an array without nesting; None for other columns.

    Raises:
        CorruptCheckpointError: the record is not a column.
    """
    encoded: Any = record.value
    if record.kind == "dict" or not isinstance(encoded, Mapping) or "runs" in encoded:
        return None
    values = column_value(record)
    names = {*encoded["items"]}
    if len(names) != 1 or not names <= {"bool", "int", "float"}:
        return None
    return np.asarray(values, {"bool": np.bool_, "int": np.int64, "float": np.float64}[names.pop()])


def column_summary(record: ValueRecord) -> str | None:
    """Return the types and the number of values of a column, such as ``1,000,000 int``; None for other records.

    Return ``damaged`` if the column cannot be decoded.
    """
    if record.kind not in COLUMN_KINDS.values():
        return None
    encoded: Any = record.value
    try:
        items = _decode_items(encoded["items"])
        names = [name for kind, name in zip(_TYPES, _NAMES, strict=True) if kind in {*map(type, items)}]
        return f"{len(items):,} {' or '.join(names)}"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, StopIteration, CorruptCheckpointError):
        return "damaged"
