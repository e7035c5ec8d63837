"""Coverage: whether boxes make up arrays exactly, found out for millions of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.columns import ItemColumns
from ckptcore.model.metadata import ArrayRecord, LeafRecord

__all__ = ["WrittenBoxes", "makes_up"]

_MOST_ELEMENTS: Final = 1 << 62
"""Of an array of which 64 bits count the elements."""

_SPARE_CELLS: Final = 1 << 12


def makes_up(shape: Sequence[int], starts: HostArray, stops: HostArray) -> bool:
    """Whether boxes make up an array: no gap, no overlap. False also where it would take too long to find out here.

    Takes about ``n log n`` for n boxes, however they are cut, if the grid of all their bounds has not many more cells than that.

    Args:
        shape: of the array, in elements.
        starts, stops: the boxes, a row for each and a column for each axis.
    """
    filled = (stops > starts).all(axis=1)
    starts, stops = starts[filled], stops[filled]
    elements = math.prod(shape)
    if not elements or not len(starts) or elements > _MOST_ELEMENTS:
        return not elements and not len(starts)
    if (starts < 0).any() or (stops > np.array(shape, np.int64)).any():
        return False
    if int((stops - starts).prod(axis=1, dtype=np.int64).sum()) != elements:
        return False
    # As many elements as the array has, none of them outside: what is left is that no two boxes overlap.
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
    """In how many boxes the cell of a grid is that is in most of them."""
    changes = np.zeros([extent + 1 for extent in grid], np.int64)
    for corner in range(1 << len(grid)):
        upper = [bool(corner >> axis & 1) for axis in range(len(grid))]
        place = tuple([(high if up else low)[:, axis] for axis, up in enumerate(upper)])
        np.add.at(changes, place, (-1) ** sum(upper))
    for axis in range(len(grid)):
        np.cumsum(changes, axis=axis, out=changes)
    return int(changes.max())


class WrittenBoxes:
    """The boxes that processes wrote, by array."""

    def __init__(self, leaves: Sequence[LeafRecord], written: Sequence[ItemColumns]) -> None:
        """Merge what each process wrote of the arrays of a tree."""
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
        self._places: HostArray = np.searchsorted(leaf[self._order], np.arange(len(leaves) + 1))

    def bounds(self, leaf: int) -> tuple[HostArray, HostArray]:
        """The starts and the stops of the boxes of an array, a row for each."""
        axes = int(self._axes[leaf])
        begins = self._begins[self._places[leaf] : self._places[leaf + 1]]
        rows = self._bounds[begins[:, None] + np.arange(2 * axes)].astype(np.int64)
        return rows[:, :axes], rows[:, axes:]

    def boxes(self, leaf: int) -> Iterator[Box]:
        """The boxes of an array."""
        starts, stops = self.bounds(leaf)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield Box(tuple(start), tuple(stop))
