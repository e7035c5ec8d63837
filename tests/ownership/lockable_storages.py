"""Storages with and without locks."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.simulated_storage import open_simulated

from ckptcore.builtin.local import open_local
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.commit.subdirectory import AtomicSubdirectories, Subdirectory
from ckptcore.errors import AtomicityError
from ckptcore.protocols import DirectoryLock, StorageBackend, StorageOptions

OPTIONS: Final = StorageOptions(durable=False)


def local(path: Path) -> StorageBackend:
    """Return a directory of a file system with locks."""
    return open_local(str(path / "steps"), OPTIONS)


def simulated(path: Path) -> StorageBackend:
    """Return a directory of a simulated disk, with locks."""
    return open_simulated(SimulatedDisk(), "disk://steps", OPTIONS)


def memory(path: Path) -> StorageBackend:
    """Return objects in memory, without locks."""
    return MemoryStorages().open(f"memory://{uuid.uuid4().hex}/steps", OPTIONS)


def files_without_locks(path: Path) -> StorageBackend:
    """Return files as an object store without locks, which several processes can use."""
    return Subdirectory(open_local(str(path), OPTIONS), "objects")


class LockedWhenEntered(AtomicSubdirectories):
    """A directory of a file system whose locks take effect only when they are entered."""

    def lock_directory(self, key: str) -> DirectoryLock | None:
        lock = super().lock_directory(key)
        if lock is None:
            return None
        with lock:
            return _LockWhenEntered(lambda: super(LockedWhenEntered, self).lock_directory(key))


class _LockWhenEntered:
    def __init__(self, take: Callable[[], DirectoryLock | None]) -> None:
        self._take = take
        self._held: list[DirectoryLock] = []

    def __enter__(self) -> None:
        lock = self._take()
        assert lock is not None
        lock.__enter__()
        self._held.append(lock)

    def __exit__(self, *error: object) -> None:
        self._held.pop().__exit__(None, None, None)

    def is_in_place(self) -> bool:
        return self._held[0].is_in_place()


class WithoutLocks(AtomicSubdirectories):
    """A directory of a file system without locks."""

    def lock_directory(self, key: str) -> DirectoryLock | None:
        lock = super().lock_directory(key)
        if lock is not None:
            with lock:
                pass
        raise AtomicityError(f"{key}: the file system has no locks")

    def has_locks(self) -> bool:
        return False


def entered(path: Path) -> StorageBackend:
    """Return a directory of a file system whose locks take effect when they are entered."""
    return LockedWhenEntered(open_local(str(path), OPTIONS), "steps")


def no_flock(path: Path) -> StorageBackend:
    """Return a directory of a file system without locks."""
    return WithoutLocks(open_local(str(path), OPTIONS), "steps")


LOCKED: Final[tuple[Callable[[Path], StorageBackend], ...]] = (local, simulated, entered)
LEASED: Final[tuple[Callable[[Path], StorageBackend], ...]] = (memory, files_without_locks, no_flock)
EVERYWHERE: Final = LOCKED + LEASED
