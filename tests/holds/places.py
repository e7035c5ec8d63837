"""Storages to hold something in: with locks and without."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.simulated_storage import open_simulated

from ckptcore.builtin.local import open_local
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.commit.subdirectory import AtomicSubdirectories, Subdirectory
from ckptcore.errors import AtomicityError
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


class LockedWhenEntered(AtomicSubdirectories):
    """A directory of a file system whose locks take effect only when they are entered."""

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        lock = super().lock_directory(key)
        assert lock is not None
        with lock:
            yield

    def lock_directory(self, key: str) -> AbstractContextManager[None] | None:
        lock = super().lock_directory(key)
        if lock is None:
            return None
        with lock:
            return self._lock(key)


class WithoutLocks(AtomicSubdirectories):
    """A directory of a file system without locks."""

    def lock_directory(self, key: str) -> AbstractContextManager[None] | None:
        lock = super().lock_directory(key)
        if lock is not None:
            with lock:
                pass
        raise AtomicityError(f"{key}: the file system has no locks")

    def has_locks(self) -> bool:
        return False


def entered(path: Path) -> StorageBackend:
    """A directory of a file system: it has locks, once they are entered."""
    return LockedWhenEntered(open_local(str(path), OPTIONS), "steps")


def no_flock(path: Path) -> StorageBackend:
    """A directory of a file system without locks."""
    return WithoutLocks(open_local(str(path), OPTIONS), "steps")


LOCKED: Final[tuple[Callable[[Path], StorageBackend], ...]] = (local, simulated, entered)
LEASED: Final[tuple[Callable[[Path], StorageBackend], ...]] = (memory, files_without_locks, no_flock)
EVERYWHERE: Final = LOCKED + LEASED
