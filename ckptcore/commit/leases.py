"""Leases: locks that are objects, renewed by their holders. Other processes see whether a holder is alive.

A lease that was taken over is never used afterwards. A process takes it over after it has seen it unchanged for more
than a lease time, so the last renewal began longer ago than that. `Lease.check` looks whether the object is still ours.
It renews it first if the last renewal began more than half a lease time ago; the other half is for what the holder does
next. Every change has the tag that was seen as its condition, so one of two concurrent changes fails.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from ckptcore.commit.clocks import Clock
from ckptcore.commit.holder import Holder, decode_holder, new_holder
from ckptcore.commit.locks import IfInUse, Lock, Locks, Purpose, SeenOwner, check_if_in_use, not_locked
from ckptcore.commit.occupants import ADMINISTRATION
from ckptcore.errors import ConditionFailedError, DirectoryInUseError, ObjectNotFoundError, SaveLostError, StorageError
from ckptcore.io.threads import renew_in_children
from ckptcore.protocols import IF_ABSENT, IfTag, PutCondition, StorageBackend

__all__ = ["Lease", "Leases"]

logger = logging.getLogger("ckptcore.commit")

_RENEWALS_PER_LEASE: Final = 3
_ATTEMPTS: Final = 3
"""Attempts of a renewal whose condition fails though the lease is ours, after a put that was reported as failed."""

_State: TypeAlias = Literal["held", "closed", "lost", "parent's"]


@dataclass(frozen=True, slots=True)
class _LeaseKey:
    """The object of a lease.

    Attributes:
        store: the storage, opened at the directory of steps.
        key: the key of the object.
        subject: what is locked, in words, for errors.
        at_close: what happens to the object. If others may take it over, it is marked: a deletion could arrive when
            it is theirs. If its key is unique, it is deleted.
    """

    store: StorageBackend
    key: str
    subject: str
    at_close: Literal["mark", "delete"]


def _take_lease(place: _LeaseKey, lease_seconds: float, condition: PutCondition, clock: Clock) -> Lease | None:
    """Write a lease and renew it on a thread; None if `condition` is not met.

    Raises:
        StorageError: the storage failed. The lease may have been written; then it expires.
    """
    holder = new_holder(lease_seconds)
    began = clock.now()
    try:
        tag = place.store.put(place.key, holder.encode(), condition=condition)
    except (ConditionFailedError, ObjectNotFoundError):
        # The storage may have retried a put that had succeeded.
        seen = _read_lease(place.store, place.key)
        if seen is None or seen.holder != holder:
            return None
        tag = seen.tag
    return Lease(_LeaseObject(place, holder, tag, began, clock), clock, lease_seconds)


class Lease(Lock):
    """A lease of this process. If it is dropped without `close`, its thread releases it. See `Lock`."""

    def __init__(self, lease: _LeaseObject, clock: Clock, lease_seconds: float) -> None:
        """Start to renew a lease that was just taken."""
        self._lease = lease
        try:
            self._renewals = clock.repeat(lease_seconds / _RENEWALS_PER_LEASE, lease.prolong, lease.let_go)
        except BaseException:
            lease.let_go()
            raise

    def check(self) -> None:
        """See `Lock`."""
        self._lease.check()

    def close(self) -> None:
        """See `Lock`."""
        try:
            self._lease.let_go()
        except StorageError as error:
            logger.warning(
                "%s cannot be let go, which others notice after a while: %s", self._lease.place.subject, error
            )
        self._renewals.stop()


class _LeaseObject:
    """The object of a lease of this process. Any thread."""

    def __init__(self, place: _LeaseKey, holder: Holder, tag: str, began: float, clock: Clock) -> None:
        self.place: Final = place
        self._holder = holder
        self._tag = tag
        self._began = began  # of the last successful renewal: others saw it later
        self._clock = clock
        self._state: _State = "held"
        self._taken_by: Holder | None = None
        self._lock = threading.Lock()
        renew_in_children(self)

    def renew(self) -> None:
        """Release nothing: in a forked child, the lease is that of the parent."""
        self._lock = threading.Lock()
        self._state = "parent's"

    def prolong(self) -> None:
        """Renew the lease.

        Raises:
            StorageError: the renewal failed; the lease may still be ours.
        """
        with self._lock:
            if self._state == "held":
                self._prolong()

    def check(self) -> None:
        """See `Lock`."""
        with self._lock:
            if self._state == "held":
                assert self._holder.lease_seconds is not None
                if self._clock.now() - self._began > self._holder.lease_seconds / 2:
                    self._prolong()
                else:
                    self._look()
            if self._state != "held":
                raise SaveLostError(self._why_not())

    def let_go(self) -> None:
        """Release the lease.

        Raises:
            StorageError: the object could not be changed.
        """
        with self._lock:
            if self._state != "held":
                return
            try:
                if self.place.at_close == "delete":
                    self.place.store.delete([self.place.key])
                else:
                    self._replace(replace(self._holder, released=True))
            finally:
                self._state = "closed"

    def _prolong(self) -> None:
        self._began = self._replace(replace(self._holder, renewals=self._holder.renewals + 1)) or self._began

    def _replace(self, holder: Holder) -> float | None:
        """Replace the object. Return when that began; None if the lease is lost."""
        for _ in range(_ATTEMPTS):
            began = self._clock.now()
            try:
                self._tag = self.place.store.put(self.place.key, holder.encode(), condition=IfTag(self._tag))
            except (ConditionFailedError, ObjectNotFoundError):
                self._look()
                if self._state == "lost":
                    return None
            else:
                self._holder = holder
                return began
        raise StorageError(
            f"{self.place.subject} is held by this process, but {self.place.key} cannot be renewed: the storage says that "
            "its tag is another one than it said just before. Look whether something else writes there"
        )

    def _look(self) -> None:
        """Read the object, to find out if the lease is still ours, and its tag."""
        seen = _read_lease(self.place.store, self.place.key)
        if seen is None or seen.holder is None or seen.holder.hold_id != self._holder.hold_id or seen.holder.released:
            self._state = "lost"
            self._taken_by = None if seen is None else seen.holder
            logger.warning("%s", self._why_not())
        else:
            self._tag = seen.tag

    def _why_not(self) -> str:
        subject = self.place.subject
        if self._state in ("closed", "parent's"):
            return not_locked(subject, self._state)
        if self._taken_by is None:
            return (
                f"{subject} is no longer held: {self.place.key} was removed or replaced, by hand or because this process "
                "gave no sign of life for too long; open it again"
            )
        if self._taken_by.hold_id == self._holder.hold_id:
            return f"{subject} is no longer held: this process gave no sign of life for too long; open it again"
        return (
            f"{subject} was taken over by {self._taken_by.describe()}, because this process gave no sign of life for too "
            "long. What that one writes must stay: end this job, or the other one and then open it again"
        )


_PATIENCE: Final = 1.25
"""Lease times that a lease must be seen unchanged to be expired."""

_MOST_AT_ONCE: Final = 0.5
"""Lease times that one look adds at most: if this process was suspended, so may have been the holder."""


@dataclass(frozen=True, slots=True)
class _SeenLease:
    """A lease as it was read.

    Attributes:
        key: the key of its object.
        tag: the tag of the object; it differs after each renewal.
        holder: the record; None if it cannot be read.
    """

    key: str
    tag: str
    holder: Holder | None

    @property
    def is_released(self) -> bool:
        """True if it was released or broken."""
        return self.holder is not None and self.holder.released

    def describe(self) -> str:
        """Return the holder in words, for an error."""
        return f"somebody whose record {self.key} cannot be read" if self.holder is None else self.holder.describe()

    def seconds(self, otherwise: float) -> float:
        """Return its lease time; `otherwise` if its record has none."""
        return (self.holder and self.holder.lease_seconds) or otherwise


def _read_lease(store: StorageBackend, key: str) -> _SeenLease | None:
    """Read a lease; None if there is none."""
    try:
        data, tag = store.get_with_tag(key)
    except ObjectNotFoundError:
        return None
    return _SeenLease(key, tag, decode_holder(data))


def _break_lease(store: StorageBackend, seen: _SeenLease) -> bool:
    """Mark an expired lease as released, so that it can never be renewed. Return False if it was renewed."""
    broken = replace(seen.holder or new_holder(), released=True)
    try:
        store.put(seen.key, broken.encode(), condition=IfTag(seen.tag))
    except (ConditionFailedError, ObjectNotFoundError):
        return False
    return True


@dataclass(slots=True)
class _Sighting:
    tag: str
    last: float
    unchanged: float


class _LeaseObserver:
    """How long each lease was seen unchanged, by the clock of this process. Any thread."""

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        """Have seen no lease yet; `lease_seconds` is for leases whose record has no lease time."""
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._seen: dict[str, _Sighting] = {}
        self._lock = threading.Lock()

    def is_dead(self, seen: _SeenLease) -> bool:
        """Count one look at a lease. Return True if it was seen unchanged for so long that its holder has lost it."""
        lease_seconds = seen.seconds(self._lease_seconds)
        now = self._clock.now()
        with self._lock:
            sighting = self._seen.get(seen.key)
            if sighting is None or sighting.tag != seen.tag:
                self._seen[seen.key] = _Sighting(seen.tag, now, 0.0)
                return False
            sighting.unchanged += min(now - sighting.last, _MOST_AT_ONCE * lease_seconds)
            sighting.last = now
            return sighting.unchanged >= _PATIENCE * lease_seconds

    def forget_others(self, directory: str, keys: Collection[str]) -> None:
        """Forget the leases below a directory (with a final ``/``) that are not in `keys`."""
        with self._lock:
            for key in [key for key in self._seen if key.startswith(directory) and key not in keys]:
                del self._seen[key]


_NAME: Final = re.compile(r"(.+)\.[0-9a-f]{16}\.json", re.DOTALL)


_OWNER: Final = f"{ADMINISTRATION}/owner.json"
_LOOKS_PER_LEASE: Final = 8


class Leases(Locks):
    """Locks that are leases, for storage without locked directories. See `Locks`.

    A lease counts until this object has seen it unchanged for a whole lease time. It is broken before anybody relies on
    that, so a holder that was only suspended finds out when it checks.
    """

    def __init__(
        self, store: StorageBackend, display: str, lease_seconds: float = 60.0, clock: Clock | None = None
    ) -> None:
        """See `Locks`."""
        super().__init__(store, display, lease_seconds, clock)
        self._seen = _LeaseObserver(self._clock, lease_seconds)

    def take(self, purpose: Purpose, name: str) -> Lock:
        """See `Locks`."""
        key = f"{ADMINISTRATION}/{purpose}/{name}.{new_holder().hold_id}.json"
        place = _LeaseKey(self._store, key, f"the step {name}", "delete")
        lease = _take_lease(place, self._lease_seconds, IF_ABSENT, self._clock)
        if lease is None:
            raise StorageError(
                f"cannot hold the step {name}: the storage says that {key}, whose name nobody else makes, is there already. "
                "Look whether something else writes there"
            )
        return lease

    def locked(self, purpose: Purpose, name: str | None = None) -> frozenset[str]:
        """See `Locks`."""
        directory = f"{ADMINISTRATION}/{purpose}"
        found: set[str] = set()
        keys: set[str] = set()
        for entry in self._store.list_names(directory):
            matched = _NAME.fullmatch(entry)
            if matched is None:
                continue
            key = f"{directory}/{entry}"
            keys.add(key)
            if (name is None or matched[1] == name) and self._is_locked(key):
                found.add(matched[1])
        self._seen.forget_others(directory + "/", keys)
        return frozenset(found)

    def may_expire(self, name: str) -> bool:
        """See `Locks`. A pin of this process does not expire."""
        for entry in self._store.list_names(f"{ADMINISTRATION}/pins"):
            matched = _NAME.fullmatch(entry)
            if matched is None or matched[1] != name:
                continue
            seen = _read_lease(self._store, f"{ADMINISTRATION}/pins/{entry}")
            if seen is not None and seen.holder is not None and seen.holder.is_here and not seen.is_released:
                return False
        return True

    def _is_locked(self, key: str) -> bool:
        seen = _read_lease(self._store, key)
        if seen is None:
            return False
        is_dead = seen.is_released or (self._seen.is_dead(seen) and _break_lease(self._store, seen))
        if not is_dead:
            return True
        self._store.delete([key])
        return False

    def own(self, if_in_use: IfInUse = "error") -> Lock:
        """See `Locks`."""
        check_if_in_use(if_in_use)
        place = _LeaseKey(self._store, _OWNER, f"the directory {self._display}", "mark")
        while True:
            seen = _read_lease(self._store, _OWNER)
            if seen is not None and not seen.is_released:
                if if_in_use == "error":
                    raise DirectoryInUseError(
                        f"{self._display} is in use: {seen.describe()} holds it, or died without letting it go. Close that Checkpointer, "
                        f"or end that job, or use another directory. If it is dead, pass if_in_use='take over', which waits "
                        f"about {seen.seconds(self._lease_seconds):.0f} seconds for a sign of life"
                    )
                seen = self._await_expiry(seen)
            condition = IF_ABSENT if seen is None else IfTag(seen.tag)
            lease = _take_lease(place, self._lease_seconds, condition, self._clock)
            if lease is not None:
                return lease
            # Another process was faster; it may release the lease again.

    def _await_expiry(self, first: _SeenLease) -> _SeenLease | None:
        """Wait until a lease has expired or is released; return it as it then is.

        Raises:
            DirectoryInUseError: it was renewed, or another process took it.
        """
        observer = _LeaseObserver(self._clock, self._lease_seconds)
        seconds = first.seconds(self._lease_seconds)
        logger.info("%s: waiting about %.0f seconds for a sign of life of %s", self._display, seconds, first.describe())
        seen: _SeenLease | None = first
        while seen is not None and not observer.is_dead(seen):
            self._clock.sleep(seconds / _LOOKS_PER_LEASE)
            seen = _read_lease(self._store, _OWNER)
            if seen is None or seen.is_released:
                break
            if seen.tag != first.tag:
                raise DirectoryInUseError(
                    f"{self._display} is in use: {seen.describe()} holds it and is alive, for it gave a sign of life. Close that "
                    "Checkpointer, or end that job, or use another directory; a CheckpointReader can read here meanwhile"
                )
        return seen

    def owner(self) -> SeenOwner | None:
        """See `Locks`."""
        seen = _read_lease(self._store, _OWNER)
        return None if seen is None or seen.is_released else SeenOwner(seen.holder, None)
