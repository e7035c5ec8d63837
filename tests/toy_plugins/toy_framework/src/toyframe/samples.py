"""Samples of the toy framework for the conformance matrix."""

from __future__ import annotations

import numpy as np
from ckptcore_testing import ContainerSample, FrameworkSample

from ckptcore.model import ArraySpec, HostArray, name_of_dtype
from toyframe.grids import Crate, Grid, Sketch
from toyframe.handlers import DTYPES, cells_of

SORT_OF = {dtype: sort for sort, dtype in DTYPES.items()}


def grid_of(elements: HostArray) -> Grid:
    """Return a grid with these elements."""
    return Grid(
        elements.shape, SORT_OF[name_of_dtype(elements.dtype)], bytearray(np.ascontiguousarray(elements).tobytes())
    )


def sketch_of(spec: ArraySpec) -> Sketch:
    """Return a sketch of a grid with this spec."""
    return Sketch(spec.shape, SORT_OF[spec.dtype])


GRIDS = FrameworkSample(
    name="toyframe",
    dtypes=tuple(DTYPES.values()),
    make=grid_of,
    abstract=sketch_of,
    elements=cells_of,
    array_type=Grid,
    fills=True,
    containers=(
        ContainerSample(
            "crate",
            lambda two: Crate(left=two[0], right=two[1]),
            lambda crate: [crate.contents["left"], crate.contents["right"]],
        ),
    ),
)
