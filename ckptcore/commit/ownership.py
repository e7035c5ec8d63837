"""The owner of a directory of steps: only one job writes steps into it."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore.commit.clocks import SYSTEM_CLOCK, Clock
from ckptcore.commit.holding import ADMINISTRATION, Hold, Holder, check_lease_seconds, decode_holder, new_holder
from ckptcore.commit.leases import LeasePlace, SeenLease, Sightings, look_at_lease, take_lease
from ckptcore.commit.locks import LockedHold
from ckptcore.errors import DirectoryInUseError, ObjectNotFoundError, SaveLostError
from ckptcore.protocols import IF_ABSENT, AtomicDirectories, IfTag, StorageBackend

__all__ = ["IfInUse", "SeenOwner", "look_at_owner", "own_directory"]

logger = logging.getLogger("ckptcore.commit")

IfInUse: TypeAlias = Literal["error", "take over"]
"""What to do where another job seems to own the directory: fail at once; wait for a sign of life, and take it if none comes."""

_LOCKED: Final = f"{ADMINISTRATION}/owner"
_RECORD: Final = f"{_LOCKED}/owner.json"
_LEASE: Final = f"{ADMINISTRATION}/owner.json"

_RECORD_BYTES: Final = 1 << 16
_LOCK_ATTEMPTS: Final = 4
_LOCK_SECONDS: Final = 0.05
_RECORD_ATTEMPTS: Final = 200
_LOOKS_PER_LEASE: Final = 8


def own_directory(
    store: StorageBackend,
    display: str,
    *,
    if_in_use: IfInUse = "error",
    lease_seconds: float = 60.0,
    clock: Clock = SYSTEM_CLOCK,
) -> Hold:
    """Own a directory of steps until the result is closed, or this process ends.

    Its `check` belongs before whatever changes a step: a job that stood still may have been taken for dead.
    Where directories can be locked, that of a dead job is free at once. On a network file system such locks may only hold
    between processes of one machine; of two owners the one that came first then finds out when it checks.

    Args:
        store: the storage, opened at the directory of steps.
        display: the directory as the user knows it.
        if_in_use: "take over" waits about `lease_seconds` of the present owner, and only where there are no locks.
        lease_seconds: how long this process may stand still without losing the directory; where there are no locks.
        clock: the time.

    Raises:
        DirectoryInUseError: another job owns it.
        StorageError: the storage failed, or cannot be written.
        ValueError: an argument is none of its values.
    """
    if if_in_use not in ("error", "take over"):
        raise ValueError(f"if_in_use={if_in_use!r}: expected 'error' or 'take over'")
    check_lease_seconds(lease_seconds)
    if isinstance(store, AtomicDirectories):
        return _own_by_lock(store, store, display, clock)
    return _own_by_lease(store, display, if_in_use, lease_seconds, clock)


# --- by a lock --------------------------------------------------------------------------------------------------------


def _own_by_lock(store: StorageBackend, directories: AtomicDirectories, display: str, clock: Clock) -> Hold:
    lock = directories.lock_directory(_LOCKED)
    for attempt in range(_RECORD_ATTEMPTS):
        # A process that is being killed, or that checks whether the directory is empty, holds it for a moment. An owner
        # that has just locked the directory writes its record next, and the error below names the owner.
        if lock is not None or (attempt >= _LOCK_ATTEMPTS and decode_holder(_read_record(store)) is not None):
            break
        clock.sleep(_LOCK_SECONDS)
        lock = directories.lock_directory(_LOCKED)
    if lock is None:
        raise DirectoryInUseError(
            f"{display} is in use: {_recorded_owner(store)} holds it and is alive, for its lock would be gone otherwise. "
            "Close that Checkpointer, or end that job, or use another directory; a CheckpointReader can read here meanwhile"
        )
    try:
        record = new_holder().encode()
        store.put(_RECORD, record)
    except BaseException:
        lock.__exit__(None, None, None)
        raise
    return _LockedOwnership(store, display, lock, record)


class _LockedOwnership(LockedHold):
    """A locked directory, and the record in it of who locked it. The record stays when the lock goes."""

    def __init__(self, store: StorageBackend, display: str, lock: AbstractContextManager[None], record: bytes) -> None:
        super().__init__(lock, f"the directory {display}")
        self._store = store
        self._display = display
        self._record = record
        self._is_lost = False

    def check(self) -> None:
        super().check()
        if not self._is_lost:
            self._is_lost = _read_record(self._store) != self._record
        if self._is_lost:
            raise SaveLostError(
                f"the directory {self._display} no longer belongs to this process: its record {_RECORD} was removed or "
                f"replaced; it is held by {_recorded_owner(self._store)}. Nothing in {ADMINISTRATION}/ is to be changed "
                "by hand; open the directory again when nobody else writes there"
            )


def _read_record(store: StorageBackend) -> bytes:
    try:
        return store.get(_RECORD, 0, _RECORD_BYTES)
    except ObjectNotFoundError:
        return b""


def _recorded_owner(store: StorageBackend) -> str:
    holder = decode_holder(_read_record(store))
    return "a process that left no record" if holder is None else holder.describe()


# --- by a lease -------------------------------------------------------------------------------------------------------


def _own_by_lease(store: StorageBackend, display: str, if_in_use: IfInUse, lease_seconds: float, clock: Clock) -> Hold:
    place = LeasePlace(store, _LEASE, f"the directory {display}", "mark")
    while True:
        seen = look_at_lease(store, _LEASE)
        if seen is not None and not seen.is_released:
            if if_in_use == "error":
                raise DirectoryInUseError(
                    f"{display} is in use: {_owner(seen)} holds it, or died without letting it go. Close that Checkpointer, "
                    f"or end that job, or use another directory. If it is dead, pass if_in_use='take over', which waits "
                    f"about {seen.seconds(lease_seconds):.0f} seconds for a sign of life"
                )
            seen = _await_death(store, display, seen, lease_seconds, clock)
        condition = IF_ABSENT if seen is None else IfTag(seen.tag)
        hold = take_lease(place, lease_seconds, condition, clock)
        if hold is not None:
            return hold
        # Somebody else was faster: whether that one gives it up again is a new question.


def _await_death(
    store: StorageBackend, display: str, first: SeenLease, lease_seconds: float, clock: Clock
) -> SeenLease | None:
    """Watch a lease until it is dead, or let go; as it then is.

    Raises:
        DirectoryInUseError: it is renewed, or somebody else took it.
    """
    sightings = Sightings(clock, lease_seconds)
    seconds = first.seconds(lease_seconds)
    logger.info("%s: waiting about %.0f seconds for a sign of life of %s", display, seconds, _owner(first))
    seen: SeenLease | None = first
    while seen is not None and not sightings.is_dead(seen):
        clock.sleep(seconds / _LOOKS_PER_LEASE)
        seen = look_at_lease(store, _LEASE)
        if seen is None or seen.is_released:
            break
        if seen.tag != first.tag:
            raise DirectoryInUseError(
                f"{display} is in use: {_owner(seen)} holds it and is alive, for it gave a sign of life. Close that "
                "Checkpointer, or end that job, or use another directory; a CheckpointReader can read here meanwhile"
            )
    return seen


def _owner(seen: SeenLease) -> str:
    return f"somebody whose record {seen.key} cannot be read" if seen.holder is None else seen.holder.describe()


@dataclass(frozen=True, slots=True)
class SeenOwner:
    """Who owns a directory.

    Attributes:
        holder: what the owner says of itself; None where that cannot be read.
        is_alive: True where a lock tells. None where it may have died: only a second look, a lease time later, would tell.
    """

    holder: Holder | None
    is_alive: bool | None

    def describe(self) -> str:
        """In words."""
        who = "a process whose record cannot be read" if self.holder is None else self.holder.describe()
        return f"{who}, alive" if self.is_alive else f"{who}, alive or died without letting go"


def look_at_owner(store: StorageBackend) -> SeenOwner | None:
    """Who owns the directory that `store` was opened at; None for nobody, and for one that a lock shows to be dead.

    Writes nothing. A lock is tried for an instant, for which whoever opens the directory at that moment waits.

    Raises:
        StorageError
    """
    if not isinstance(store, AtomicDirectories):
        seen = look_at_lease(store, _LEASE)
        return None if seen is None or seen.is_released else SeenOwner(seen.holder, None)
    # Looked for first: to try a lock makes the directory.
    if "owner/" not in store.list_names(ADMINISTRATION):
        return None
    lock = store.lock_directory(_LOCKED)
    if lock is not None:
        with lock:
            return None
    try:
        record = store.get(_RECORD, 0, _RECORD_BYTES)
    except ObjectNotFoundError:
        return SeenOwner(None, is_alive=True)
    return SeenOwner(decode_holder(record), is_alive=True)
