"""The values that dtypes have: whether all those of one are among those of another, and what a narrowing may lose."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

from ckptcore.model.arrays import dtype_from_name

__all__ = ["FloatValues", "float_values", "has_all_values_of", "int_range", "is_narrowing", "may_become"]

_PARTS: Final = {"complex32": "float16", "bcomplex32": "bfloat16", "complex64": "float32", "complex128": "float64"}
"""The dtype of the real and the imaginary parts of complex dtypes."""

_RANKS: Final = ("bool", "int", "float", "complex")
"""The sorts of numbers, each of which has those before it but for their precision."""


@dataclass(frozen=True, slots=True)
class FloatValues:
    """Which values a floating point dtype has: multiples of the smallest one with so many bits, up to the largest.

    Attributes:
        bits: of precision, with the one that is not stored.
        least, most: the smallest and the largest above zero.
        is_signed: whether it has numbers below zero, and zero; what has none has no zero either.
        has_infinity, has_nan, has_minus_zero: whether it has these.
    """

    bits: int
    least: float
    most: float
    is_signed: bool
    has_infinity: bool
    has_nan: bool
    has_minus_zero: bool

    def holds(self, other: FloatValues) -> bool:
        """Whether every value of another dtype is one of this: NaN is one, whatever its bits; the zero below zero is another."""
        return (
            other.bits <= self.bits
            and other.least >= self.least
            and other.most <= self.most
            and self.is_signed >= other.is_signed
            and self.has_infinity >= other.has_infinity
            and self.has_nan >= other.has_nan
            and self.has_minus_zero >= other.has_minus_zero
        )

    def holds_ints(self, low: int, high: int) -> bool:
        """Whether it has every int from `low` to `high`, both included; `low` is no higher than zero."""
        largest = max(-low, high)
        return self.is_signed and self.least <= 1 and largest <= self.most and largest <= 1 << self.bits


def has_all_values_of(dtype: str, other: str) -> bool:
    """Whether every value of the dtype `other` is one of `dtype`, so that a cast loses nothing.

    True and False are 1 and 0. A dtype that is not of numbers has only its own.

    Args:
        dtype, other: names that `ckptcore.model.dtype_from_name` knows.
    """
    if dtype == other:
        return True
    if not may_become(dtype, other):
        return False
    if (values := float_values(dtype)) is None:
        low, high = int_range(dtype)
        least, most = int_range(other)
        return low <= least and most <= high
    if (others := float_values(other)) is not None:
        return values.holds(others)
    return values.holds_ints(*int_range(other))


def is_narrowing(dtype: str, other: str) -> bool:
    """Whether a cast of the dtype `other` to `dtype` loses no more than precision and range: not a sort of number, as the fractions
    of floats cast to ints or the imaginary parts of complex numbers."""
    return dtype != other and may_become(dtype, other) and not has_all_values_of(dtype, other)


def may_become(dtype: str, other: str) -> bool:
    """Whether numbers of the dtype `other` are numbers of the sort of `dtype`, too; no dtype but bool becomes bool."""
    sort, of_other = _sort(dtype), _sort(other)
    if sort is None or of_other is None:
        return False
    return _RANKS.index(sort) >= _RANKS.index(of_other) and sort != "bool"


def int_range(dtype: str) -> tuple[int, int]:
    """The lowest and the highest value of a dtype of ints, or of bool."""
    if dtype == "bool":
        return 0, 1
    limits = ml_dtypes.iinfo(dtype_from_name(dtype))  # type: ignore[no-untyped-call]  # ml_dtypes leaves it untyped
    return int(limits.min), int(limits.max)


@functools.lru_cache(maxsize=64)
def float_values(dtype: str) -> FloatValues | None:
    """The values of a dtype of floats, or those of the parts of a complex one; None for others."""
    if _sort(dtype) not in ("float", "complex"):
        return None
    found = dtype_from_name(_PARTS.get(dtype, dtype))
    limits = ml_dtypes.finfo(found)  # type: ignore[no-untyped-call]  # ml_dtypes leaves it untyped
    with np.errstate(all="ignore"):
        infinity, nan, minus_zero = [np.array(value).astype(found) for value in (np.inf, np.nan, -0.0)]
        below = np.array(-1.0).astype(found)
    return FloatValues(
        bits=limits.nmant + 1,
        least=float(limits.smallest_subnormal),
        most=float(limits.max),
        is_signed=float(below) == -1,
        has_infinity=bool(np.isinf(infinity)),
        has_nan=bool(np.isnan(nan)),
        has_minus_zero=float(minus_zero) == 0 and bool(np.signbit(minus_zero)),
    )


def _sort(dtype: str) -> str | None:
    """What sort of number the elements are; None if they are none."""
    if dtype == "bool":
        return "bool"
    if dtype in _PARTS:
        return "complex"
    if dtype.startswith(("int", "uint")):
        return "int"
    return "float" if dtype.startswith(("float", "bfloat")) else None
