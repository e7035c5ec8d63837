"""Statistics of the elements of arrays, computed from boxes in one pass and bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ckptcore import select
from ckptcore.model import HostArray, TreePath
from ckptcore_tools.elements import are_numbers, numbers_of

if TYPE_CHECKING:
    from ckptcore.results import OpenCheckpoint

_MAX_BINS: Final = 128
_EXACT_BITS: Final = 53
"""A float64 represents every integer of up to this many bits exactly."""

_LEAST_EXPONENT: Final = -1074
_LEAST: Final = math.ldexp(1, _LEAST_EXPONENT)
"""The smallest positive float64."""

_WIDER_BITS: Final = 7
"""If all elements are equal, their bin has a width of 2**-7 to 2**-6 of their value; from 128 on, the width is 1."""

_SLICE_ELEMENTS: Final = 1 << 18
"""Elements converted at a time. As float64 they take 2 MiB, which fits in the CPU cache."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of elements in bins of equal width. Each bin includes its lower edge.

    Attributes:
        start, stop: the edges of the first and of the last bin.
        counts: number of elements in each bin.
    """

    start: float
    stop: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArrayStatistics:
    """Statistics of the elements of an array. For complex numbers, statistics of their absolute values.

    Attributes:
        elements: number of elements.
        nan, infinite, zeros: number of elements that are NaN, infinite, or zero.
        minimum, maximum, mean, deviation: of the finite elements; None if there are none. The deviation is the
            population standard deviation.
        norm: the Euclidean norm of the finite elements. The norm and the deviation are infinite if a square
            overflows float64.
        histogram: of the finite elements; None if there are none.
    """

    elements: int
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    deviation: float | None = None
    norm: float = 0.0
    histogram: Histogram | None = None


def statistics_of(boxes: Iterable[HostArray]) -> ArrayStatistics | None:
    """Compute the statistics of an array.

    Args:
        boxes: the elements, in boxes of any shape that make up the array. If they are not numbers, only the first box
            is read.

    Returns:
        The statistics; None if the elements are not numbers, such as text and times.
    """
    summary = _Summary()
    for box in boxes:
        if not are_numbers(box.dtype):
            return None
        summary.add(box)
    return summary.result()


def read_statistics(
    checkpoint: OpenCheckpoint, paths: Sequence[TreePath], add_progress: Callable[[int], None]
) -> Mapping[TreePath, ArrayStatistics | None]:
    """Read some arrays of a checkpoint, and return their statistics by path. Reads no other array.

    Args:
        checkpoint: the checkpoint.
        paths: the paths of arrays. Tied arrays are read once.
        add_progress: called with the bytes of each box that was read.

    Raises:
        CorruptCheckpointError: an array is damaged.
        TreeMismatchError: a path does not exist.
    """
    statistics: dict[TreePath, ArrayStatistics | None] = {}
    if not paths:
        return statistics
    running: dict[TreePath, _Summary] = {}  # boxes are in storage order, so an array may begin before another one ends
    for box in checkpoint.iter_boxes(select=select.names(*paths)):
        summary = running.setdefault(box.path, _Summary())
        summary.add(box.elements)
        if summary.elements >= box.spec.size:
            statistics.update(dict.fromkeys((box.path, *box.tied), running.pop(box.path).result()))
        add_progress(box.elements.nbytes)
    return statistics


class _Summary:
    """Sums over the elements so far. Means and deviations of slices are merged as in Chan, Golub and LeVeque (1979).

    Attributes:
        elements: number of elements so far, of any kind.
    """

    def __init__(self) -> None:
        self.elements = 0
        self._are_numbers = True  # also if there are no elements
        self._finite = self._nan = self._infinite = self._zeros = 0
        self._minimum, self._maximum = math.inf, -math.inf
        self._mean = self._deviations = self._squares = 0.0
        self._histogram = _GrowingHistogram()

    def add(self, box: HostArray) -> None:
        """Add a box of any shape."""
        self.elements += box.size
        if not are_numbers(box.dtype):
            self._are_numbers = False
            return
        flat = np.ascontiguousarray(box).reshape(-1)
        for start in range(0, flat.size, _SLICE_ELEMENTS):
            numbers = numbers_of(flat[start : start + _SLICE_ELEMENTS])
            assert numbers is not None
            is_integer = numbers.dtype.kind in "iu"
            floats = np.abs(numbers) if numbers.dtype.kind == "c" else numbers.astype(np.float64, copy=False)
            self._add_slice(floats, is_integer=is_integer)

    def _add_slice(self, numbers: _Floats, *, is_integer: bool) -> None:
        """Add a slice that is not empty."""
        self._zeros += numbers.size - int(np.count_nonzero(numbers))
        finite = np.isfinite(numbers)
        if not finite.all():
            nan = int(np.isnan(numbers).sum())
            self._nan += nan
            self._infinite += numbers.size - int(finite.sum()) - nan
            numbers = numbers[finite]
            if not numbers.size:
                return
        low, high = float(numbers.min()), float(numbers.max())
        with np.errstate(over="ignore", invalid="ignore"):
            mean = low if low == high else float(numbers.mean())  # equal elements: deviation 0
            if not math.isfinite(mean):  # the sum overflowed float64
                mean = min(max(low, float((numbers / numbers.size).sum())), high)  # rounding can exceed both
            deviations = float(np.square(numbers - mean).sum())
            self._squares += float(np.square(numbers).sum())
        before, self._finite = self._finite, self._finite + numbers.size
        if before:
            distance = mean - self._mean
            deviations += distance * distance * (before * numbers.size / self._finite)
            half = (mean / 2 - self._mean / 2) * (numbers.size / self._finite)  # the difference can overflow
            mean = self._mean + half + half
        self._mean = mean
        self._deviations += deviations
        self._minimum, self._maximum = min(self._minimum, low), max(self._maximum, high)
        self._histogram.add(numbers, self._minimum, self._maximum, 0 if is_integer else None)

    def result(self) -> ArrayStatistics | None:
        """Return the statistics; None if the elements are not numbers."""
        if not self._are_numbers:
            return None
        if not self._finite:
            return ArrayStatistics(self.elements, self._nan, self._infinite, self._zeros)
        return ArrayStatistics(
            self.elements,
            self._nan,
            self._infinite,
            self._zeros,
            self._minimum,
            self._maximum,
            self._mean,
            math.sqrt(self._deviations / self._finite),
            math.sqrt(self._squares),
            self._histogram.result(),
        )


class _GrowingHistogram:
    """Counts in bins that begin at multiples of their width, a power of two.

    If an element is outside of the bins, bins are added. If there would be more than `_MAX_BINS`, the width is doubled
    and pairs of bins are merged. No element is read again.
    """

    def __init__(self) -> None:
        self._exponent: int | None = None  # of the width
        self._first = 0  # start of the first bin, in multiples of the width
        self._counts = np.zeros(0, np.int64)

    def add(self, numbers: _Floats, low: float, high: float, least_exponent: int | None) -> None:
        """Add finite numbers.

        Args:
            numbers: the numbers.
            low, high: bounds of all numbers so far.
            least_exponent: the exponent of the smallest width; None for any width.
        """
        exponent = _exponent_for(low, high)
        for least in (self._exponent, least_exponent):
            exponent = exponent if least is None else max(exponent, least)
        first = _bin_of(low, exponent)
        counts = np.zeros(_bin_of(high, exponent) - first + 1, np.int64)
        if self._exponent is not None:
            old = (self._first + np.arange(self._counts.size)) >> (exponent - self._exponent)
            np.add.at(counts, old - first, self._counts)
        scaled = np.ldexp(numbers, -exponent)
        np.minimum(scaled, -_LEAST, out=scaled, where=numbers < 0)  # a small negative number can become -0.0
        bins = np.floor(scaled).astype(np.int64) - first
        self._counts = counts + np.bincount(bins, minlength=counts.size)
        self._exponent, self._first = exponent, first

    def result(self) -> Histogram:
        """Return the histogram of at least one number."""
        assert self._exponent is not None
        exponent, first = self._exponent, self._first
        if self._counts.size == 1:
            # All elements are equal, so the bin is as narrow as their rounding error. Widen it for charts.
            wider = math.frexp(math.ldexp(first, exponent))[1] - _WIDER_BITS
            exponent = max(exponent, min(0, wider))
            first >>= exponent - self._exponent
        with np.errstate(over="ignore"):
            edges = np.ldexp([float(first), float(first + self._counts.size)], exponent)
        start, stop = np.nan_to_num(edges).tolist()  # the last edge can overflow float64
        return Histogram(start, stop, tuple(self._counts.tolist()))


def _exponent_for(low: float, high: float) -> int:
    """Return the exponent of the smallest width with at most `_MAX_BINS` bins, whose numbers float64 holds exactly."""
    largest = max(abs(low), abs(high))
    if not largest:
        return _LEAST_EXPONENT
    exponent = max(_LEAST_EXPONENT, math.frexp(largest)[1] - _EXACT_BITS)
    span = high / 2 - low / 2  # halves, because the difference can overflow
    if span:
        exponent = max(exponent, math.frexp(span)[1] + 1 - _MAX_BINS.bit_length())
    while _bin_of(high, exponent) - _bin_of(low, exponent) >= _MAX_BINS:
        exponent += 1
    return exponent


def _bin_of(number: float, exponent: int) -> int:
    scaled = math.ldexp(number, -exponent)
    return math.floor(scaled if number >= 0 else min(scaled, -_LEAST))  # a small negative number can become -0.0
