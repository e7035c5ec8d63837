"""Dtypes of zarr arrays, and replacements for dtypes that zarr lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import ArraySpec, dtype_from_name, name_of_dtype

ZarrFormat: TypeAlias = Literal[2, 3]
"""Version of the zarr specification."""

Endian: TypeAlias = Literal["little", "big"]
"""Byte order of elements; little for one-byte elements."""

_VERSION2_NAMES: Final = {
    "bool": "|b1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
"""NumPy's notation. ml_dtypes use their names, a TensorStore extension of zarr 2."""

_EXTENSIONS: Final = (
    "bfloat16", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4",
)  # fmt: skip
"""Dtypes of ml_dtypes. Those with fewer than 8 bits take one byte per element."""

STORED_DTYPES: Final[Mapping[ZarrFormat, frozenset[str]]] = {
    2: frozenset([*_VERSION2_NAMES, *_EXTENSIONS]),
    3: frozenset([*_VERSION2_NAMES, *_EXTENSIONS]),
}
"""Dtypes that TensorStore 0.1.86 supports in each version and that Orbax 0.12.8 loads.

Found by experiment. TensorStore 0.1.74 has all but float8_e3m4, float8_e8m0fnu, float4_e2m1fn and
int2.
"""

_FROM_VERSION2: Final = {theirs: ours for ours, theirs in _VERSION2_NAMES.items()}
_PLAIN: Final = re.compile(r"([<>|])([biufc])([0-9]{1,2})")
_TEXT: Final = re.compile(r"([<>|])([SU])([0-9]{1,7})")
_TIME: Final = re.compile(r"([<>])([mM])8(\[[0-9]{0,8}[A-Za-z]{1,2}\])")


def stored_spec(spec: ArraySpec, zarr_format: ZarrFormat) -> ArraySpec:
    """Return the spec with which an array is stored, with equal bytes.

    - Dtypes that TensorStore supports (`STORED_DTYPES`) do not change.
    - ``datetime64`` and ``timedelta64`` become int64: counts of their unit. The smallest int64 means
      "not a time".
    - Other dtypes become uint8: the bytes of an element, little endian, as an additional last axis;
      no axis for one byte. So ``U3[2, 5]`` is stored as ``uint8[2, 5, 12]`` and ``uint4[7]`` as
      ``uint8[7]``.
    """
    if spec.dtype in STORED_DTYPES[zarr_format]:
        return spec
    dtype = spec.numpy_dtype
    if dtype.kind in "mM":
        return ArraySpec(spec.shape, "int64")
    return ArraySpec((*spec.shape, dtype.itemsize) if dtype.itemsize > 1 else spec.shape, "uint8")


def version2_of_dtype(name: str) -> str:
    """Return the ``.zarray`` name of one of `STORED_DTYPES`."""
    return _VERSION2_NAMES.get(name, name)


def dtype_of_version2(name: object) -> tuple[str, Endian]:
    """Return the dtype for a ``.zarray`` name, which may be hostile, and its byte order.

    Raises:
        UnsupportedLeafError: ckptcore does not support the dtype.
    """
    if not isinstance(name, str):
        raise UnsupportedLeafError("its dtype has fields, which ckptcore does not support")
    if name in _EXTENSIONS:
        return name, "little"
    if (ours := _FROM_VERSION2.get(name)) is not None:
        return ours, "little"
    if (match := _PLAIN.fullmatch(name)) is not None:
        order, kind, itemsize = match.groups()
        ours = _FROM_VERSION2.get(f"|{kind}1") if itemsize == "1" else _FROM_VERSION2.get(f"<{kind}{itemsize}")
        if ours is not None and (order != "|" or itemsize == "1"):
            return ours, "big" if order == ">" and itemsize != "1" else "little"
    elif (match := _TEXT.fullmatch(name)) is not None:
        order, kind, length = match.groups()
        if kind == "S" or order != "|":
            return _known(kind + length), "big" if order == ">" and kind == "U" else "little"
    elif (match := _TIME.fullmatch(name)) is not None:
        order, kind, unit = match.groups()
        return _known(("datetime64" if kind == "M" else "timedelta64") + unit), "big" if order == ">" else "little"
    raise UnsupportedLeafError(f"its dtype {name[:80]!r} is not supported by ckptcore")


def _known(name: str) -> str:
    return name_of_dtype(dtype_from_name(name))
