"""The handlers of the toy framework satisfy their protocols."""

from __future__ import annotations

import numpy as np
from ckptcore_testing import (
    SHAPES,
    ContainerExample,
    ContainerHandlerTests,
    LeafExample,
    LeafHandlerTests,
    PluginTests,
    bit_patterns,
)
from toyframe.grids import Crate, Grid
from toyframe.handlers import DTYPES, CrateHandler, GridHandler, cells_of
from toyframe.samples import grid_of, sketch_of

from ckptcore.model import ArraySpec


def flip(grid: Grid) -> None:
    """Change every element of a grid."""
    for position in range(len(grid.cells)):
        grid.cells[position] ^= 1


def example(spec: ArraySpec) -> LeafExample:
    """Return an example of a grid with this spec."""
    elements = bit_patterns(spec)
    return LeafExample(
        str(spec),
        lambda: grid_of(elements),
        elements,
        lambda grid: np.array(cells_of(grid)),
        (lambda: sketch_of(spec),),
        flip,
    )


class TestGrids(LeafHandlerTests):
    handler = GridHandler()
    examples = (
        *[example(ArraySpec((4, 3), dtype)) for dtype in DTYPES.values()],
        *[example(ArraySpec(shape, "float32")) for shape in SHAPES],
    )


class TestCrates(ContainerHandlerTests):
    handler = CrateHandler()
    examples = (
        ContainerExample("two", lambda: Crate(z=object(), a=object()), lambda crate: list(crate.contents.values())),
        ContainerExample("empty", Crate, lambda crate: list(crate.contents.values())),
    )


class TestPlugin(PluginTests):
    entry_point = "toyframe"
    heavy = ("toyframe.grids", "toyframe.handlers")
