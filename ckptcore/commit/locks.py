"""Locks: who owns a directory of steps, which steps readers have pinned, and which are being deleted.

A reader pins a step, then looks for announced deletions. A deleter announces a deletion, then looks for pins::

    pin                                       delete
    1. write the pin                          1. announce the deletion
    2. look for announced deletions:          2. look for pins:
       wait until there are none                 if there is one, withdraw and keep the step
    3. check that the step exists             3. delete the step
    4. read; remove the pin                   4. withdraw the announcement

No step is deleted while a reader reads it. Proof: suppose that a step is. Then (2) of the deletion did not see the pin,
so it ran before (1) of the pin, and so did (1) of the deletion. So (2) of the pin ran after the announcement, saw it,
and waited for its end, which is (4) of the deletion. Then (3) of the pin found no step, and the reader read nothing.
The proof requires only that reads and listings show every completed write.

No process waits forever: a deleter never waits while its deletion is announced, and a reader waits only for an
announced deletion, which ends.

Locks of failed processes do not count. With real directories a lock is a locked directory (`DirectoryLocks`), which
the kernel releases. Other storage, and file systems without locks, have leases (`LeasedLocks`), which are broken after
a lease time without renewal. A suspended process finds that its lease is broken when it checks. A deleter of steps
checks before it deletes. A reader does not check: if it was suspended for longer than a lease time, the step can be
deleted, and its load raises an error.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, Literal, Self, TypeAlias

from ckptcore.commit.leases import (
    SYSTEM_CLOCK,
    Clock,
    Holder,
    LeaseObserver,
    SeenLease,
    break_lease,
    check_lease_seconds,
    decode_holder,
    read_lease,
)
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.commit.subdirectory import has_directories
from ckptcore.errors import (
    AtomicityError,
    CheckpointNotFoundError,
    DirectoryInUseError,
    ObjectNotFoundError,
    SaveLostError,
    StepPinnedError,
    StorageError,
    StorageFullError,
)
from ckptcore.events import logger_named
from ckptcore.io.threads import call_within, reset_in_children
from ckptcore.protocols import StorageBackend

logger = logger_named("ckptcore.commit")

Purpose: TypeAlias = Literal["pins", "deleting", "saving"]
"""The purpose of a lock. Also the name of the directory of locks with this purpose.

"pins": a reader has pinned a step. "deleting": the deletion of a step is announced. "saving": a save writes a hidden
directory on a file system without locks.
"""

IfInUse: TypeAlias = Literal["error", "take over"]
"""Behaviour if another job seems to own the directory: fail; or wait, and take over if its lease is not renewed."""


class Lock:
    """A lock of this process, until it is closed or the process ends. Thread-safe.

    A forked child does not have the locks of its parent: there `check` raises and `close` does nothing. A lease that is
    garbage collected without `close` is released by its thread.
    """

    def __init__(
        self, subject: str, *, check: Callable[[], None], release: Callable[[], None], number: int = 0, key: str = ""
    ) -> None:
        """Wrap a lock that was just taken.

        Args:
            subject: what is locked, in words, for errors.
            check: raises the errors of `Lock.check` if the lock is lost.
            release: releases the lock.
            number: for the owner of a directory: see `Holder.number`.
            key: for a lock of a step: its key in the storage, which no other lock has.
        """
        self.number: Final = number
        self.key: Final = key
        self._subject = subject
        self._check = check
        self._fails = False
        self._releases = [release]  # empty once it is closed
        self._state: Literal["held", "closed", "parent's"] = "held"
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Release nothing in a forked child: the parent has the lock."""
        self._state = "parent's"
        self._releases.clear()

    def check(self) -> None:
        """Check that this process still has the lock. Usually at most one small request to the storage.

        Raises:
            SaveLostError: the lock was taken over, removed or closed, or belongs to the parent process.
            StorageFullError: the disk has no room for the lock or its record, so another process could not see it.
            StorageError: the storage failed, or the file system of the directory is not mounted now, so the state of
                the lock is unknown.
        """
        if self._state == "closed":
            raise SaveLostError(f"{self._subject} is no longer locked: it was closed; open it again")
        if self._state == "parent's":
            raise SaveLostError(
                f"{self._subject} is locked by the process that this one was forked from; save in that process, "
                "or open the directory in this one"
            )
        try:
            self._check()
        except StorageError as error:
            if not self._fails:  # once for each outage
                logger.warning("%s: nothing is saved until the storage works again: %s", self._subject, error)
            self._fails = True
            raise
        if self._fails:
            self._fails = False
            logger.warning("%s: the storage works again, and saves go on", self._subject)

    def check_without_room(self) -> None:
        """Check the lock before an operation that needs no disk space, such as a deletion.

        Like `check`, but without `StorageFullError`: a full disk may have no room for the lock itself.

        Raises:
            SaveLostError, StorageError: see `check`.
        """
        with suppress(StorageFullError):
            self.check()

    def close(self, seconds: float | None = None) -> None:
        """Release the lock. Further calls do nothing. An error of the storage is logged.

        Args:
            seconds: the longest time to wait for the storage; None: no limit. After this time, the release continues on
                a thread that ends with the program.
        """
        try:
            release = self._releases.pop()  # atomic: only one of several threads gets it
        except IndexError:
            return
        self._state = "closed"

        def attempt() -> None:
            try:
                release()
            except StorageError as error:
                logger.warning("a lock cannot be released, and ends with this process: %s", error)

        if not call_within(seconds, attempt):
            logger.warning(
                "%s is not released: its storage did not answer for %.0f s, so its lease may have to expire",
                self._subject, seconds,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class SeenOwner:
    """The owner of a directory.

    Attributes:
        holder: the record of the owner; None if it cannot be read.
        is_alive: True if this process sees the lock of the owner. None for a lock that only other hosts can see. None
            for a lease too, because only a second read after a lease time would show whether its process is alive.
    """

    holder: Holder | None
    is_alive: bool | None

    def describe(self) -> str:
        """Return the owner in words."""
        who = "a process whose record cannot be read" if self.holder is None else self.holder.describe()
        return f"{who}, alive" if self.is_alive else f"{who}, alive or failed without releasing it"


OWNER: Final = f"{INTERNAL_DIRECTORY}/owner"
OWNER_LEASE: Final = f"{INTERNAL_DIRECTORY}/owner.json"
OWNER_RECORD: Final = f"{OWNER}/owner.json"
_RECORD_BYTES: Final = 1 << 16

_ENTRY: Final = re.compile(r"(.+)\.[0-9a-f]{16}(?:/|\.json)", re.DOTALL)
"""Pattern of the names of locks: the name of the step, and a random id. A locked directory ends in ``/``."""

READ_MEANWHILE: Final = "; a CheckpointReader can read here meanwhile"

_LOOKS_PER_LEASE: Final = 8
"""Observations of a lease in each lease time, while this process waits for its expiry."""


class Locks(ABC):
    """The locks in one directory of steps: its owner, pins of steps, announced deletions. Thread-safe.

    Use the same object as long as the directory is in use. On storage without locks, it finds expired leases by
    observing the leases of other processes. A new object considers every lease valid.
    """

    def __init__(
        self, store: StorageBackend, display: str, lease_seconds: float = 60.0, clock: Clock | None = None
    ) -> None:
        """Open the locks. Writes nothing.

        Args:
            store: the storage, opened at the directory of steps.
            display: the directory as the user passed it.
            lease_seconds: how long this process may be suspended without losing a lease.
            clock: the clock; None: the system's.

        Raises:
            ValueError: a lease cannot be that long.
        """
        self._store = store
        self._display = display
        self._lease_seconds = check_lease_seconds(lease_seconds)
        self._clock = clock or SYSTEM_CLOCK
        self._seen = LeaseObserver(self._clock, lease_seconds)

    def own(self, if_in_use: IfInUse = "error", *, at_least: int = 0) -> Lock:
        """Own the directory until the result is closed, or this process ends.

        Call `check` before every change of a step: a suspended process may have lost the directory. On a file system
        with locks, the directory of a failed job is free immediately.

        A full disk may have no room for the lock. Then the first `check` that finds room takes it, unless another
        process owned the directory meanwhile. Until then this process cannot save, but it can delete steps to make
        room.

        Args:
            if_in_use: "take over" waits about one lease time for a renewal of a lease. It does not take over a kernel
                lock that this host sees. On a file system without locks, it takes over from an owner on another host
                even if that owner has a kernel lock there; the owner notices this at its next `check`.
            at_least: minimum number of the result. The number is also higher than the numbers of all earlier owners.

        Raises:
            DirectoryInUseError: another job owns it.
            StorageError: the storage failed, or cannot be written.
            ValueError: `if_in_use` is invalid.
        """
        if if_in_use not in ("error", "take over"):
            raise ValueError(f"if_in_use={if_in_use!r}: expected 'error' or 'take over'")
        try:
            return self._own(if_in_use, at_least)
        except StorageFullError as error:
            logger.warning("%s is owned by this process, and locked once there is room: %s", self._display, error)
            return self._own_with_room(if_in_use, at_least)

    @abstractmethod
    def _own(self, if_in_use: IfInUse, at_least: int) -> Lock:
        """See `own`.

        Raises:
            StorageFullError: there is no room for the lock.
        """

    def _own_with_room(self, if_in_use: IfInUse, at_least: int) -> Lock:
        """Return a lock that is taken by the first `check` that finds room for it."""
        taken: list[Lock] = []
        taking = threading.Lock()
        number = self._next_number(read_lease(self._store, OWNER_LEASE), at_least)

        def check() -> None:
            with taking:
                if not taken:
                    try:
                        taken.append(self._own(if_in_use, at_least))
                    except DirectoryInUseError as error:
                        raise SaveLostError(f"another process owns it since this disk was full: {error}") from error
                    if taken[0].number != number:  # another owner has written a higher number meanwhile
                        taken[0].close()
            if taken[0].number != number:
                raise SaveLostError(
                    f"another process owned {self._display} since this disk was full, and may have saved or deleted "
                    "steps; open it again"
                )
            taken[0].check()

        def release() -> None:
            for lock in taken:
                lock.close()

        return Lock(self._owned, check=check, release=release, number=number)

    @property
    def _owned(self) -> str:
        return f"the directory {self._display}"

    def _in_use(self, by: str, remedy: str) -> DirectoryInUseError:
        return DirectoryInUseError(
            f"{self._display} is in use: {by}. Close that Checkpointer, end that job, or use another directory{remedy}"
        )

    def _next_number(self, seen: SeenLease | None, at_least: int) -> int:
        """Return a number for an owner: at least `at_least`, and higher than the numbers of all earlier owners."""
        earlier = [read_owner(self._store), None if seen is None else seen.holder]
        return max([at_least, *[holder.number + 1 for holder in earlier if holder is not None]])

    def _unleased(self, if_in_use: IfInUse) -> SeenLease | None:
        """Return the lease of the last owner, which is released or has expired; None if there is none.

        Raises:
            DirectoryInUseError: another process has the lease.
        """
        seen = read_lease(self._store, OWNER_LEASE)
        if seen is None or seen.is_released:
            return seen
        if if_in_use == "error":
            raise self._in_use(
                f"{seen.describe()} owns it, or failed without releasing it",
                ". If that process has failed, pass if_in_use='take over', which waits about "
                f"{seen.seconds(self._lease_seconds):.0f} seconds for a renewal of its lease",
            )
        return self._await_expiry(seen)

    def _await_expiry(self, first: SeenLease) -> SeenLease | None:
        """Wait until a lease has expired or is released. Return its last state; None if it was removed.

        Raises:
            DirectoryInUseError: it was renewed, or another process took it.
        """
        seconds = first.seconds(self._lease_seconds)
        logger.info("%s: waiting about %.0f s for a renewal by %s", self._display, seconds, first.describe())
        seen = first
        while not self._seen.is_expired(seen):
            self._clock.sleep(seconds / _LOOKS_PER_LEASE)
            now = read_lease(self._store, first.key)
            if now is None or now.is_released:
                return now
            if now.tag != first.tag:
                by = f"{now.describe()} owns it and is alive, because it renewed its lease"
                raise self._in_use(by, READ_MEANWHILE)
            seen = now
        return seen

    def owner(self) -> SeenOwner | None:
        """Return the owner of the directory; None if it has none, or the process of the owner has certainly ended.

        Writes nothing. With real directories, this takes the lock for a moment, and a new owner waits for it.

        Raises:
            StorageError
        """
        seen = read_lease(self._store, OWNER_LEASE)
        if seen is not None and not seen.is_released:
            return SeenOwner(seen.holder, None)
        return self._locked_owner()

    @abstractmethod
    def _locked_owner(self) -> SeenOwner | None:
        """Return the owner that has a kernel lock of the directory, not a lease; None if there is none."""

    @abstractmethod
    def _take(self, purpose: Purpose, name: str) -> Lock:
        """Lock a step. Other processes see the lock once this returns. Several locks of one step may exist."""

    def _is_locked(self, key: str) -> bool:
        """Return True if a lock exists. Remove it if its process has failed."""
        seen = read_lease(self._store, key)
        if seen is None:
            return False
        if not seen.is_released and not (self._seen.is_expired(seen) and self._break(seen)):
            return True
        self._store.delete([key])
        return False

    def _break(self, seen: SeenLease) -> bool:
        try:
            return break_lease(self._store, seen)
        except StorageFullError:  # no room for the mark: the holder also notices if the lease is deleted
            now = read_lease(self._store, seen.key)
            return now is not None and now.tag == seen.tag

    @abstractmethod
    def may_expire(self, name: str) -> bool:
        """Return True if the pins of a step may belong to failed processes and expire.

        Raises:
            StorageError
        """

    def _keys(self, purpose: Purpose) -> Mapping[str, str]:
        """Return the locks of steps: the key of each lock with the name of its step."""
        directory = f"{INTERNAL_DIRECTORY}/{purpose}"
        matches: list[re.Match[str]] = [
            matched for entry in self._store.list_names(directory) if (matched := _ENTRY.fullmatch(entry))
        ]
        return {f"{directory}/{matched[0].removesuffix('/')}": matched[1] for matched in matches}

    def _locked(self, purpose: Purpose, name: str | None = None) -> frozenset[str]:
        """Return the locked steps, or only `name` if it is locked. Remove locks of failed processes."""
        keys = self._keys(purpose)
        return frozenset({step for key, step in keys.items() if name in (None, step) and self._is_locked(key)})

    def pin(self, name: str, *, wait_seconds: float = 180.0) -> Lock:
        """Keep a step from being deleted until the result is closed. The caller then checks that the step exists.

        Waits while the step is being deleted. On storage without locks, the announcement of a failed deleter expires
        after about a lease time.

        Args:
            name: the directory of the step.
            wait_seconds: the longest time to wait for the end of a deletion.

        Raises:
            CheckpointNotFoundError: it is still being deleted after `wait_seconds`.
            StorageError: the storage failed, or cannot be written.
        """
        _check_name(name)
        try:
            pin = self._take("pins", name)
        except (StorageError, AtomicityError) as error:
            failed = StorageError(
                f"cannot pin the step {name} in {self._display}: {error}. A pin is written to the directory of the "
                "steps. If you cannot write there, read without a pin, and do not delete the step meanwhile"
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
        for _ in self._clock.attempts(wait_seconds):
            if not self._locked("deleting", name):
                return
        raise CheckpointNotFoundError(
            f"the step {name} in {self._display} is being deleted (waited {wait_seconds:.0f} seconds); load another "
            "step"
        )

    def pinned(self, name: str | None = None) -> frozenset[str]:
        """Return the pinned steps, or only `name` if it is pinned. Pins of failed processes do not count.

        Raises:
            StorageError
        """
        return self._locked("pins", name)

    def has_pin(self, key: str) -> bool:
        """Return True if this process sees a pin, given `Lock.key`.

        Raises:
            StorageError
        """
        return key in self._keys("pins")

    def intend_deletion(self, name: str) -> Lock | None:
        """Announce the deletion of a step. Return None if the step is pinned and must stay.

        Call `check` of the result right before the deletion, and close it afterwards.

        Raises:
            StorageError
        """
        _check_name(name)
        with ExitStack() as stack:
            try:
                intent = stack.enter_context(self._take("deleting", name))
            except StorageFullError:
                intent = self.unannounced_deletion(name)
            if self.pinned(name):
                return None
            stack.pop_all()
            return intent

    def unannounced_deletion(self, name: str) -> Lock:
        """Return a lock for a deletion that cannot be announced, because the disk is full. `check` looks for pins.

        Without this, no step could be deleted to make room. A full disk has no room for a new pin either.
        """

        def check() -> None:
            if self.pinned(name):
                raise StepPinnedError(f"the step {name} in {self._display} is pinned by a reader; delete it later")

        return Lock(f"the step {name}", check=check, release=lambda: None)

    def sweep(self) -> None:
        """Remove the pins and announcements of failed processes, and leases that this object saw expire.

        Raises:
            StorageError
        """
        self._locked("pins")
        self._locked("deleting")


def _check_name(name: str) -> None:
    if not name or "/" in name:
        raise ValueError(f"{name!r} is not the name of a step: expected one name, without '/'")


def read_owner(store: StorageBackend) -> Holder | None:
    """Return the record of the last owner of a locked directory; None if there is no readable record."""
    return decode_holder(read_record(store)) if has_directories(type(store)) else None


def read_record(store: StorageBackend) -> bytes:
    """Return the bytes of the record of the last owner of a locked directory; empty if there is none."""
    try:
        return store.get(OWNER_RECORD, 0, _RECORD_BYTES)
    except ObjectNotFoundError:
        return b""


def is_absent(store: StorageBackend) -> bool:
    """Return True if an owned directory does not exist now, because its file system is not mounted.

    Looks for the directory `OWNER` in it, which the owner has created. ckptcore never removes that directory.
    """
    return has_directories(type(store)) and "owner/" not in store.list_names(INTERNAL_DIRECTORY)
