"""Comparison of the elements of two arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptcore.model import HostArray

__all__ = ["SAME", "Distance", "Tolerance", "distance"]

_SLICE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Distance:
    """The difference between the elements of two arrays of one shape.

    Attributes:
        differing: number of elements that differ.
        largest: largest absolute difference. NaN if an element is NaN in one array only; None if the elements are not
            numbers.
    """

    differing: int
    largest: float | None

    def __add__(self, other: Distance) -> Distance:
        """Combine the differences of two pairs of arrays, such as two slices of one pair."""
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
    """The difference up to which elements count as equal.

    Attributes:
        absolute, relative: elements are equal if they differ by at most ``absolute + relative * |b|``. Two NaNs are
            equal. If both tolerances are 0 and both arrays have the same dtype, the bits are compared instead. Then
            0.0 and -0.0 count as different, with a difference of 0, and so do NaNs with different bits.
    """

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def is_exact(self) -> bool:
        """True if the bits of elements are compared where the dtypes are equal."""
        return self.absolute == 0 and self.relative == 0


def distance(a: HostArray, b: HostArray, tolerance: Tolerance) -> Distance:
    """Compare the elements of two arrays of one shape. Their dtypes may differ."""
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if a.dtype == b.dtype and np.array_equal(_bits(flat_a), _bits(flat_b)):
        return SAME
    total = SAME
    # In slices, to bound memory: each element is converted to 8 or 16 bytes.
    for start in range(0, flat_a.size, _SLICE_ELEMENTS):
        stop = start + _SLICE_ELEMENTS
        total += _slice_distance(flat_a[start:stop], flat_b[start:stop], tolerance)
    return total


def _slice_distance(a: HostArray, b: HostArray, tolerance: Tolerance) -> Distance:
    if a.dtype == b.dtype:
        # Fast path: elements with equal bits are equal, so only the others are compared as numbers.
        differing_bits = _differing_bits(a, b)
        a, b = a[differing_bits], b[differing_bits]
        if not a.size:
            return SAME
    numbers_a, numbers_b = _numbers(a), _numbers(b)
    if numbers_a is None or numbers_b is None:
        if a.dtype.kind == b.dtype.kind and a.dtype != b.dtype:  # text of different lengths, times of different units
            differing = int(np.not_equal(a, b).sum())
            return Distance(differing, None) if differing else SAME
        return Distance(a.size, None)
    errors = _absolute_differences(numbers_a, numbers_b)
    if a.dtype == b.dtype and tolerance.is_exact:
        return Distance(a.size, float(errors.max()))  # NaN if one element is NaN
    with np.errstate(invalid="ignore"):
        near = errors <= tolerance.absolute + tolerance.relative * np.abs(numbers_b).astype(np.float64)
    differs = (errors != 0) & ~(near & np.isfinite(errors))
    return Distance(int(differs.sum()), float(errors.max())) if differs.any() else SAME


def _differing_bits(a: HostArray, b: HostArray) -> npt.NDArray[np.bool_]:
    """Return a mask of the elements whose bits differ. The dtypes must be equal."""
    width = a.dtype.itemsize
    mask: npt.NDArray[np.bool_]
    if width in (1, 2, 4, 8):
        mask = a.view(f"u{width}") != b.view(f"u{width}")
        return mask
    mask = (_bytes(a).reshape(-1, width) != _bytes(b).reshape(-1, width)).any(axis=1)
    return mask


def _absolute_differences(a: HostArray, b: HostArray) -> npt.NDArray[np.float64]:
    """Return the absolute differences of numbers. 0 for two NaNs and for equal infinities."""
    if a.dtype.kind in "iu" and a.dtype == b.dtype:
        # Subtract as uint64: float64 would round large integers first, and int64 could overflow. Subtraction of uint64
        # wraps, so the larger minus the smaller element is exact for int64 too.
        return np.where(a > b, a.view(np.uint64) - b.view(np.uint64), b.view(np.uint64) - a.view(np.uint64)).astype(
            np.float64
        )
    if a.dtype.kind in "iu" or b.dtype.kind in "iu":
        a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differences: npt.NDArray[np.float64] = np.abs(a - b)
    both_nan = np.isnan(a) & np.isnan(b)
    return np.where(both_nan | (a == b), 0.0, differences)


def _numbers(array: HostArray) -> HostArray | None:
    """Convert the elements to int64, uint64, float64 or complex128. None if they are not numbers."""
    kind = array.dtype.kind
    if kind in "biu":
        return array.astype(np.uint64 if kind == "u" else np.int64)
    if kind == "f":
        return array.astype(np.float64)
    if kind == "c":
        return array.astype(np.complex128)
    if kind in "SUmM":
        return None
    # The rest are dtypes of ml_dtypes.
    return array.astype(np.complex128 if "complex" in array.dtype.name else np.float64)


def _bits(array: HostArray) -> HostArray:
    raw = _bytes(array)
    return raw.view(np.uint64) if raw.size % 8 == 0 else raw


def _bytes(array: HostArray) -> npt.NDArray[np.uint8]:
    return array.view(np.uint8) if array.dtype.itemsize else np.empty(0, np.uint8)
