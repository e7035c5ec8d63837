"""A storage that counts bytes, and comparison of arrays bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from ckptcore_testing import FaultPlan, with_faults

from ckptcore import Context, hookimpl
from ckptcore.context import IOOptions, MemoryOptions, PluginOptions
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

__all__ = ["assert_same", "counted", "place"]

_SCHEME: Final = "counted"


@dataclasses.dataclass(frozen=True)
class _Plugin:
    plan: FaultPlan

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(installed_plugins().storage("file")(url.replace(_SCHEME, "file", 1), options), self.plan)

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {_SCHEME: self._open}


def place(path: Path) -> str:
    """Return a file as a URL of the storage."""
    return f"{_SCHEME}://{path}"


def counted(plan: FaultPlan, load_bytes: int | None = None) -> Context:
    """Return a context whose storage has a fault plan, which counts bytes."""
    memory = MemoryOptions(load_bytes=load_bytes)
    plugins = PluginOptions(extra=(_Plugin(plan),))
    return Context(plugins=plugins, io=IOOptions(threads=1), memory=memory, durability="none")


def assert_same(loaded: object, expected: Any) -> None:
    """Compare an array with that of its owner, in the byte order of this machine."""
    assert isinstance(loaded, np.ndarray)
    found = np.asarray(expected)
    dtype = found.dtype.newbyteorder("=")
    assert loaded.dtype == dtype and loaded.shape == found.shape
    assert loaded.tobytes() == found.astype(dtype).tobytes()
