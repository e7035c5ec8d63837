"""Storages to hold something in: with locks and without."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.simulated_storage import open_simulated

from ckptcore.builtin.local import open_local
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.protocols import StorageBackend, StorageOptions

OPTIONS: Final = StorageOptions(durable=False)


def local(path: Path) -> StorageBackend:
    """A directory of a file system: it has locks."""
    return open_local(str(path / "steps"), OPTIONS)


def simulated(path: Path) -> StorageBackend:
    """A directory of a disk that is none: it has locks."""
    return open_simulated(SimulatedDisk(), "disk://steps", OPTIONS)


def memory(path: Path) -> StorageBackend:
    """Objects in memory: no locks."""
    return MemoryStorages().open(f"memory://{uuid.uuid4().hex}/steps", OPTIONS)


def files_without_locks(path: Path) -> StorageBackend:
    """A directory of a file system, seen as an object store: several processes can use it, and there are no locks."""
    return Subdirectory(open_local(str(path), OPTIONS), "objects")


LOCKED: Final[tuple[Callable[[Path], StorageBackend], ...]] = (local, simulated)
LEASED: Final[tuple[Callable[[Path], StorageBackend], ...]] = (memory, files_without_locks)
EVERYWHERE: Final = LOCKED + LEASED
