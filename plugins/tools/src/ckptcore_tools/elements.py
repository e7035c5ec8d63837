"""Elements of arrays: reading boxes of an open checkpoint, and comparing two arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.loading.reading import allocate_for, check_sizes, incomplete_read
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray
from ckptcore.on_demand.open_state import OpenState
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.planning import plan_read


def boxes_within(spec: ArraySpec, max_bytes: int) -> Iterator[Box]:
    """Divide an array into boxes of at most `max_bytes`, but at least one element each, in C order."""
    if spec.nbytes <= max_bytes or not spec.shape:
        yield Box.whole(spec.shape)
        return
    yield from _boxes(spec.shape, (), (), spec.numpy_dtype.itemsize, max_bytes)


def _boxes(
    shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...], itemsize: int, max_bytes: int
) -> Iterator[Box]:
    """Divide the part of an array at fixed indices of the leading axes. `shape` is the shape of the other axes."""
    row = ArraySpec(shape[1:], "uint8").size * itemsize
    rows = max_bytes // row if row else shape[0]
    if rows or len(shape) == 1:
        step = max(1, rows)
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            yield Box((*start, first, *(0,) * (len(shape) - 1)), (*stop, last, *shape[1:]))
        return
    for index in range(shape[0]):
        yield from _boxes(shape[1:], (*start, index), (*stop, index + 1), itemsize, max_bytes)


class BoxReader:
    """Reads boxes of the arrays of one checkpoint."""

    def __init__(self, state: OpenState) -> None:
        """Read from an open checkpoint."""
        self._state = state

    def read(self, boxes: Mapping[int, Box]) -> dict[int, HostArray]:
        """Read one box each of several arrays. Keys are leaf numbers."""
        return self._state.guard(lambda checkpoint: _read(checkpoint, boxes))


def _read(checkpoint: Checkpoint, boxes: Mapping[int, Box]) -> dict[int, HostArray]:
    check_sizes(checkpoint, boxes)
    elements = {
        leaf: allocate_for(checkpoint, leaf, ArraySpec(box.shape, record.spec.dtype))
        for leaf, box in boxes.items()
        if isinstance(record := checkpoint.tree.leaves[leaf], ArrayRecord)
    }
    plan = plan_read(checkpoint.tree, [(leaf, (box,)) for leaf, box in boxes.items()])
    missing = set(range(len(boxes))).difference(checkpoint.read(plan, list(elements.values())))
    if missing:
        raise incomplete_read(checkpoint, list(boxes)[min(missing)])
    return elements


_SLICE_ELEMENTS: Final = 1 << 20
_MAX_WORST: Final = 10


class WorstElement(NamedTuple):
    """One of the elements that differ most between two arrays.

    Attributes:
        position: its index in the arrays.
        a, b: the element in each array.
        error: the absolute difference; NaN if the element is NaN in one array only.
    """

    position: tuple[int, ...]
    a: float | complex
    b: float | complex
    error: float


@dataclass(frozen=True, slots=True)
class Distance:
    """The difference between the elements of two arrays of one shape.

    Attributes:
        differing: number of elements that differ.
        largest: largest absolute difference. NaN if an element is NaN in one array only; None if the elements are not
            numbers.
        squares: sum of the squares of all absolute differences.
        worst: the elements with the largest absolute differences, the worst first, NaN before all others.
    """

    differing: int
    largest: float | None
    squares: float = field(default=0.0, compare=False)
    worst: tuple[WorstElement, ...] = field(default=(), compare=False)

    @property
    def norm(self) -> float | None:
        """The Euclidean norm of the difference; None if the elements are not numbers."""
        return None if self.largest is None else math.sqrt(self.squares)

    def __add__(self, other: Distance) -> Distance:
        """Combine the differences of two pairs of arrays, such as two slices of one pair."""
        if self.largest is None or other.largest is None:
            largest = None
        elif math.isnan(self.largest) or math.isnan(other.largest):
            largest = math.nan
        else:
            largest = max(self.largest, other.largest)
        worst = tuple(sorted((*self.worst, *other.worst), key=_badness, reverse=True)[:_MAX_WORST])
        return Distance(self.differing + other.differing, largest, self.squares + other.squares, worst)

    def within(self, box: Box) -> Distance:
        """Return the same difference, with positions in larger arrays. `box` is the compared part of these arrays."""
        shifted = [
            worst._replace(position=tuple([start + at for start, at in zip(box.start, worst.position, strict=True)]))
            for worst in self.worst
        ]
        return replace(self, worst=tuple(shifted))


def _badness(element: WorstElement) -> float:
    return math.inf if math.isnan(element.error) else element.error


SAME = Distance(0, 0.0)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The difference up to which elements count as equal.

    Attributes:
        absolute, relative: elements are equal if they differ by at most ``absolute + relative * |b|``. Two NaNs are
            equal. If both tolerances are 0 and both arrays have the same dtype, the bits are compared instead. In
            this case 0.0 and -0.0 differ, with a difference of 0. NaNs with different bits also differ.
    """

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def is_exact(self) -> bool:
        """True if arrays of equal dtypes are compared bit by bit."""
        return self.absolute == 0 and self.relative == 0


def distance(a: HostArray, b: HostArray, tolerance: Tolerance) -> Distance:
    """Compare the elements of two arrays of one shape. Their dtypes may differ."""
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if a.dtype == b.dtype and np.array_equal(_bits(flat_a), _bits(flat_b)):
        return SAME
    total = SAME
    # Compare slices to bound memory: each element is converted to 8 or 16 bytes.
    for start in range(0, flat_a.size, _SLICE_ELEMENTS):
        stop = start + _SLICE_ELEMENTS
        indices = np.arange(start, min(stop, flat_a.size))
        total += _slice_distance(flat_a[start:stop], flat_b[start:stop], indices, a.shape, tolerance)
    return total


def _slice_distance(
    a: HostArray, b: HostArray, indices: npt.NDArray[np.int64], shape: tuple[int, ...], tolerance: Tolerance
) -> Distance:
    """Compare elements. `indices` are their positions in the flattened arrays; `shape` is the shape of the arrays."""
    if a.dtype == b.dtype:
        # Fast path: elements with equal bits are equal, so only the others are compared as numbers.
        differing_bits = _differing_bits(a, b)
        a, b, indices = a[differing_bits], b[differing_bits], indices[differing_bits]
        if not a.size:
            return SAME
    numbers_a, numbers_b = numbers_of(a), numbers_of(b)
    if numbers_a is None or numbers_b is None:
        if a.dtype.kind == b.dtype.kind and a.dtype != b.dtype:  # text of different lengths, times of different units
            differing = int(np.not_equal(a, b).sum())
            return Distance(differing, None) if differing else SAME
        return Distance(a.size, None)
    errors = _absolute_differences(numbers_a, numbers_b)
    differing = a.size
    if a.dtype != b.dtype or not tolerance.is_exact:
        with np.errstate(invalid="ignore"):
            near = errors <= tolerance.absolute + tolerance.relative * np.abs(numbers_b).astype(np.float64)
        differing = int(((errors != 0) & ~(near & np.isfinite(errors))).sum())
        if not differing:
            return SAME
    worst = [
        WorstElement(
            tuple(map(int, np.unravel_index(indices[at], shape))),
            numbers_a[at].item(),
            numbers_b[at].item(),
            float(errors[at]),
        )
        for at in _largest(errors)
    ]
    with np.errstate(over="ignore"):
        squares = float(np.square(errors).sum())
    return Distance(differing, float(errors.max()), squares, tuple(worst))  # the maximum is NaN if one error is


def _largest(errors: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Return the positions of the largest errors, the largest first, and NaN before all others."""
    ordered = np.where(np.isnan(errors), np.inf, errors)
    count = min(_MAX_WORST, errors.size)
    chosen = np.argpartition(ordered, errors.size - count)[-count:]
    return chosen[np.argsort(-ordered[chosen], kind="stable")]


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
    """Return the absolute differences of numbers. Two NaNs, and two equal infinities, have the difference 0."""
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


def are_numbers(dtype: np.dtype[Any]) -> bool:
    """Return True if the elements of a dtype are numbers, not text, bytes or times."""
    return dtype.kind not in "SUmM"


def numbers_of(array: HostArray) -> HostArray | None:
    """Convert elements to int64, uint64, float64 or complex128. None if they are not numbers."""
    kind = array.dtype.kind
    if kind in "biu":
        return array.astype(np.uint64 if kind == "u" else np.int64)
    if kind == "f":
        return array.astype(np.float64)
    if kind == "c":
        return array.astype(np.complex128)
    if not are_numbers(array.dtype):
        return None
    # The rest are dtypes of ml_dtypes.
    return array.astype(np.complex128 if "complex" in array.dtype.name else np.float64)


def _bits(array: HostArray) -> HostArray:
    raw = _bytes(array)
    return raw.view(np.uint64) if raw.size % 8 == 0 else raw


def _bytes(array: HostArray) -> npt.NDArray[np.uint8]:
    return array.view(np.uint8) if array.dtype.itemsize else np.empty(0, np.uint8)
