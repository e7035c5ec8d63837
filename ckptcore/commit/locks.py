"""Locks: who owns a directory of steps, which steps readers have pinned, and which are being deleted.

A reader pins a step, then looks for announced deletions. A deleter announces a deletion, then looks for pins::

    pin                                       delete
    1. write the pin                          1. announce the deletion
    2. look for announced deletions:          2. look for pins:
       wait until there are none                 if there is one, withdraw, and keep the step
    3. look whether the step exists           3. delete the step
    4. read; remove the pin                   4. withdraw the announcement

No step is deleted while a reader has pinned it and reads it. Suppose one is. Then step 2 of the deletion did not see
the pin, so it came before step 1 of the pin, and so did step 1 of the deletion. Then step 2 of the pin comes after the
announcement, sees it, and waits for its end. That is after step 4 of the deletion, so step 3 of the pin finds no step,
and nothing is read. The storage only has to show what was written to those who look afterwards.

Neither waits for the other forever: a deleter never waits, and a reader waits only for a deletion, which ends.

Locks of failed processes do not count. With real directories a lock is a locked directory (`DirectoryLocks`), which
the kernel releases. Other storage has leases (`ckptcore.commit.leases`), which are broken after a lease time without
renewal. A process that was only suspended finds its lease broken when it checks: a deleter checks before it deletes,
and a reader has read for so long that the step may vanish, which a load notices.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Self, TypeAlias, cast

from ckptcore.commit.clocks import SYSTEM_CLOCK, Clock
from ckptcore.commit.holder import Holder, check_lease_seconds, decode_holder, new_holder
from ckptcore.commit.occupants import ADMINISTRATION
from ckptcore.errors import (
    AtomicityError,
    CheckpointNotFoundError,
    DirectoryInUseError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
)
from ckptcore.io.threads import renew_in_children
from ckptcore.protocols import AtomicDirectories, StorageBackend

__all__ = [
    "DirectoryLocks",
    "IfInUse",
    "Lock",
    "Locks",
    "Purpose",
    "SeenOwner",
    "check_if_in_use",
    "not_locked",
]

logger = logging.getLogger("ckptcore.commit")

Purpose: TypeAlias = Literal["pins", "deleting"]
"""Why a step is locked, and the directory of such locks: a reader has pinned it; its deletion is announced."""

IfInUse: TypeAlias = Literal["error", "take over"]
"""If another job seems to own the directory: fail; or wait, and take over if its lease is not renewed."""


class Lock(ABC):
    """A lock of this process, until it is closed or the process ends. Any thread.

    A forked child does not have the locks of its parent: there `check` raises and `close` does nothing.
    """

    @abstractmethod
    def check(self) -> None:
        """Do nothing while this process has the lock. Usually at most one small request to the storage.

        Raises:
            SaveLostError: the lock was taken over, removed or closed, or belongs to the parent process. This is final.
            StorageError: the storage failed, so it is unknown.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the lock. Closing twice is no error. If the storage fails, that is logged."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def not_locked(subject: str, state: Literal["closed", "parent's"]) -> str:
    """Return why `Lock.check` fails; `subject` is what was locked."""
    if state == "closed":
        return f"{subject} is no longer held: it was closed; open it again"
    return (
        f"{subject} is held by the process that this one was forked from; save from there, "
        "or open what you need in this process"
    )


def check_if_in_use(if_in_use: IfInUse) -> None:
    """Refuse a value that is no `IfInUse`.

    Raises:
        ValueError
    """
    if if_in_use not in ("error", "take over"):
        raise ValueError(f"if_in_use={if_in_use!r}: expected 'error' or 'take over'")


@dataclass(frozen=True, slots=True)
class SeenOwner:
    """The owner of a directory.

    Attributes:
        holder: the record of the owner; None if it cannot be read.
        is_alive: True for a locked directory. None for a lease: only a second look, a lease time later, would tell.
    """

    holder: Holder | None
    is_alive: bool | None

    def describe(self) -> str:
        """Return the owner in words."""
        who = "a process whose record cannot be read" if self.holder is None else self.holder.describe()
        return f"{who}, alive" if self.is_alive else f"{who}, alive or died without letting go"


_FIRST_POLL_SECONDS: Final = 0.01
_LAST_POLL_SECONDS: Final = 2.0


class Locks(ABC):
    """The locks in one directory of steps: its owner, pins of steps, announced deletions. Any thread.

    Keep the object as long as the directory is used: on storage without locks it remembers the leases of others, and so
    finds expired ones. A new object takes every lease for alive.
    """

    def __init__(
        self, store: StorageBackend, display: str, lease_seconds: float = 60.0, clock: Clock | None = None
    ) -> None:
        """Write nothing yet.

        Args:
            store: the storage, opened at the directory of steps.
            display: the directory as the user knows it.
            lease_seconds: how long this process may be suspended without losing a lease.
            clock: the time; None: the system's.

        Raises:
            ValueError: a lease cannot be that long.
        """
        self._store = store
        self._display = display
        self._lease_seconds = check_lease_seconds(lease_seconds)
        self._clock = clock or SYSTEM_CLOCK

    @abstractmethod
    def own(self, if_in_use: IfInUse = "error") -> Lock:
        """Own the directory until the result is closed, or this process ends.

        Call `check` before every change of a step: a suspended process may have lost the directory. The directory of a
        failed job is free at once with real directories. On a network file system such locks may work only between
        processes of one machine; then the first of two owners finds out when it checks.

        Args:
            if_in_use: "take over" waits about one lease time for a renewal, and only without real directories.

        Raises:
            DirectoryInUseError: another job owns it.
            StorageError: the storage failed, or cannot be written.
            ValueError: `if_in_use` is none of its values.
        """

    @abstractmethod
    def owner(self) -> SeenOwner | None:
        """Return the owner of the directory; None if it has none, or its process has certainly ended.

        Writes nothing. A lock is tried for an instant, for which a process that opens the directory then waits.

        Raises:
            StorageError
        """

    @abstractmethod
    def take(self, purpose: Purpose, name: str) -> Lock:
        """Lock a step, visible to others when this returns. Several locks of one step may exist.

        Raises:
            StorageError
        """

    @abstractmethod
    def locked(self, purpose: Purpose, name: str | None = None) -> frozenset[str]:
        """Return the locked steps, or of these the one called `name`. Removes locks of failed processes that it finds.

        Raises:
            StorageError
        """

    @abstractmethod
    def may_expire(self, name: str) -> bool:
        """Return True if a pin of a step may be that of a failed process, so that waiting may help.

        Raises:
            StorageError
        """

    def pin(self, name: str, *, wait_seconds: float = 180.0) -> Lock:
        """Keep a step from being deleted until the result is closed. Look whether the step exists after this returns.

        Waits while the step is being deleted; on storage without locks also, about a lease time, if its deleter failed.

        Args:
            name: the directory of the step.
            wait_seconds: the longest time to wait.

        Raises:
            CheckpointNotFoundError: it is still being deleted.
            StorageError: the storage failed, or cannot be written.
        """
        _check_name(name)
        try:
            pin = self.take("pins", name)
        except (StorageError, AtomicityError) as error:
            failed = StorageError(
                f"cannot pin the step {name} in {self._display}: {error}. A pin is written beside the steps; where you may "
                "not write, read without one, and see to it that the step is not deleted meanwhile"
            )
            failed.errno = getattr(error, "errno", None)
            raise failed from error
        try:
            self._await_deletion(name, wait_seconds)
        except BaseException:
            pin.close()
            raise
        return pin

    def _await_deletion(self, name: str, wait_seconds: float) -> None:
        deadline = self._clock.now() + wait_seconds
        pause = _FIRST_POLL_SECONDS
        while self.locked("deleting", name):
            if self._clock.now() >= deadline:
                raise CheckpointNotFoundError(
                    f"the step {name} in {self._display} has been in deletion for {wait_seconds:.0f} seconds; "
                    "use another step"
                )
            self._clock.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)

    def pinned(self) -> frozenset[str]:
        """Return the names of the pinned steps, without the pins of processes that are known to have failed.

        Raises:
            StorageError
        """
        return self.locked("pins")

    def is_pinned(self, name: str) -> bool:
        """Return True if a step is in `pinned`.

        Raises:
            StorageError
        """
        return bool(self.locked("pins", name))

    def intend_deletion(self, name: str) -> Lock | None:
        """Announce the deletion of a step; None if it is pinned and must stay.

        Call `check` of the result right before the deletion, and close it afterwards.

        Raises:
            StorageError
        """
        _check_name(name)
        intent = self.take("deleting", name)
        try:
            is_pinned = self.is_pinned(name)
        except BaseException:
            intent.close()
            raise
        if is_pinned:
            intent.close()
            return None
        return intent

    def sweep(self) -> None:
        """Remove the pins and announcements of failed processes; of leases, those that this object saw expire.

        Raises:
            StorageError
        """
        self.locked("pins")
        self.locked("deleting")


def _check_name(name: str) -> None:
    if not name or "/" in name:
        raise ValueError(f"{name!r} is no name of a step: expected one name, without '/'")


# --- locked directories -----------------------------------------------------------------------------------------------


class _DirectoryLock(Lock):
    """A locked directory. Any thread."""

    def __init__(
        self,
        lock: AbstractContextManager[None],
        subject: str,
        *,
        before_unlocking: Callable[[], None] = lambda: None,
        check_record: Callable[[], None] = lambda: None,
    ) -> None:
        """Take charge of a lock.

        Args:
            lock: a lock that this process has, entered or not.
            subject: what is locked, in words, for errors.
            before_unlocking: called while no other process can have the lock.
            check_record: called by `check`; raises if the lock is lost.
        """
        self._lock = lock
        self._subject = subject
        self._before_unlocking = before_unlocking
        self._check_record = check_record
        self._state: Literal["held", "closed", "parent's"] = "held"
        renew_in_children(self)

    def renew(self) -> None:
        """Release nothing: in a forked child, the lock is that of the parent."""
        self._state = "parent's"

    def check(self) -> None:
        """See `Lock`."""
        if self._state != "held":
            raise SaveLostError(not_locked(self._subject, self._state))
        self._check_record()

    def close(self) -> None:
        """See `Lock`."""
        if self._state != "held":
            return
        self._state = "closed"
        try:
            self._before_unlocking()
        finally:
            self._lock.__exit__(None, None, None)


_NAME: Final = re.compile(r"(.+)\.[0-9a-f]{16}/", re.DOTALL)

_OWNER: Final = f"{ADMINISTRATION}/owner"
_RECORD: Final = f"{_OWNER}/owner.json"
_RECORD_BYTES: Final = 1 << 16
_LOCK_ATTEMPTS: Final = 4
_LOCK_SECONDS: Final = 0.05
_RECORD_ATTEMPTS: Final = 200


class DirectoryLocks(Locks):
    """Locks that are locked directories. See `Locks`.

    A lock counts from the moment its directory is locked. A process that finds an unlocked directory removes it under
    its lock, so a process that has created it and not locked it yet notices, and creates another one.
    """

    def __init__(
        self, store: StorageBackend, display: str, lease_seconds: float = 60.0, clock: Clock | None = None
    ) -> None:
        """See `Locks`; `store` is `AtomicDirectories` too."""
        super().__init__(store, display, lease_seconds, clock)
        self._directories = cast(AtomicDirectories, store)

    def take(self, purpose: Purpose, name: str) -> Lock:
        """See `Locks`."""
        while True:
            key = f"{ADMINISTRATION}/{purpose}/{name}.{new_holder().hold_id}"
            lock = self._directories.lock_directory(key)
            if lock is not None:
                return _DirectoryLock(lock, f"the step {name}", before_unlocking=partial(self._remove, key))
            # Another process is just trying this lock.

    def locked(self, purpose: Purpose, name: str | None = None) -> frozenset[str]:
        """See `Locks`."""
        found: set[str] = set()
        for entry in self._store.list_names(f"{ADMINISTRATION}/{purpose}"):
            matched = _NAME.fullmatch(entry)
            if matched is None or (name is not None and matched[1] != name):
                continue
            if self._is_locked(f"{ADMINISTRATION}/{purpose}/{entry.removesuffix('/')}"):
                found.add(matched[1])
        return frozenset(found)

    def may_expire(self, name: str) -> bool:
        """See `Locks`. The kernel releases the locks of failed processes at once."""
        return False

    def _is_locked(self, key: str) -> bool:
        try:
            lock = self._directories.lock_directory(key)
        except StorageError as error:
            # Perhaps of another user. A lock that may be alive counts.
            logger.warning("whether the holder of %s lives cannot be found out, so it is left alone: %s", key, error)
            return True
        if lock is None:
            return True
        with lock:
            self._remove(key)
        return False

    def _remove(self, key: str) -> None:
        """Remove a directory that this process has locked. If that fails, the next process removes it."""
        try:
            self._directories.delete_directory(key)
        except StorageError as error:
            logger.warning("%s cannot be removed: %s", key, error)

    def own(self, if_in_use: IfInUse = "error") -> Lock:
        """See `Locks`."""
        check_if_in_use(if_in_use)
        lock = self._directories.lock_directory(_OWNER)
        for attempt in range(_RECORD_ATTEMPTS):
            # A killed process, or one that looks for the owner, holds it for a moment. An owner that has just locked
            # the directory writes its record next, and the error below names the owner.
            if lock is not None or (attempt >= _LOCK_ATTEMPTS and decode_holder(self._read_record()) is not None):
                break
            self._clock.sleep(_LOCK_SECONDS)
            lock = self._directories.lock_directory(_OWNER)
        if lock is None:
            raise DirectoryInUseError(
                f"{self._display} is in use: {self._recorded_owner()} holds it and is alive, for its lock would be gone otherwise. "
                "Close that Checkpointer, or end that job, or use another directory; a CheckpointReader can read here meanwhile"
            )
        try:
            record = new_holder().encode()
            self._store.put(_RECORD, record)
        except BaseException:
            lock.__exit__(None, None, None)
            raise
        is_lost = False

        def check_record() -> None:
            nonlocal is_lost
            is_lost = is_lost or self._read_record() != record
            if is_lost:
                raise SaveLostError(
                    f"the directory {self._display} no longer belongs to this process: its record {_RECORD} was removed or "
                    f"replaced; it is held by {self._recorded_owner()}. Nothing in {ADMINISTRATION}/ is to be changed "
                    "by hand; open the directory again when nobody else writes there"
                )

        return _DirectoryLock(lock, f"the directory {self._display}", check_record=check_record)

    def owner(self) -> SeenOwner | None:
        """See `Locks`."""
        # Listed first: trying the lock creates the directory.
        if "owner/" not in self._store.list_names(ADMINISTRATION):
            return None
        lock = self._directories.lock_directory(_OWNER)
        if lock is not None:
            with lock:
                return None
        record = self._read_record()
        return SeenOwner(decode_holder(record), is_alive=True)

    def _read_record(self) -> bytes:
        try:
            return self._store.get(_RECORD, 0, _RECORD_BYTES)
        except ObjectNotFoundError:
            return b""

    def _recorded_owner(self) -> str:
        holder = decode_holder(self._read_record())
        return "a process that left no record" if holder is None else holder.describe()
