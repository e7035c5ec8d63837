"""Assertions that boxes cover an array without gaps or overlaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptcore.model import Box


def assert_inside(box: Box, shape: tuple[int, ...], where: str) -> None:
    """Fail unless a box has the axes of an array of this shape and is inside it."""
    assert len(box.start) == len(box.stop) == len(shape), f"{where}: {box} has other axes than an array of {shape}"
    for start, stop, extent in zip(box.start, box.stop, shape, strict=True):
        assert 0 <= start <= stop <= extent, f"{where}: {box} is not inside an array of {shape}"
    for number in (*box.start, *box.stop):
        assert type(number) is int, f"{where}: {box} holds {number!r}, which is not an int"


def assert_covers(boxes: Sequence[Box], shape: tuple[int, ...], where: str, *, overlap: bool = False) -> None:
    """Fail unless the boxes cover every element of the array exactly once (at least once if `overlap`)."""
    covered = np.zeros(shape, np.int32)
    for box in boxes:
        assert_inside(box, shape, where)
        covered[box.slices] += 1
    gaps = int((covered == 0).sum())
    assert gaps == 0, f"{where}: {gaps} elements of an array of {shape} are in no box of {list(boxes)}"
    if not overlap:
        twice = int((covered > 1).sum())
        assert twice == 0, f"{where}: {twice} elements of an array of {shape} are in several boxes of {list(boxes)}"
