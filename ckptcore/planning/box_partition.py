"""Cells: disjoint boxes of an array that together are what several readers want of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from ckptcore.model.arrays import Box

__all__ = ["Wanting", "cells_of_wants", "cut_box", "without"]

Wanting: TypeAlias = frozenset[int]
"""Who wants a box."""


def cells_of_wants(wants: Mapping[Box, Wanting]) -> list[tuple[Box, Wanting]]:
    """Cut boxes at each other's boundaries, no finer than that, so that each element lies in one cell.

    Boxes that do not overlap are not cut. Takes about ``n log n`` for n boxes of a grid.

    Args:
        wants: boxes of one array, each with who wants it; boxes without elements are left out.

    Returns:
        In order of their starts, disjoint boxes with who wants them: all that want a box around them.
    """
    boxes = [box for box in wants if box.size]
    if len(boxes) <= 1:
        return [(box, wants[box]) for box in boxes]
    axis = _sweep_axis(boxes)
    done: list[tuple[Box, Wanting]] = []
    active: list[tuple[Box, Wanting]] = []
    for box in sorted(boxes, key=lambda box: (box.start[axis], box.start, box.stop)):
        still: list[tuple[Box, Wanting]] = []
        for cell in active:
            (still if cell[0].stop[axis] > box.start[axis] else done).append(cell)
        active = _overlay(still, box, wants[box])
    return sorted([*done, *active], key=lambda cell: cell[0].start)


def cut_box(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Pieces of a box in C order, each of at most so many bytes and at least one element.

    They are cut along the first axis that is long enough, so that the bytes of a piece follow each other as far as they do in the
    box, and are about equally large.

    Args:
        box: what to cut.
        itemsize: bytes per element.
        most_bytes: of a piece.
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
    """The axis along which the fewest boxes lie beside each other, of several boxes: without axes there is only one."""
    counts = [len({box.start[axis] for box in boxes}) for axis in range(len(boxes[0].start))]
    return counts.index(max(counts))


def _overlay(cells: Sequence[tuple[Box, Wanting]], box: Box, wanting: Wanting) -> list[tuple[Box, Wanting]]:
    """Disjoint cells with one more box laid over them."""
    made: list[tuple[Box, Wanting]] = []
    rest = [box]
    for cell, before in cells:
        common = cell.intersect(box)
        if common is None:
            made.append((cell, before))
            continue
        made.append((common, before | wanting))
        made.extend([(part, before) for part in without(cell, box)])
        rest = [part for piece in rest for part in without(piece, common)]
    made.extend([(part, wanting) for part in rest])
    return made


def without(box: Box, other: Box) -> list[Box]:
    """What is left of a box without another one: up to two boxes per axis."""
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
