"""Boxes divided into disjoint boxes and flat ranges, and the check that boxes cover an array."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.transfer import ItemColumns, Receipt
from ckptcore.model.tree import format_path


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


_FEW_BOXES: Final = 16
"""Up to this number of boxes, comparing each pair is faster than computing `_moved_volumes`."""

_MAX_EXTENT: Final = 1 << 62
"""Limit of the length of an axis, which the tables of boxes share."""

_MAX_ELEMENTS: Final = 1 << 56
"""Limit of elements: the sum of the sizes of few boxes fits into 64 bits."""

_PRIMES: Final[HostArray] = np.array([2147483647, 2147483629], np.uint64)
"""The two largest primes below 2**31: products of two remainders fit into 64 bits."""

_MOVED_ROWS: Final = 1 << 12
"""Number of boxes whose bounds are moved at a time: the arrays stay in the cache."""


def covers_exactly(shape: Sequence[int], starts: HostArray, stops: HostArray) -> bool:
    """Return True if boxes cover an array without gap and overlap.

    Takes time proportional to the boxes and their axes, whatever the boxes are: a hostile checkpoint may state any.

    Let ``step(n)`` be the function of an index that is 0 below `n` and 1 from `n` on. Then a box is the product of
    ``step(start) - step(stop)`` over the axes: 1 inside the box, 0 outside. The boxes cover the array exactly if the
    sum of their products equals the product of the array. Steps at different bounds are independent, so both sides are
    equal if and only if they are equal as polynomials with an unknown for each step. The polynomials are compared at
    random values of the unknowns, modulo two primes. Unequal ones have equal values in less than one of 2**50 calls
    (Schwartz and Zippel).

    Args:
        shape: shape of the array, in elements.
        starts, stops: the boxes, with a row for each box and a column for each axis.
    """
    filled = (stops > starts).all(axis=1)
    if not filled.all():
        starts, stops = starts[filled], stops[filled]
    if not len(starts) or 0 in shape:
        return 0 in shape and not len(starts)
    if max(shape, default=0) > _MAX_EXTENT:
        return False
    ends: HostArray = np.array(shape, np.int64)
    if (starts < 0).any() or (stops > ends).any():
        return False
    if not shape:
        return len(starts) == 1
    if len(starts) <= _FEW_BOXES and math.prod(shape) <= _MAX_ELEMENTS:
        overlapping = ((starts[:, None] < stops) & (starts < stops[:, None])).all(axis=2)  # each box with itself, too
        missing = math.prod(shape) - int((stops - starts).prod(axis=1).sum())
        return not missing and int(overlapping.sum()) == len(starts)
    import random  # only arrays in many boxes need it

    choices = random.SystemRandom()  # keeps the state of the caller's generators
    keys = np.array([[[choices.getrandbits(64)] for _ in shape] for _ in _PRIMES], np.uint64)
    total = _moved_volumes(np.zeros((1, len(shape)), np.int64), ends[None], keys)
    for first in range(0, len(starts), _MOVED_ROWS):
        rows = slice(first, first + _MOVED_ROWS)
        total = total + _PRIMES - _moved_volumes(starts[rows], stops[rows], keys)
    return not (total % _PRIMES).any()


def _moved_volumes(starts: HostArray, stops: HostArray, keys: HostArray) -> HostArray:
    """Return the sum of the sizes of boxes, modulo each prime, after each bound was moved to a random position.

    Args:
        starts, stops: the boxes.
        keys: a random number for each prime and axis.
    """
    primes = _PRIMES[:, None, None]
    mixed = np.concatenate([starts, stops]).astype(np.uint64).T ^ keys  # SplitMix64 of prime, axis and bound
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    moved = (mixed ^ (mixed >> np.uint64(31))) % primes
    extents = (moved[:, :, len(starts) :] + primes - moved[:, :, : len(starts)]) % primes
    volumes = extents[:, 0]
    for axis in range(1, extents.shape[1]):
        volumes = volumes * extents[:, axis] % _PRIMES[:, None]
    sums: HostArray = volumes.sum(axis=1) % _PRIMES
    return sums


class WrittenBoxes:
    """The boxes of each array that the processes of a job wrote."""

    def __init__(self, leaves: Sequence[LeafRecord], written: Sequence[ItemColumns]) -> None:
        """Merge the columns of all processes."""
        axes: HostArray = np.array(
            [len(record.spec.shape) if isinstance(record, ArrayRecord) else 0 for record in leaves], np.int64
        )
        none = np.zeros(0, np.int64)  # `concatenate` refuses an empty list, which a tree without arrays has
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


def uncovered(spec: ArraySpec, boxes: Sequence[Box]) -> str | None:
    """Return why boxes do not cover an array exactly, as text for a message; None if they do.

    Takes time proportional to the boxes if they cover the array, else to the boxes and the logarithm of the elements.
    """
    whole = Box.whole(spec.shape)
    if len(boxes) == 1 and boxes[0] == whole:
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
    if len(filled) <= _FEW_BOXES:
        for box, other in itertools.combinations(filled, 2):
            if box.intersect(other) is not None:
                return f"the boxes {_span(box)} and {_span(other)} overlap"
        return None
    starts, stops = (np.array(bounds, np.int64).reshape(len(filled), -1) for bounds in zip(*filled, strict=True))
    if covers_exactly(spec.shape, starts, stops):
        return None
    element = _not_in_one_box(spec.shape, starts, stops)
    inside = np.flatnonzero(((starts <= element) & (np.array(element, np.int64) < stops)).all(axis=1))
    if len(inside) > 1:
        return f"the boxes {_span(filled[inside[0]])} and {_span(filled[inside[1]])} overlap"
    return f"the element {list(element)} is in no box"


def _not_in_one_box(shape: tuple[int, ...], starts: HostArray, stops: HostArray) -> tuple[int, ...]:
    """Return an element that is in no box, or in several. The boxes are not empty, and do not cover the array."""
    # Bisection: if the boxes cover the lower half exactly, the element is in the upper half.
    first, after = [0] * len(shape), list(shape)
    for axis in range(len(shape)):
        while after[axis] - first[axis] > 1:
            middle = (first[axis] + after[axis]) // 2
            half = [*after[:axis], middle, *after[axis + 1 :]]
            lower = tuple(map(operator.sub, half, first))
            if covers_exactly(lower, np.maximum(starts, first) - first, np.minimum(stops, half) - first):
                first[axis] = middle
            else:
                after = half
    return tuple(first)


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


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Divide a range of the elements of an array, in C order, into boxes in this order. Each is one run of elements.

    At most two boxes for each axis except the last one, plus one.

    Args:
        shape: the shape of the array, of which no extent is 0.
        start, stop: the range, in elements.
    """
    boxes: list[Box] = []
    if start < stop:
        _divide_range(shape, 0, (), start, stop, boxes)
    return boxes


def _divide_range(
    shape: tuple[int, ...], axis: int, index: tuple[int, ...], start: int, stop: int, boxes: list[Box]
) -> None:
    """Divide the elements `start` to `stop` of the part of an array at `index` along the axes before `axis`."""
    if axis == len(shape):
        boxes.append(Box(index, tuple([i + 1 for i in index])))
        return
    rest = shape[axis + 1 :]
    inner = math.prod(rest)
    first, skipped = divmod(start, inner)
    last, kept = divmod(stop, inner)
    if first == last:
        _divide_range(shape, axis + 1, (*index, first), skipped, kept, boxes)
        return
    if skipped:
        _divide_range(shape, axis + 1, (*index, first), skipped, inner, boxes)
        first += 1
    if first < last:
        above = tuple([i + 1 for i in index])
        boxes.append(Box((*index, first, *(0,) * len(rest)), (*above, last, *rest)))
    if kept:
        _divide_range(shape, axis + 1, (*index, last), 0, kept, boxes)
