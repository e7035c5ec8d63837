"""Grids: the arrays of the toy framework. It knows neither NumPy nor ckptcore."""

from __future__ import annotations

import math
from dataclasses import dataclass

SORTS = {"truth": 1, "tiny": 1, "short": 2, "whole": 4, "long": 8, "real": 4, "fine": 8, "rough": 2}
"""Bytes of an element, by its sort."""


class Grid:
    """A mutable array of elements of one sort, in C order."""

    def __init__(self, shape: tuple[int, ...], sort: str, cells: bytearray) -> None:
        if len(cells) != math.prod(shape) * SORTS[sort]:
            raise ValueError(f"a grid of {shape} {sort} does not have {len(cells)} bytes")
        self.shape = shape
        self.sort = sort
        self.cells = cells


@dataclass(frozen=True)
class Sketch:
    """An abstract grid: a shape and a sort without elements."""

    shape: tuple[int, ...]
    sort: str


class Crate:
    """A container of values with labels."""

    def __init__(self, **contents: object) -> None:
        self.contents = contents
