"""Fill values: the element for chunks that are not stored."""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON, dtype_from_name

_NOT_NUMBERS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_BITS: Final = re.compile(r"0x[0-9a-fA-F]{1,16}")


def parse_fill_version3(value: JSON, dtype: str) -> bytes:
    """Return the bytes of the element for a ``fill_value`` of a ``zarr.json``, in the host's byte order.

    Accepts bools and numbers. Floats can also be ``NaN``, ``Infinity``, ``-Infinity`` or their bits in
    hexadecimal, complex numbers are pairs of floats, and times can be ``NaT`` (zarr 3 specification, "fill value").

    Raises:
        CorruptCheckpointError: it is not valid for this dtype.
    """
    fill = _encode_fill(value, dtype)
    if fill is None:
        raise CorruptCheckpointError(f"its fill_value {str(value)[:80]!r} is not a valid {dtype}")
    return fill


def parse_fill_version2(value: JSON, dtype: str) -> bytes | None:
    """Return the bytes of the element for a ``fill_value`` of a ``.zarray``, in the host's byte order; None for null.

    Accepts the values of zarr 3. In addition, byte strings and complex numbers can be base64 of the
    element (zarr 2 specification, "fill value encoding"), and Unicode strings can be text.

    Raises:
        CorruptCheckpointError: it is not valid for this dtype.
    """
    if value is None:
        return None
    fill = _encode_fill(value, dtype)
    if fill is None and isinstance(value, str):
        fill = _encode_text_fill(value, dtype)
    if fill is None:
        raise CorruptCheckpointError(f"its fill_value {str(value)[:80]!r} is not a valid {dtype}")
    return fill


def zero_of_version3(dtype: str) -> JSON:
    """Return zero as TensorStore writes it into a ``zarr.json``: JSON for an element whose bytes are all zero."""
    kind = dtype_from_name(dtype).kind
    if kind == "b":
        return False
    if kind == "c":
        return [0.0, 0.0]
    return 0 if _is_int(dtype) else 0.0


def _encode_fill(value: JSON, dtype: str) -> bytes | None:
    kind = dtype_from_name(dtype).kind
    if kind == "b":
        return bytes([value]) if isinstance(value, bool) else None
    if kind == "c":
        if not isinstance(value, list | tuple) or len(value) != 2:
            return None
        half = "float32" if dtype == "complex64" else "float64"
        real, imaginary = _float_bytes(value[0], half), _float_bytes(value[1], half)
        return None if real is None or imaginary is None else real + imaginary
    if kind in "mM":
        if value == "NaT":
            value = int(np.iinfo(np.int64).min)
        return _int_bytes(value, "int64")
    if kind in "SU":
        return bytes(dtype_from_name(dtype).itemsize) if type(value) is int and value == 0 else None
    return _int_bytes(value, dtype) if _is_int(dtype) else _float_bytes(value, dtype)


def _encode_text_fill(value: str, dtype: str) -> bytes | None:
    numpy_dtype = dtype_from_name(dtype)
    if numpy_dtype.kind == "U":
        if any(0xD800 <= ord(character) < 0xE000 for character in value):
            return None
        return np.array(value, numpy_dtype).tobytes() if len(value) <= numpy_dtype.itemsize // 4 else None
    if numpy_dtype.kind in "Sc":
        try:
            decoded = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            return None
        if not decoded or len(decoded) == numpy_dtype.itemsize:
            return decoded or bytes(numpy_dtype.itemsize)
    return None


def _is_int(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _int_bytes(value: JSON, dtype: str) -> bytes | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        return None
    bits = int(dtype.lstrip("uint"))
    lowest, above = (0, 1 << bits) if dtype.startswith("u") else (-1 << bits - 1, 1 << bits - 1)
    if not lowest <= value < above:
        return None
    return np.array(value, dtype_from_name(dtype)).tobytes()


def _float_bytes(value: JSON, dtype: str) -> bytes | None:
    numpy_dtype = dtype_from_name(dtype)
    if isinstance(value, str):
        if _BITS.fullmatch(value):
            bits = int(value, 16)
            if bits >> 8 * numpy_dtype.itemsize:
                return None
            return np.array(bits, f"u{numpy_dtype.itemsize}").tobytes()
        number = _NOT_NUMBERS.get(value)
        if number is None:
            return None
    elif type(value) is int or isinstance(value, float):
        try:
            number = float(value)
        except OverflowError:
            return None
    else:
        return None
    if number == 0 and math.copysign(1, number) > 0:
        return bytes(numpy_dtype.itemsize)  # for dtypes without zero too, as TensorStore does for float8_e8m0fnu
    with np.errstate(all="ignore"):
        return np.array(number, np.float64).astype(numpy_dtype).tobytes()
