"""The plugin of the core, which uses the same hooks as other plugins."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptcore.builtin.containers import collection_handler, container_handler
from ckptcore.builtin.host_leaves import abstract_leaves, form_handler, leaf_handler
from ckptcore.builtin.local import open_local
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.builtin.stateful import random_state_handler, state_handler
from ckptcore.errors import PluginError
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import (
    AbstractLeaves,
    CheckpointableHandler,
    ContainerHandler,
    Coordinator,
    FilesHandler,
    LayoutFactory,
    LeafHandler,
    StorageBackend,
    StorageOpener,
    StorageOptions,
)

if TYPE_CHECKING:
    from ckptcore.builtin.memory import MemoryStorages

__all__ = ["BuiltinPlugin", "SingleProcess"]


class SingleProcess:
    """The coordinator of a job with one process.

    With ``JobOptions(coordinator=SingleProcess())``, a process of a larger job saves and loads alone. The other
    processes do not have to take part.
    """

    rank = 0
    size = 1

    def gather(self, key: str, payload: bytes) -> Sequence[bytes]:
        """Return a list that contains only the payload."""
        return [payload]

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Return the payload."""
        if payload is None:
            raise PluginError(f"the only process is the leader, and it broadcast {key!r} without a payload")
        return payload


class BuiltinPlugin:
    """The plugin of the core: containers, host leaves, stateful objects, safetensors, local and memory storage."""

    def __init__(self) -> None:
        self._memory: MemoryStorages | None = None
        self._memory_lock = threading.Lock()
        self._coordinator = SingleProcess()

    @hookimpl
    def ckpt_leaf_handler(self, leaf_type: type) -> LeafHandler | None:
        """NumPy arrays and scalars, sharded NumPy arrays, Python scalars, text, bytes, None, and values with a form."""
        if "ckptcore.builtin.sharded_arrays" in sys.modules:  # no sharded array exists before this import
            from ckptcore.builtin.sharded_arrays import HANDLER, ShardedArray

            if issubclass(leaf_type, ShardedArray):
                return HANDLER
        return leaf_handler(leaf_type) or form_handler(leaf_type)

    @hookimpl
    def ckpt_container_handler(self, value_type: type) -> ContainerHandler | None:
        """dict, OrderedDict, list and their subclasses, tuple, named tuples, dataclasses, and classes of attrs."""
        return container_handler(value_type)

    @hookimpl
    def ckpt_checkpointable_handler(self, value_type: type) -> CheckpointableHandler | None:
        """Random generators, sets, deques, and objects with methods to get and set their state."""
        return random_state_handler(value_type) or collection_handler(value_type) or state_handler(value_type)

    @hookimpl
    def ckpt_files_handler(self, value_type: type) -> FilesHandler | None:
        """Objects that save themselves to a directory."""
        from ckptcore.builtin.files import files_handler  # trees do not need it

        return files_handler(value_type)

    @hookimpl
    def ckpt_frameworks(self) -> Mapping[str, AbstractLeaves]:
        """NumPy."""
        return {"numpy": abstract_leaves}

    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        """The safetensors layout."""
        return {"safetensors": SafetensorsLayout}

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Local directories and memory."""
        return {"file": open_local, "memory": self._open_memory}

    def _open_memory(self, url: str, options: StorageOptions) -> StorageBackend:
        from ckptcore.builtin.memory import MemoryStorages  # other storages do not need it

        with self._memory_lock:
            if self._memory is None:
                self._memory = MemoryStorages()
        return self._memory.open(url, options)

    @hookimpl
    def ckpt_coordinator(self) -> Coordinator:
        """A job of one process."""
        return self._coordinator
