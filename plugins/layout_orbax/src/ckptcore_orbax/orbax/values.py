"""Python values: as arrays and strings in Orbax files, and as records."""

from __future__ import annotations

import base64
import json
from typing import Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import (
    JSON,
    HostArray,
    LeafRecord,
    ValueRecord,
    column_array,
    column_value,
    float_from_json,
    float_to_json,
)

NONE: Final = ValueRecord("none", None)
"""The record of None."""

_EXACT: Final = 1 << 53
"""Ints of a smaller magnitude are JSON numbers in records. Others are hexadecimal text, as in the core."""


def value_record(value: object) -> ValueRecord | None:
    """Return the record of a None, bool, int, float, complex, str or bytes; None for other types."""
    match value:
        case None:
            return NONE
        case bool():
            return ValueRecord("bool", value)
        case int():
            return ValueRecord("int", value if abs(value) < _EXACT else hex(value))
        case float():
            return ValueRecord("float", float_to_json(value))
        case complex():
            return ValueRecord("complex", [float_to_json(value.real), float_to_json(value.imag)])
        case str():
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                data = value.encode("utf-8", "surrogatepass")
                return ValueRecord("str", {"utf8": base64.b64encode(data).decode("ascii")})
            return ValueRecord("str", value)
        case bytes():
            return ValueRecord("bytes", base64.b64encode(value).decode("ascii"))
    return None


def scalar_record(array: HostArray, name: str) -> ValueRecord:
    """Return the record of a Python scalar that Orbax stored as an array without axes.

    Args:
        array: the array; of ints, floats, bools or complex numbers.
        name: name of the array, for errors.

    Raises:
        CorruptCheckpointError: the array has axes, or a dtype that Python scalars do not have.
    """
    record = value_record(array.item()) if array.ndim == 0 and array.dtype.kind in "biufcV" else None
    if record is None:
        raise CorruptCheckpointError(
            f"the scalar {name!r} is stored as {array.dtype}{list(array.shape)}; expected one number without axes",
            key=name,
        )
    return record


def value_type(record: LeafRecord) -> str:
    """Return Orbax's name for the type of a leaf: ``None``, ``scalar``, ``string``, ``jax.Array`` or ``np.ndarray``.

    A NumPy scalar is an array, so that it keeps its dtype. An array is a ``jax.Array`` if its
    notes contain a sharding, or if it is the data of random keys.
    """
    if isinstance(record, ValueRecord):
        if record.kind == "none":
            return "None"
        if (array := value_array(record)) is None:
            return "string"
        return "scalar" if record.kind in ("bool", "int", "float") and array.ndim == 0 else "np.ndarray"
    return "jax.Array" if "sharding" in record.notes or record.kind == "jax.key" else "np.ndarray"


def value_array(record: ValueRecord) -> HostArray | None:
    """Return the array that Orbax reads for a value, or None for None, strings, and ints of more than 64 bits.

    bool, int and float are arrays without axes of bool, int64 (uint64 from 2**63 on) and float64,
    as Orbax writes them. A long list or tuple of one of these types is one such array: Orbax would
    need an array for each number. Orbax rejects complex and bytes; they are stored as complex128 without
    axes and as uint8.

    Raises:
        CorruptCheckpointError: the record does not have the core's encoding of values.
    """
    value = record.value
    try:
        match record.kind:
            case "bool" if isinstance(value, bool):
                return np.asarray(value)
            case "int" if (number := _int_of(value)) is not None:
                if -(1 << 63) <= number < 1 << 63:
                    return np.asarray(number, np.int64)
                return np.asarray(number, np.uint64) if 0 <= number < 1 << 64 else None
            case "float":
                return np.asarray(float_from_json(value), np.float64)
            case "complex" if isinstance(value, list | tuple) and len(value) == 2:
                return np.asarray(complex(float_from_json(value[0]), float_from_json(value[1])), np.complex128)
            case "bytes" if isinstance(value, str):
                return np.frombuffer(base64.b64decode(value, validate=True), np.uint8)
            case "list" | "tuple":
                return column_array(record)
            case "bool" | "int" | "complex" | "bytes":
                raise ValueError(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"a saved {record.kind} cannot be read from {str(value)[:80]!r}") from error
    return None


def value_text(record: ValueRecord) -> str | None:
    """Return the string that Orbax reads for a value; None for None and for values stored as arrays.

    An int of more than 64 bits becomes hexadecimal text. A value that is neither str nor int
    becomes JSON, such as a long dict of numbers, which is one value here. Characters that UTF-8
    cannot encode are replaced, because other readers reject a file with them.
    """
    if record.kind == "none" or value_array(record) is not None:
        return None
    value = record.value
    if record.kind in ("list", "tuple", "dict"):
        return json.dumps(column_value(record))
    if record.kind == "str" and isinstance(value, dict):
        return base64.b64decode(str(value.get("utf8"))).decode("utf-8", "replace")
    return value if isinstance(value, str) else json.dumps(value)


def _int_of(value: JSON) -> int | None:
    if isinstance(value, str):
        return int(value, 16)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
