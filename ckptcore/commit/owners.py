"""LockedOwner: the owner of a directory of steps that has locked a directory in it, and the record of who that is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ckptcore.commit.leases import Holder, absent_directory, decode_holder, new_holder, read_lease
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.commit.subdirectory import has_directories
from ckptcore.errors import ObjectNotFoundError, SaveLostError, StorageError
from ckptcore.events import logger_named
from ckptcore.protocols import DirectoryLock, StorageBackend

logger = logger_named("ckptcore.commit")

OWNER: Final = f"{INTERNAL_DIRECTORY}/owner"
OWNER_LEASE: Final = f"{INTERNAL_DIRECTORY}/owner.json"
OWNER_RECORD: Final = f"{OWNER}/owner.json"
_RECORD_BYTES: Final = 1 << 16


def read_owner(store: StorageBackend) -> Holder | None:
    """Return the record of the last owner of a locked directory; None if there is none that can be read."""
    return decode_holder(_read_record(store)) if has_directories(type(store)) else None


def _read_record(store: StorageBackend) -> bytes:
    try:
        return store.get(OWNER_RECORD, 0, _RECORD_BYTES)
    except ObjectNotFoundError:
        return b""


def is_absent(store: StorageBackend) -> bool:
    """Return True if an owned directory is not there now, because its file system is not mounted.

    The owner creates a directory in it, which only a person would remove.
    """
    return has_directories(type(store)) and "owner/" not in store.list_names(INTERNAL_DIRECTORY)


class LockedOwner:
    """This process as the owner of a directory of steps, by a lock and a record. Thread-safe.

    The lock is one of a directory, not of a path: after its file system was mounted again, the path may lead to another
    directory, which another process can lock. So each check looks at both.
    """

    def __init__(
        self, store: StorageBackend, display: str, lock: DirectoryLock, lock_again: Callable[[], DirectoryLock | None]
    ) -> None:
        """Take the lock. `begin` has to follow.

        Args:
            store: the storage, opened at the directory of steps.
            display: the directory, in errors.
            lock: the lock of `OWNER`, not entered yet.
            lock_again: locks `OWNER` again, if it is another directory now. Returns None if another process has it.
        """
        lock.__enter__()
        self._store = store
        self._display = display
        self._lock = lock
        self._lock_again = lock_again
        self._holder = new_holder()
        self._before = self._record = b""
        self._is_written = False  # True once no other process has a lease after it was written
        self._changing = threading.Lock()

    def begin(self, number: int) -> None:
        """Write the record.

        Args:
            number: see `Holder.number`.

        Raises:
            StorageFullError: there is no room; the first `check` that finds room writes it.
            SaveLostError, StorageError: see `check`.
        """
        self._before = _read_record(self._store)
        self._holder = replace(self._holder, number=number).after(decode_holder(self._before))
        self._record = self._holder.encode()
        self.check()

    def check(self) -> None:
        """See `Lock.check`. Usually looks at the directory and reads the record once."""
        if not (self._is_written and self._lock.is_in_place() and _read_record(self._store) == self._record):
            with self._changing:
                self._check_again()

    def _check_again(self) -> None:
        if not self._lock.is_in_place():
            self._take_again()
        found = _read_record(self._store)
        if not self._lock.is_in_place():  # unmounted meanwhile
            raise absent_directory(self._display)
        if found != self._record:
            if self._is_written or found != self._before:
                raise self._lost(f"its record {OWNER_RECORD} was removed or replaced", decode_holder(found))
            self._store.put(OWNER_RECORD, self._record)
        if not self._is_written:
            # A host that cannot see the lock writes its lease first, and looks for the record then.
            lease = read_lease(self._store, OWNER_LEASE)
            if lease is not None and not lease.is_released:
                self._mark_released()
                raise self._lost("another process has a lease of it", lease.holder)
            self._is_written = True

    def _take_again(self) -> None:
        """Lock the directory that is at the path now."""
        if is_absent(self._store):
            raise absent_directory(self._display)
        lock = self._lock_again()
        if lock is not None:
            lock.__enter__()
            lock, self._lock = self._lock, lock
            lock.__exit__(None, None, None)
        elif not self._lock.is_in_place():  # else it was unmounted only for a moment
            raise self._lost("its file system was mounted again, and is locked", read_owner(self._store))

    def _lost(self, why: str, owner: Holder | None) -> SaveLostError:
        whose = "a process without a record" if owner is None or owner.released else owner.describe()
        return SaveLostError(
            f"the directory {self._display} no longer belongs to this process: {why}; the owner is {whose}. Do not "
            f"change {INTERNAL_DIRECTORY}/ by hand. Open the directory again when no other process writes there"
        )

    def release(self) -> None:
        """Mark the record as released, for hosts that cannot see the lock, and release the lock."""
        try:
            if self._is_written and self._lock.is_in_place() and _read_record(self._store) == self._record:
                self._mark_released()
        except StorageError as error:
            logger.info(
                "%s: hosts that cannot see the lock still take the directory for one in use; there, open it with "
                "if_in_use='take over': %s",
                self._display,
                error,
            )
        finally:
            self._lock.__exit__(None, None, None)

    def _mark_released(self) -> None:
        self._store.put(OWNER_RECORD, replace(self._holder, released=True).encode())
