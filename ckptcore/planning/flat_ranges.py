"""Runs of elements that an array is cut into, so that it never needs to be in memory whole: pure geometry."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from math import prod
from typing import Final

from ckptcore.model.arrays import ArraySpec, Box

__all__ = ["cut_runs", "run_extent"]

_MOST_RUNS: Final = 1 << 16
"""About how many runs an array is cut into at most, however large a hostile checkpoint says that it is."""
_FEWEST: Final = 3
"""Into so many runs a band is cut at least: a reader that has one checksum for all of a band compares it where half of that or more
is wanted, and would read all of it for each half."""


def cut_runs(spec: ArraySpec, bands: Collection[int], *, most_bytes: int, band_bytes: int) -> list[Box]:
    """Cut an array into boxes that follow each other in C order, each of them one run of elements.

    Args:
        spec: the array.
        bands: boundaries along the first axis at which it is best cut, in elements: what is between two of them is stored together.
            In any order; those outside of the array count for nothing.
        most_bytes: of one run, unless it is one element, or a band.
        band_bytes: a band is not cut up to here.

    Returns:
        One box for an array of up to `most_bytes`, also for one that is empty.
    """
    if not spec.shape or spec.nbytes <= most_bytes:
        return [Box.whole(spec.shape)]
    most_bytes = max(most_bytes, -(-spec.nbytes // _MOST_RUNS))
    rows, rest = spec.shape[0], spec.shape[1:]
    itemsize = spec.numpy_dtype.itemsize
    row_bytes = prod(rest) * itemsize
    edges = [0, *sorted({bound for bound in bands if 0 < bound < rows}), rows]
    found: list[Box] = []
    first = 0
    for low, high in itertools.pairwise(edges):
        if low > first and (high - first) * row_bytes > most_bytes:
            found.extend(_rows(first, low, rest))
            first = low
        if (high - first) * row_bytes > max(most_bytes, band_bytes):  # one band then, that is too large
            found.extend(_cut((), first, high, rest, itemsize, most_bytes))
            first = high
    if first < rows:
        found.extend(_rows(first, rows, rest))
    return found


def _rows(first: int, stop: int, rest: tuple[int, ...]) -> Iterator[Box]:
    yield Box((first, *(0,) * len(rest)), (stop, *rest))


def _cut(
    above: tuple[int, ...], first: int, stop: int, rest: tuple[int, ...], itemsize: int, most_bytes: int
) -> Iterator[Box]:
    """Cut rows `first` to `stop` of the part of an array at the index `above`; they are more than `most_bytes`."""
    row_bytes = prod(rest) * itemsize
    rows = stop - first
    if row_bytes <= most_bytes or not rest:
        count = min(rows, max(_FEWEST, -(-rows // max(1, most_bytes // row_bytes))))
        bounds = [first + rows * number // count for number in range(count + 1)]
        after = tuple([index + 1 for index in above])
        for low, high in itertools.pairwise(bounds):
            yield Box((*above, low, *(0,) * len(rest)), (*after, high, *rest))
        return
    for row in range(first, stop):
        yield from _cut((*above, row), 0, rest[0], rest[1:], itemsize, most_bytes)


def run_extent(shape: tuple[int, ...], box: Box) -> tuple[int, int] | None:
    """Where the elements of a box begin and end among those of the array in C order; None if they are not one run.

    Args:
        shape: of the array.
        box: with as many axes.
    """
    one = True  # whether the box has one index only on each axis so far
    first = 0
    inner = prod(shape)
    if not box.size:
        return (0, 0)
    for extent, start, stop in zip(shape, box.start, box.stop, strict=True):
        if not one and stop - start != extent:
            return None
        inner //= extent
        first += start * inner
        one = one and stop - start == 1
    return first, first + box.size
