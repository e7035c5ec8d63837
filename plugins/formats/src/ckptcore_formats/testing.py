"""Samples for the test matrix of `ckptcore_testing`: these layouts are read-only."""

from __future__ import annotations

from typing import Final

from ckptcore_testing import LayoutSample

DEEPSPEED: Final = LayoutSample(name="deepspeed", saves=False)
HDF5: Final = LayoutSample(name="hdf5", saves=False)
NUMPY: Final = LayoutSample(name="numpy", saves=False)
PICKLE: Final = LayoutSample(name="pickle", saves=False)
RANKS: Final = LayoutSample(name="ranks", saves=False)
TORCH_CHECKPOINTING: Final = LayoutSample(name="torch-checkpointing", saves=False)
