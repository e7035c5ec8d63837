"""Test arrays of every dtype, shape and bit pattern, and bitwise comparison."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import ArraySpec, HostArray, dtype_from_name, name_of_dtype


def _is_dtype_name(name: str) -> bool:
    try:
        dtype_from_name(name)
    except UnsupportedLeafError:
        return False
    return True


PORTABLE_DTYPES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "bfloat16",
)  # fmt: skip
"""Dtypes that every layout must store."""

DTYPE_NAMES: Final = (
    *PORTABLE_DTYPES,
    "complex64",
    "complex128",
    *sorted(name for name in dir(ml_dtypes) if name != "bfloat16" and _is_dtype_name(name)),
    "datetime64[ns]",
    "datetime64[25s]",
    "timedelta64[ms]",
    "S5",
    "U3",
)
"""Names of all dtypes that a checkpoint can contain, with an example for each parametrised dtype."""

SHAPES: Final = ((), (1,), (7,), (0,), (5, 3), (3, 0, 2), (2, 3, 4), (1, 1, 1, 1, 2))
"""Shapes with zero, one and several axes, and with zero, one and several elements."""


def bit_patterns(spec: ArraySpec, seed: int = 0) -> HostArray:
    """Return an array with random bits. In arrays of five or more elements, the first four are special values.

    If the dtype has them, the special values are a NaN with a payload, minus zero or NaT, the smallest subnormal, and a
    signalling NaN or infinity. Elements of bool, str and dtypes with fewer than eight bits are random valid values.
    Equal arguments give equal arrays.
    """
    random = np.random.default_rng([seed, *spec.shape])
    dtype = spec.numpy_dtype
    count = spec.size
    if dtype.kind == "b":
        return random.integers(0, 2, count, np.uint8).astype(dtype).reshape(spec.shape)
    if dtype.kind == "U":
        return random.integers(0, 0xD800, count * (dtype.itemsize // 4), np.uint32).view(dtype).reshape(spec.shape)
    if (bits := _narrow_bits(spec.dtype)) is not None:
        if "int" in spec.dtype:
            limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]  # ml_dtypes leaves it untyped
            return (
                random.integers(int(limits.min), int(limits.max) + 1, count, np.int8).astype(dtype).reshape(spec.shape)
            )
        return random.integers(0, 1 << bits, count, np.uint8).view(dtype).reshape(spec.shape)
    elements = random.integers(0, 256, (count, dtype.itemsize), np.uint8)
    if count > 4:
        elements[0] = 0xFF  # a NaN with every bit of its payload
        elements[1] = 0
        elements[1, -1] = 0x80  # minus zero, NaT, or the smallest integer
        elements[2] = 0
        elements[2, 0] = 1  # the smallest subnormal
        elements[3] = elements[2]
        elements[3, -2:] = (0x80, 0x7F)[-dtype.itemsize :]  # a signalling NaN in float32
    return elements.reshape(-1).view(dtype).reshape(spec.shape)


def _narrow_bits(name: str) -> int | None:
    """Return the bits per element of a dtype of ml_dtypes with fewer than eight bits. None for others."""
    if name in ("int1", "uint1"):
        return 1
    if name in ("int2", "uint2"):
        return 2
    if name in ("int4", "uint4") or name.startswith("float4_"):
        return 4
    if name.startswith("float6_"):
        return 6
    return None


def dtype_name(array: HostArray) -> str:
    """Return the name of an array's dtype in checkpoints, for any byte order."""
    return name_of_dtype(array.dtype)


def _native_bytes(array: HostArray) -> bytes:
    return array.astype(array.dtype.newbyteorder("="), copy=False).tobytes()


def same_bits(found: HostArray, expected: HostArray) -> bool:
    """Return True if shape, dtype (except byte order) and the bits of all elements are equal."""
    return (
        found.shape == expected.shape
        and dtype_name(found) == dtype_name(expected)
        and _native_bytes(found) == _native_bytes(expected)
    )


def assert_same_bits(found: HostArray, expected: HostArray, where: str) -> None:
    """Fail with an explanation unless two arrays are bitwise equal."""
    assert found.shape == expected.shape, f"{where}: expected the shape {expected.shape}, found {found.shape}"
    assert dtype_name(found) == dtype_name(expected), f"{where}: expected {expected.dtype}, found {found.dtype}"
    if not same_bits(found, expected):
        raise AssertionError(f"{where}: elements differ: expected {expected!r:.200}, found {found!r:.200}")
