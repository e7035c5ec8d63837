"""A context whose storage counts bytes, and comparison of arrays bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from ckptcore_testing import FaultPlan

from ckptcore import Context
from ckptcore.context import IOOptions, MemoryOptions, PluginOptions
from plugins.layout_dcp.tests.counted_places import CountedPlugin, place

__all__ = ["assert_same", "counted", "place"]


def counted(plan: FaultPlan, load_bytes: int | None = None) -> Context:
    """Return a context whose storage has a fault plan, which counts bytes."""
    memory = MemoryOptions(load_bytes=load_bytes)
    plugins = PluginOptions(extra=(CountedPlugin(plan),))
    return Context(plugins=plugins, io=IOOptions(threads=1), memory=memory, durability="none")


def assert_same(loaded: object, expected: Any) -> None:
    """Compare an array with that of its owner, in the byte order of this machine."""
    assert isinstance(loaded, np.ndarray)
    found = np.asarray(expected)
    dtype = found.dtype.newbyteorder("=")
    assert loaded.dtype == dtype and loaded.shape == found.shape
    assert loaded.tobytes() == found.astype(dtype).tobytes()
