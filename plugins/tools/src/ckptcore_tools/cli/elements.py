"""How far the elements of two arrays are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptcore.model import HostArray

__all__ = ["SAME", "Distance", "Tolerance", "distance"]

_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the elements of two arrays of one shape are apart.

    Attributes:
        differing: how many differ.
        largest: the largest absolute difference; nan where one is not a number and the other is, None where the
            elements are no numbers.
    """

    differing: int
    largest: float | None

    def __add__(self, other: Distance) -> Distance:
        """Of both pairs of arrays together."""
        if self.largest is None or other.largest is None:
            largest = None
        elif math.isnan(self.largest) or math.isnan(other.largest):
            largest = math.nan
        else:
            largest = max(self.largest, other.largest)
        return Distance(self.differing + other.differing, largest)


SAME = Distance(0, 0.0)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far elements may be apart and still count as equal.

    Attributes:
        absolute, relative: elements up to ``absolute + relative * |b|`` apart are equal, and two that are not a number.
            Where both are 0, elements of one dtype are equal if their bits are: 0.0 differs from -0.0, at a distance of
            0.
    """

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether bits count."""
        return self.absolute == 0 and self.relative == 0


def distance(a: HostArray, b: HostArray, tolerance: Tolerance) -> Distance:
    """Compare the elements of two arrays of one shape; their dtypes may differ."""
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if a.dtype == b.dtype and np.array_equal(_bits(flat_a), _bits(flat_b)):
        return SAME
    total = SAME
    # In steps, because numbers are compared as 8 or 16 bytes each, whatever they are stored as.
    for start in range(0, flat_a.size, _STEP):
        total += _step(flat_a[start : start + _STEP], flat_b[start : start + _STEP], tolerance)
    return total


def _step(a: HostArray, b: HostArray, tolerance: Tolerance) -> Distance:
    if a.dtype == b.dtype:
        # Elements of the same bits are equal in any case, so that only the others need a closer look.
        other = _other_bits(a, b)
        a, b = a[other], b[other]
        if not a.size:
            return SAME
    numbers_a, numbers_b = _numbers(a), _numbers(b)
    if numbers_a is None or numbers_b is None:
        if a.dtype.kind == b.dtype.kind and a.dtype != b.dtype:  # text of another length, times of another unit
            differing = int(np.not_equal(a, b).sum())
            return Distance(differing, None) if differing else SAME
        return Distance(a.size, None)
    apart = _apart(numbers_a, numbers_b)
    if a.dtype == b.dtype and tolerance.is_exact:
        return Distance(a.size, float(apart.max()))  # nan if one is
    with np.errstate(invalid="ignore"):
        near = apart <= tolerance.absolute + tolerance.relative * np.abs(numbers_b).astype(np.float64)
    differs = (apart != 0) & ~(near & np.isfinite(apart))
    return Distance(int(differs.sum()), float(apart.max())) if differs.any() else SAME


def _other_bits(a: HostArray, b: HostArray) -> npt.NDArray[np.bool_]:
    """Which elements of two arrays of one dtype do not have the same bits."""
    width = a.dtype.itemsize
    other: npt.NDArray[np.bool_]
    if width in (1, 2, 4, 8):
        other = a.view(f"u{width}") != b.view(f"u{width}")
        return other
    other = (_bytes(a).reshape(-1, width) != _bytes(b).reshape(-1, width)).any(axis=1)
    return other


def _apart(a: HostArray, b: HostArray) -> npt.NDArray[np.float64]:
    """The absolute difference of numbers; 0 for two that are not a number, and for equal infinities."""
    if a.dtype.kind in "iu" and a.dtype == b.dtype:
        # Exact, where float64 has 53 bits: the difference of two int64 fits uint64, in which subtraction wraps.
        return np.where(a > b, a.view(np.uint64) - b.view(np.uint64), b.view(np.uint64) - a.view(np.uint64)).astype(
            np.float64
        )
    if a.dtype.kind in "iu" or b.dtype.kind in "iu":
        a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart: npt.NDArray[np.float64] = np.abs(a - b)
    both_nan = np.isnan(a) & np.isnan(b)
    return np.where(both_nan | (a == b), 0.0, apart)


def _numbers(array: HostArray) -> HostArray | None:
    """The elements as 64 bits of integer, float64 or complex128; None where they are no numbers."""
    kind = array.dtype.kind
    if kind in "biu":
        return array.astype(np.uint64 if kind == "u" else np.int64)
    if kind == "f":
        return array.astype(np.float64)
    if kind == "c":
        return array.astype(np.complex128)
    if kind in "SUmM":
        return None
    if "complex" in array.dtype.name:  # of ml_dtypes, as what follows
        return array.astype(np.complex128)
    return array.astype(np.float64)


def _bits(array: HostArray) -> HostArray:
    raw = _bytes(array)
    return raw.view(np.uint64) if raw.size % 8 == 0 else raw


def _bytes(array: HostArray) -> npt.NDArray[np.uint8]:
    return array.view(np.uint8) if array.dtype.itemsize else np.empty(0, np.uint8)
