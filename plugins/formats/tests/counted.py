"""A context whose storage counts bytes, and a bit-for-bit comparison of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from ckptcore_testing import FaultPlan

from ckptcore import Context
from ckptcore.context import IOOptions, MemoryOptions, PluginOptions
from plugins.layout_dcp.tests.counted_places import CountedPlugin, place

__all__ = ["assert_same", "counted", "place"]


def counted(plan: FaultPlan, load_bytes: int | None = None) -> Context:
    """Return a context with a fault plan for its storage, which counts the bytes read."""
    memory = MemoryOptions(load_bytes=load_bytes)
    plugins = PluginOptions(extra=(CountedPlugin(plan),))
    return Context(plugins=plugins, io=IOOptions(threads=1), memory=memory, durability="none")


def assert_same(loaded: object, expected: Any) -> None:
    """Compare a loaded array with the original, converted to the byte order of this machine."""
    assert isinstance(loaded, np.ndarray)
    original = np.asarray(expected)
    dtype = original.dtype.newbyteorder("=")
    assert loaded.dtype == dtype and loaded.shape == original.shape
    assert loaded.tobytes() == original.astype(dtype).tobytes()
