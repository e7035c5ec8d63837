"""Tells the test matrix of `ckptcore_testing` that these layouts are read-only."""

from __future__ import annotations

from typing import Final

from ckptcore_testing import LayoutSample

__all__ = ["HDF5", "NUMPY", "PICKLE"]

HDF5: Final = LayoutSample(name="hdf5", saves=False)
NUMPY: Final = LayoutSample(name="numpy", saves=False)
PICKLE: Final = LayoutSample(name="pickle", saves=False)
