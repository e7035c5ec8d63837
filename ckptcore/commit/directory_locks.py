"""DirectoryLocks: locks that are locked directories, which the kernel releases when their process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final, cast

from ckptcore.commit.leases import Holder, absent_directory, decode_holder, new_holder, read_lease
from ckptcore.commit.locks import (
    OWNER,
    OWNER_LEASE,
    OWNER_RECORD,
    READ_MEANWHILE,
    IfInUse,
    Lock,
    Locks,
    Purpose,
    SeenOwner,
    is_absent,
    read_owner,
    read_record,
)
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.errors import DirectoryInUseError, SaveLostError, StorageError, StorageFullError
from ckptcore.events import logger_named
from ckptcore.protocols import AtomicDirectories, DirectoryLock, StorageBackend

logger = logger_named("ckptcore.commit")

_LOCK_ATTEMPTS: Final = 4
"""Attempts to lock the directory of an owner that has a record. Another process may have the lock for a moment."""

_LOCK_SECONDS: Final = 0.05
"""Pause between two attempts."""

_RECORD_ATTEMPTS: Final = 200
"""Maximum number of attempts, about 10 seconds, while the owner has not written its record."""


class DirectoryLocks(Locks):
    """Locks that are locked directories. See `Locks`.

    A lock is valid once its directory is locked. A process that finds an unlocked directory locks and removes it. So if
    a process has created a directory and cannot lock it, it creates another directory.

    Another host may mount the file system without locks, and use leases instead. This class respects such leases.
    """

    @property
    def _directories(self) -> AtomicDirectories:
        return cast(AtomicDirectories, self._store)

    def _take(self, purpose: Purpose, name: str) -> Lock:
        while True:
            key = f"{INTERNAL_DIRECTORY}/{purpose}/{name}.{new_holder().hold_id}"
            lock = self._directories.lock_directory(key)
            if lock is not None:
                break  # otherwise another process is checking this directory: create another directory
        with ExitStack() as held:
            held.enter_context(lock)
            held.callback(self._remove, key)  # runs before the lock is released
            expect_held = partial(self._expect_held, lock)
            return Lock(f"the step {name}", check=expect_held, release=held.pop_all().close, key=key)

    def _expect_held(self, lock: DirectoryLock) -> None:
        """Check that other processes can see a lock.

        Raises:
            StorageError
        """
        if not lock.is_in_place():
            raise absent_directory(self._display)

    def may_expire(self, name: str) -> bool:
        """See `Locks`. The kernel releases the locks of failed processes immediately."""
        return False

    def _is_locked(self, key: str) -> bool:
        if key.endswith(".json"):
            return super()._is_locked(key)
        try:
            lock = self._directories.lock_directory(key)
        except StorageError as error:
            # The process may be alive and belong to another user.
            logger.warning("cannot check if the process that locked %s is alive, so the lock stays: %s", key, error)
            return True
        if lock is None:
            return True
        with lock:
            self._remove(key)
        return False

    def _remove(self, key: str) -> None:
        """Remove a directory that this process has locked. If this fails, another process removes it later."""
        try:
            self._directories.delete_directory(key)
        except StorageError as error:
            logger.warning("%s cannot be removed: %s", key, error)

    def _own(self, if_in_use: IfInUse, at_least: int) -> Lock:
        lock = self._lock_owner()
        if lock is None:
            by = f"{described_owner(read_owner(self._store))} owns it and is alive, because its lock exists"
            raise self._in_use(by, READ_MEANWHILE)
        # Take the lock first: it excludes other hosts with locks while this process looks for leases of hosts without
        # locks.
        owner = LockedOwner(self._store, self._display, lock, self._lock_owner)
        with ExitStack() as taking:
            taking.callback(owner.release)
            seen = self._unleased(if_in_use)
            if seen is not None and not seen.is_released and not self._break(seen):
                raise DirectoryInUseError(f"{self._display} is in use: {seen.describe()} has renewed its lease")
            number = self._next_number(seen, at_least)
            try:
                owner.begin(number)
            except StorageFullError as error:
                logger.info("the record of the owner of %s is written later: %s", self._display, error)
            except SaveLostError as error:
                raise DirectoryInUseError(f"{self._display} is in use: {error}") from error
            taking.pop_all()
            return Lock(self._owned, check=owner.check, release=owner.release, number=number)

    def _lock_owner(self) -> DirectoryLock | None:
        """Lock the directory of the owner. Return None if another process has locked it."""
        lock = self._directories.lock_directory(OWNER)
        for attempt in range(_RECORD_ATTEMPTS):
            # A process that is being killed, or that calls `owner`, may have the lock for a moment. A new owner writes
            # its record after it has locked the directory, and the error of this process needs the record.
            if lock is not None or (attempt >= _LOCK_ATTEMPTS and read_owner(self._store) is not None):
                break
            self._clock.sleep(_LOCK_SECONDS)
            lock = self._directories.lock_directory(OWNER)
        return lock

    def _locked_owner(self) -> SeenOwner | None:
        if is_absent(self._store):  # asked first, because taking the lock creates the directory
            return None
        lock = self._directories.lock_directory(OWNER)
        if lock is not None:
            with lock:
                return None
        return SeenOwner(read_owner(self._store), is_alive=True)


class LockedOwner:
    """This process as the owner of a directory of steps, by a lock and a record. Thread-safe.

    The kernel locks a directory, not a path. After the file system was mounted again, the path may lead to another
    directory, which another process can lock. So each check looks at the locked directory and at the path.
    """

    def __init__(
        self, store: StorageBackend, display: str, lock: DirectoryLock, lock_again: Callable[[], DirectoryLock | None]
    ) -> None:
        """Take the lock. `begin` has to follow.

        Args:
            store: the storage, opened at the directory of steps.
            display: the directory, in errors.
            lock: the lock of `OWNER`, not entered yet.
            lock_again: locks the directory that is at `OWNER` now. Returns None if another process has locked it.
        """
        lock.__enter__()
        self._store = store
        self._display = display
        self._lock = lock
        self._lock_again = lock_again
        self._holder = new_holder()
        self._before = self._record = b""
        self._is_written = False  # True once the record is written, and no other process had a lease then
        self._changing = threading.Lock()

    def begin(self, number: int) -> None:
        """Write the record.

        Args:
            number: see `Holder.number`.

        Raises:
            StorageFullError: there is no room; the first `check` that finds room writes the record.
            SaveLostError, StorageError: see `check`.
        """
        self._before = read_record(self._store)
        self._holder = replace(self._holder, number=number).after(decode_holder(self._before))
        self._record = self._holder.encode()
        self.check()

    def check(self) -> None:
        """See `Lock.check`. Usually looks at the directory and reads the record once."""
        if not (self._is_written and self._lock.is_in_place() and read_record(self._store) == self._record):
            with self._changing:
                self._check_again()

    def _check_again(self) -> None:
        if not self._lock.is_in_place():
            self._take_again()
        record = read_record(self._store)
        if not self._lock.is_in_place():  # unmounted meanwhile
            raise absent_directory(self._display)
        if record != self._record:
            if self._is_written or record != self._before:
                raise self._lost(f"its record {OWNER_RECORD} was removed or replaced", decode_holder(record))
            self._store.put(OWNER_RECORD, self._record)
        if not self._is_written:
            # A host that cannot see the lock writes its lease, and then looks for this record. So at least one of the
            # two processes sees the other.
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
        return SaveLostError(
            f"the directory {self._display} no longer belongs to this process: {why}; the owner is "
            f"{described_owner(owner)}. Do not change {INTERNAL_DIRECTORY}/ by hand. Open the directory again when no "
            "other process writes there"
        )

    def release(self) -> None:
        """Mark the record as released, for hosts that cannot see the lock, and release the lock."""
        try:
            if self._is_written and self._lock.is_in_place() and read_record(self._store) == self._record:
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


def described_owner(owner: Holder | None) -> str:
    """Return the owner of a locked directory in words, for an error."""
    return "a process without a record" if owner is None or owner.released else owner.describe()
