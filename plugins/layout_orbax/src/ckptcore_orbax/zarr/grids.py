"""Cells of a regular grid: their numbers and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import Box

__all__ = ["MOST_CELLS", "cell_box", "expect_countable", "flat_index", "unflat_index"]

MOST_CELLS: Final = 1 << 24
"""More chunks of one array than anybody writes; a hostile shape may state any number."""


def expect_countable(box: Box, step: Sequence[int], name: str) -> None:
    """Refuse a box that touches more cells than any array has, before they are listed.

    Raises:
        CorruptCheckpointError
    """
    cells = prod(
        [-(-stop // extent) - start // extent for start, stop, extent in zip(box.start, box.stop, step, strict=True)]
    )
    if cells > MOST_CELLS:
        raise CorruptCheckpointError(
            f"{name!r} is said to have {cells} chunks where at most {MOST_CELLS} are expected; what describes the arrays is "
            "damaged: restore it from a copy, or load another checkpoint"
        )


def cell_box(step: tuple[int, ...], index: tuple[int, ...]) -> Box:
    """The box of a cell; it may reach beyond the array."""
    start = tuple(map(int.__mul__, index, step))
    return Box(start, tuple(map(int.__add__, start, step)))


def flat_index(index: tuple[int, ...], grid: Sequence[int]) -> int:
    """The number of a cell in C order."""
    number = 0
    for position, extent in zip(index, grid, strict=True):
        number = number * extent + position
    return number


def unflat_index(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `flat_index`."""
    index = []
    for extent in reversed(grid):
        number, position = divmod(number, extent)
        index.append(position)
    return tuple(reversed(index))
