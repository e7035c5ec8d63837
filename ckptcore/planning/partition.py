"""Boxes divided into disjoint boxes and flat ranges, and the check that boxes cover an array."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.transfer import ItemColumns, Receipt
from ckptcore.model.tree import format_path

__all__ = [
    "ReaderSet",
    "WrittenBoxes",
    "check_coverage",
    "covers_exactly",
    "cut_box",
    "cut_by_readers",
    "cut_flat_ranges",
    "flat_range",
    "subtract",
    "uncovered",
]

_MAX_RANGES: Final = 1 << 16
"""Approximate limit of the flat ranges of one array. A hostile checkpoint may state any size."""
_LEAST_PARTS: Final = 3
"""Minimum number of parts that a band is cut into. A reader with one checksum for a band verifies it if at least half
of the band is requested, so two halves would each read the whole band."""


def cut_flat_ranges(spec: ArraySpec, bands: Collection[int], *, most_bytes: int, band_bytes: int) -> list[Box]:
    """Cut an array into consecutive boxes in C order, each of which is one flat range of elements.

    Args:
        spec: the array.
        bands: preferred boundaries along the first axis, in elements and in any order. A band is the elements
            between two boundaries. Boundaries outside of the array are ignored.
        most_bytes: limit of the size of a box. A single element, or an uncut band, may exceed it.
        band_bytes: bands up to this size are not cut.

    Returns:
        A single box for an array of up to `most_bytes`, also for an empty one.
    """
    if not spec.shape or spec.nbytes <= most_bytes:
        return [Box.whole(spec.shape)]
    most_bytes = max(most_bytes, -(-spec.nbytes // _MAX_RANGES))
    rows, rest = spec.shape[0], spec.shape[1:]
    itemsize = spec.numpy_dtype.itemsize
    row_bytes = math.prod(rest) * itemsize
    edges = [0, *sorted({bound for bound in bands if 0 < bound < rows}), rows]
    found: list[Box] = []
    first = 0
    for low, high in itertools.pairwise(edges):
        if low > first and (high - first) * row_bytes > most_bytes:
            found.extend(_rows(first, low, rest))
            first = low
        if (high - first) * row_bytes > max(most_bytes, band_bytes):  # a single band that is too large
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
    """Cut rows `first` to `stop` of the subarray at the index `above`, which have more than `most_bytes`."""
    row_bytes = math.prod(rest) * itemsize
    rows = stop - first
    if row_bytes <= most_bytes or not rest:
        count = min(rows, max(_LEAST_PARTS, -(-rows // max(1, most_bytes // row_bytes))))
        bounds = [first + rows * number // count for number in range(count + 1)]
        after = tuple([index + 1 for index in above])
        for low, high in itertools.pairwise(bounds):
            yield Box((*above, low, *(0,) * len(rest)), (*after, high, *rest))
        return
    for row in range(first, stop):
        yield from _cut((*above, row), 0, rest[0], rest[1:], itemsize, most_bytes)


def flat_range(shape: tuple[int, ...], box: Box) -> tuple[int, int] | None:
    """Return the half-open range of a box among the elements of an array in C order; None if it is not contiguous.

    Args:
        shape: shape of the array.
        box: a box of the array.
    """
    one = True  # the box has extent 1 along each axis so far
    first = 0
    inner = math.prod(shape)
    if not box.size:
        return (0, 0)
    for extent, start, stop in zip(shape, box.start, box.stop, strict=True):
        if not one and stop - start != extent:
            return None
        inner //= extent
        first += start * inner
        one = one and stop - start == 1
    return first, first + box.size


ReaderSet: TypeAlias = frozenset[int]
"""The numbers of the readers that request a box."""


def cut_by_readers(requests: Mapping[Box, ReaderSet]) -> list[tuple[Box, ReaderSet]]:
    """Cut overlapping boxes at each other's boundaries into disjoint boxes.

    Boxes that do not overlap are not cut. Takes about ``n log n`` time for n boxes of a grid.

    Args:
        requests: boxes of one array, each with its readers; empty boxes are skipped.

    Returns:
        Disjoint boxes in order of their starts, each with the readers of all boxes that contain it.
    """
    boxes = [box for box in requests if box.size]
    if len(boxes) <= 1:
        return [(box, requests[box]) for box in boxes]
    axis = _sweep_axis(boxes)
    done: list[tuple[Box, ReaderSet]] = []
    active: list[tuple[Box, ReaderSet]] = []
    for box in sorted(boxes, key=lambda box: (box.start[axis], box.start, box.stop)):
        still: list[tuple[Box, ReaderSet]] = []
        for cell in active:
            (still if cell[0].stop[axis] > box.start[axis] else done).append(cell)
        active = _overlay(still, box, requests[box])
    return sorted([*done, *active], key=lambda cell: cell[0].start)


def cut_box(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Cut a box into pieces of about equal size, in C order. A piece has at least one element.

    Cuts along the first axis that is longer than one element, so that pieces stay as contiguous as the box.

    Args:
        box: the box to cut.
        itemsize: bytes per element.
        most_bytes: limit of a piece.
    """
    nbytes = box.size * itemsize
    if nbytes <= most_bytes or box.size <= 1:
        yield box
        return
    axis = next(axis for axis, extent in enumerate(box.shape) if extent > 1)
    extent = box.shape[axis]
    count = min(-(-nbytes // most_bytes), extent)
    for piece in box.bands(axis, -(-extent // count)):
        yield from cut_box(piece, itemsize, most_bytes)


def _sweep_axis(boxes: Sequence[Box]) -> int:
    """Return the axis with the most different starts: a sweep along it has the fewest boxes active at once."""
    counts = [len({box.start[axis] for box in boxes}) for axis in range(len(boxes[0].start))]
    return counts.index(max(counts))


def _overlay(cells: Sequence[tuple[Box, ReaderSet]], box: Box, readers: ReaderSet) -> list[tuple[Box, ReaderSet]]:
    """Add a box to disjoint cells, and cut both where they overlap."""
    overlaid: list[tuple[Box, ReaderSet]] = []
    rest = [box]
    for cell, before in cells:
        common = cell.intersect(box)
        if common is None:
            overlaid.append((cell, before))
            continue
        overlaid.append((common, before | readers))
        overlaid.extend([(part, before) for part in subtract(cell, box)])
        rest = [part for piece in rest for part in subtract(piece, common)]
    overlaid.extend([(part, readers) for part in rest])
    return overlaid


def subtract(box: Box, other: Box) -> list[Box]:
    """Subtract `other` from `box`. Returns the rest as disjoint boxes, up to two per axis."""
    inner = box.intersect(other)
    if inner is None:
        return [box]
    parts = []
    start, stop = list(box.start), list(box.stop)
    for axis, (low, high) in enumerate(zip(inner.start, inner.stop, strict=True)):
        if start[axis] < low:
            parts.append(Box(tuple(start), (*stop[:axis], low, *stop[axis + 1 :])))
        if high < stop[axis]:
            parts.append(Box((*start[:axis], high, *start[axis + 1 :]), tuple(stop)))
        start[axis], stop[axis] = low, high
    return parts


_MAX_ELEMENTS: Final = 1 << 62
"""Limit of elements: larger counts could overflow 64 bits."""

_SPARE_CELLS: Final = 1 << 12


def covers_exactly(shape: Sequence[int], starts: HostArray, stops: HostArray) -> bool:
    """Return True if boxes cover an array without gap and overlap. May return False if the check would take too long.

    Takes about ``n log n`` time for n boxes. Returns False if the grid of all bounds has many more cells than boxes.

    Args:
        shape: shape of the array, in elements.
        starts, stops: the boxes, with a row for each box and a column for each axis.
    """
    filled = (stops > starts).all(axis=1)
    starts, stops = starts[filled], stops[filled]
    elements = math.prod(shape)
    if not elements or not len(starts) or elements > _MAX_ELEMENTS:
        return not elements and not len(starts)
    if (starts < 0).any() or (stops > np.array(shape, np.int64)).any():
        return False
    if int((stops - starts).prod(axis=1, dtype=np.int64).sum()) != elements:
        return False
    # The boxes have as many elements as the array, and none is outside: only overlaps remain to be checked.
    low = np.zeros_like(starts)
    high = np.zeros_like(stops)
    grid: list[int] = []
    for axis in range(len(shape)):
        bounds = np.unique(np.concatenate([starts[:, axis], stops[:, axis]]))
        low[:, axis] = np.searchsorted(bounds, starts[:, axis])
        high[:, axis] = np.searchsorted(bounds, stops[:, axis])
        grid.append(len(bounds) - 1)
    if math.prod(grid) > 8 * len(starts) + _SPARE_CELLS:
        return False
    if (high - low == 1).all():
        cells = np.ravel_multi_index(tuple(low.T), tuple(grid)) if grid else np.zeros(len(starts), np.int64)
        return len(np.unique(cells)) == len(cells)
    return _counts(low, high, grid) == 1


def _counts(low: HostArray, high: HostArray, grid: Sequence[int]) -> int:
    """Return the largest number of boxes that overlap in one cell of the grid."""
    changes = np.zeros([extent + 1 for extent in grid], np.int64)
    for corner in range(1 << len(grid)):
        upper = [bool(corner >> axis & 1) for axis in range(len(grid))]
        indices = tuple([(high if up else low)[:, axis] for axis, up in enumerate(upper)])
        np.add.at(changes, indices, (-1) ** sum(upper))
    for axis in range(len(grid)):
        np.cumsum(changes, axis=axis, out=changes)
    return int(changes.max())


class WrittenBoxes:
    """The boxes of each array that the processes of a job wrote."""

    def __init__(self, leaves: Sequence[LeafRecord], written: Sequence[ItemColumns]) -> None:
        """Merge the columns of all processes."""
        axes: HostArray = np.array(
            [len(record.spec.shape) if isinstance(record, ArrayRecord) else 0 for record in leaves], np.int64
        )
        none = np.zeros(0, np.int64)
        count = np.concatenate([none, *[columns.counts for columns in written]]).astype(np.int64)
        leaf = np.repeat(np.concatenate([none, *[columns.leaf for columns in written]]).astype(np.int64), count)
        self._bounds: HostArray = np.concatenate([none, *[columns.bounds for columns in written]])
        self._axes = axes
        widths = 2 * axes[leaf]
        self._order: HostArray = np.argsort(leaf, kind="stable")
        self._begins: HostArray = (np.cumsum(widths) - widths)[self._order]
        self._first_rows: HostArray = np.searchsorted(leaf[self._order], np.arange(len(leaves) + 1))

    def bounds(self, leaf: int) -> tuple[HostArray, HostArray]:
        """Return the starts and the stops of the boxes of an array, with a row for each box."""
        axes = int(self._axes[leaf])
        begins = self._begins[self._first_rows[leaf] : self._first_rows[leaf + 1]]
        rows = self._bounds[begins[:, None] + np.arange(2 * axes)].astype(np.int64)
        return rows[:, :axes], rows[:, axes:]

    def boxes(self, leaf: int) -> Iterator[Box]:
        """Iterate over the boxes of an array."""
        starts, stops = self.bounds(leaf)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield Box(tuple(start), tuple(stop))


_COLUMNS_PAY: Final = 16
"""Above this number of boxes, one vectorized check by NumPy is faster than a Python loop."""


def uncovered(spec: ArraySpec, boxes: Sequence[Box]) -> str | None:
    """Return why boxes do not cover an array exactly, as text for a message; None if they do.

    Takes about ``n log n`` time for a grid of n boxes, and longer if they do not cover the array.
    """
    whole = Box.whole(spec.shape)
    if len(boxes) == 1 and boxes[0] == whole:
        return None
    if len(boxes) > _COLUMNS_PAY and all(len(box.start) == len(spec.shape) for box in boxes):
        bounds = np.array([(*box.start, *box.stop) for box in boxes], np.int64).reshape(len(boxes), -1)
        if covers_exactly(spec.shape, bounds[:, : len(spec.shape)], bounds[:, len(spec.shape) :]):
            return None
    # A hostile box may end before it begins on two axes, so that its size is positive.
    filled = [box for box in boxes if all(map(operator.lt, box.start, box.stop))]
    for box in filled:
        if len(box.start) != len(spec.shape) or not whole.contains(box):
            return f"the box {_span(box)} is outside of the array"
    total = sum(box.size for box in filled)
    expected = math.prod(spec.shape)
    if total < expected:
        return f"{expected - total} of {expected} elements are in no box"
    active: list[Box] = []
    for box in sorted(filled, key=lambda box: box.start):
        active = [other for other in active if not other.stop or other.stop[0] > box.start[0]]
        for other in active:
            if other.intersect(box) is not None:
                return f"the boxes {_span(box)} and {_span(other)} overlap"
        active.append(box)
    return None


def check_coverage(tree: TreeMetadata, receipts: Sequence[Receipt]) -> None:
    """Check that the boxes of all processes cover every array of the tree without gap and overlap.

    Raises:
        CorruptCheckpointError: names the first array that they do not cover.
    """
    arrays = [
        (leaf, record)
        for leaf, record in enumerate(tree.leaves)
        if isinstance(record, ArrayRecord) and leaf not in tree.aliases
    ]
    if any(isinstance(receipt.items, ItemColumns) for receipt in receipts):
        columns = WrittenBoxes(tree.leaves, [ItemColumns.of(tree.leaves, receipt.items) for receipt in receipts])
        for leaf, record in arrays:
            if not covers_exactly(record.spec.shape, *columns.bounds(leaf)):
                _expect_whole(tree, leaf, record, list(columns.boxes(leaf)))
        return
    written: dict[int, list[Box]] = {}
    for receipt in receipts:
        for item in receipt.items:
            written.setdefault(item.leaf, []).extend(item.boxes)
    for leaf, record in arrays:
        _expect_whole(tree, leaf, record, written.get(leaf, ()))


def _expect_whole(tree: TreeMetadata, leaf: int, record: ArrayRecord, boxes: Sequence[Box]) -> None:
    reason = uncovered(record.spec, boxes)
    if reason is not None:
        raise CorruptCheckpointError(
            f"{format_path(tree.paths[leaf])} ({record.spec}) is incomplete: the written boxes do not cover it "
            f"exactly: {reason}; the save is not committed. The shards of its leaf handler do not match its description"
        )


def _span(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True)) + "]"
