"""Pieces: what is computed of an array at a time, so that little is held beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import EllipsisType
from typing import Final, TypeAlias

import numpy as np

__all__ = ["Piece", "pieces"]

Piece: TypeAlias = tuple[slice | EllipsisType, ...]
"""What to index an array with; it gives an array also of one without axes."""

_ELEMENTS: Final = 1 << 18
"""Of a piece: in float32 some of them stay in a processor's cache."""


def pieces(shape: tuple[int, ...], most: int = _ELEMENTS) -> Iterator[Piece]:
    """Cut an array into pieces, in C order.

    Args:
        shape: of the array, in elements.
        most: elements of a piece.
    """
    if not shape:
        yield (...,)
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    step = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    for before in np.ndindex(*shape[:axis]):
        ones = [slice(index, index + 1) for index in before]
        for start in range(0, shape[axis], step):
            yield (*ones, slice(start, start + step), ...)
