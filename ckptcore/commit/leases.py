"""Leases: objects that their holders renew, so that others see that they are alive.

Why a lease that was taken over is never used after: whoever takes it over has seen it unchanged for more than a lease time,
so its last renewal began longer ago than that. `LeaseHold.check` looks whether the object is still ours, and renews it first
if the last renewal began more than half a lease time ago; what is done within the other half is done by the holder.
Every change is on condition of the tag that was seen, so of two that change it one fails.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

from ckptcore.commit.clocks import Clock
from ckptcore.commit.holding import ADMINISTRATION, Hold, Holder, Purpose, decode_holder, new_holder
from ckptcore.errors import ConditionFailedError, ObjectNotFoundError, SaveLostError, StorageError
from ckptcore.io.threads import renew_in_children
from ckptcore.protocols import IF_ABSENT, IfTag, PutCondition, StorageBackend

__all__ = [
    "PATIENCE",
    "LeaseHold",
    "LeasePlace",
    "LeasedSteps",
    "SeenLease",
    "Sightings",
    "break_lease",
    "look_at_lease",
    "take_lease",
]

logger = logging.getLogger("ckptcore.commit")

_RENEWALS_PER_LEASE: Final = 3
_ATTEMPTS: Final = 3
"""How often a renewal is tried whose condition fails though the lease is ours: an earlier one was done and said to fail."""

_State: TypeAlias = Literal["held", "closed", "lost", "parent's"]


@dataclass(frozen=True, slots=True)
class LeasePlace:
    """Where a lease is.

    Attributes:
        store: the storage, opened at the directory of steps.
        key: the object.
        subject: what is held, in words, for errors.
        at_close: what becomes of the object. One that others may take over is marked: it may be theirs by the time that
            a deletion gets there. One whose key nobody else uses is deleted.
    """

    store: StorageBackend
    key: str
    subject: str
    at_close: Literal["mark", "delete"]


def take_lease(place: LeasePlace, lease_seconds: float, condition: PutCondition, clock: Clock) -> LeaseHold | None:
    """Write a lease and keep it alive from a thread; None where something else stands there than `condition` says.

    Raises:
        StorageError: the storage failed. The lease may be there, and then is dead.
    """
    holder = new_holder(lease_seconds)
    began = clock.now()
    try:
        tag = place.store.put(place.key, holder.encode(), condition=condition)
    except (ConditionFailedError, ObjectNotFoundError):
        # A storage that tries again by itself can fail on what it did itself.
        seen = look_at_lease(place.store, place.key)
        if seen is None or seen.holder != holder:
            return None
        tag = seen.tag
    return LeaseHold(_Lease(place, holder, tag, began, clock), clock, lease_seconds)


class LeaseHold:
    """A lease that this process holds. Dropped without being closed, it is let go by its thread."""

    def __init__(self, lease: _Lease, clock: Clock, lease_seconds: float) -> None:
        """Begin to renew a lease that was just taken."""
        self._lease = lease
        try:
            self._renewals = clock.repeat(lease_seconds / _RENEWALS_PER_LEASE, lease.prolong, lease.let_go)
        except BaseException:
            lease.let_go()
            raise

    def check(self) -> None:
        """See `Hold`."""
        self._lease.check()

    def close(self) -> None:
        """See `Hold`."""
        try:
            self._lease.let_go()
        except StorageError as error:
            logger.warning(
                "%s cannot be let go, which others notice after a while: %s", self._lease.place.subject, error
            )
        self._renewals.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Lease:
    """The object of a lease, as its holder knows it. Any thread."""

    def __init__(self, place: LeasePlace, holder: Holder, tag: str, began: float, clock: Clock) -> None:
        self.place: Final = place
        self._holder = holder
        self._tag = tag
        self._began = began  # when the last successful renewal began: it was seen by others later than that
        self._clock = clock
        self._state: _State = "held"
        self._taken_by: Holder | None = None
        self._lock = threading.Lock()
        renew_in_children(self)

    def renew(self) -> None:
        """Hold nothing: this is a forked child, and the lease is its parent's."""
        self._lock = threading.Lock()
        self._state = "parent's"

    def prolong(self) -> None:
        """Say that the holder lives.

        Raises:
            StorageError: it could not be said; the lease may still be ours.
        """
        with self._lock:
            if self._state == "held":
                self._prolong()

    def check(self) -> None:
        """See `Hold`."""
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
        """Hold it no more.

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
        """Write the lease anew, unless it turns out to be lost; when that began."""
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
        """Find out whether the lease is still ours, and by which tag."""
        seen = look_at_lease(self.place.store, self.place.key)
        if seen is None or seen.holder is None or seen.holder.hold_id != self._holder.hold_id or seen.holder.released:
            self._state = "lost"
            self._taken_by = None if seen is None else seen.holder
            logger.warning("%s", self._why_not())
        else:
            self._tag = seen.tag

    def _why_not(self) -> str:
        subject = self.place.subject
        if self._state == "parent's":
            return (
                f"{subject} is held by the process that this one was forked from; save from there, "
                "or open what you need in this process"
            )
        if self._state == "closed":
            return f"{subject} is no longer held: it was closed; open it again"
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


PATIENCE: Final = 1.25
"""How many lease times a lease must be seen unchanged to be dead."""

_MOST_AT_ONCE: Final = 0.5
"""How many lease times one look adds at most: if this process stood still, so may have the holder."""


@dataclass(frozen=True, slots=True)
class SeenLease:
    """A lease as it was when it was looked at.

    Attributes:
        key: its object.
        tag: the object's; another one after each renewal.
        holder: what it says, or None where that cannot be read.
    """

    key: str
    tag: str
    holder: Holder | None

    @property
    def is_released(self) -> bool:
        """Whether it was let go, or broken."""
        return self.holder is not None and self.holder.released

    def seconds(self, otherwise: float) -> float:
        """Its lease time; `otherwise` where it does not say."""
        return (self.holder and self.holder.lease_seconds) or otherwise


def look_at_lease(store: StorageBackend, key: str) -> SeenLease | None:
    """Read a lease, None where there is none."""
    try:
        data, tag = store.get_with_tag(key)
    except ObjectNotFoundError:
        return None
    return SeenLease(key, tag, decode_holder(data))


def break_lease(store: StorageBackend, seen: SeenLease) -> bool:
    """Take a lease from its dead holder, so that it can never be renewed; False if it lives after all."""
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


class Sightings:
    """For how long each lease was seen unchanged, by this process's clock. Any thread."""

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        """Remember nothing yet; `lease_seconds` is what a lease that does not say its time is given."""
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._sightings: dict[str, _Sighting] = {}
        self._lock = threading.Lock()

    def is_dead(self, seen: SeenLease) -> bool:
        """Count one look at a lease; whether it was seen unchanged for so long that its holder must have lost it."""
        lease_seconds = seen.seconds(self._lease_seconds)
        now = self._clock.now()
        with self._lock:
            sighting = self._sightings.get(seen.key)
            if sighting is None or sighting.tag != seen.tag:
                self._sightings[seen.key] = _Sighting(seen.tag, now, 0.0)
                return False
            sighting.unchanged += min(now - sighting.last, _MOST_AT_ONCE * lease_seconds)
            sighting.last = now
            return sighting.unchanged >= PATIENCE * lease_seconds

    def forget_others(self, directory: str, keys: Collection[str]) -> None:
        """Forget what was seen below a directory (ending in ``/``) of leases that are not among `keys`."""
        with self._lock:
            for key in [key for key in self._sightings if key.startswith(directory) and key not in keys]:
                del self._sightings[key]


_NAME: Final = re.compile(r"(.+)\.[0-9a-f]{16}\.json", re.DOTALL)


class LeasedSteps:
    """How steps are held where nothing tells at once who lives. See `HoldsOfSteps`.

    A lease counts as alive until this object saw it unchanged for a whole lease time. It is then broken before anything
    is done in reliance on that, so a holder that only stood still finds out when it checks.
    """

    def __init__(self, store: StorageBackend, lease_seconds: float, clock: Clock) -> None:
        """Hold steps of the directory that `store` was opened at."""
        self._store = store
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._sightings = Sightings(clock, lease_seconds)

    def take(self, purpose: Purpose, name: str) -> Hold:
        """See `HoldsOfSteps`."""
        key = f"{ADMINISTRATION}/{purpose}/{name}.{new_holder().hold_id}.json"
        place = LeasePlace(self._store, key, f"the step {name}", "delete")
        hold = take_lease(place, self._lease_seconds, IF_ABSENT, self._clock)
        if hold is None:
            raise StorageError(
                f"cannot hold the step {name}: the storage says that {key}, whose name nobody else makes, is there already. "
                "Look whether something else writes there"
            )
        return hold

    def living(self, purpose: Purpose, name: str | None = None) -> frozenset[str]:
        """See `HoldsOfSteps`."""
        directory = f"{ADMINISTRATION}/{purpose}"
        found: set[str] = set()
        keys: set[str] = set()
        for entry in self._store.list_names(directory):
            matched = _NAME.fullmatch(entry)
            if matched is None:
                continue
            key = f"{directory}/{entry}"
            keys.add(key)
            if (name is None or matched[1] == name) and self._is_held(key):
                found.add(matched[1])
        self._sightings.forget_others(directory + "/", keys)
        return frozenset(found)

    def is_pinned_here(self, name: str) -> bool:
        """Return whether this process pins a step."""
        for entry in self._store.list_names(f"{ADMINISTRATION}/pins"):
            matched = _NAME.fullmatch(entry)
            if matched is None or matched[1] != name:
                continue
            seen = look_at_lease(self._store, f"{ADMINISTRATION}/pins/{entry}")
            if seen is not None and seen.holder is not None and seen.holder.is_here and not seen.is_released:
                return True
        return False

    def _is_held(self, key: str) -> bool:
        seen = look_at_lease(self._store, key)
        if seen is None:
            return False
        is_dead = seen.is_released or (self._sightings.is_dead(seen) and break_lease(self._store, seen))
        if not is_dead:
            return True
        self._store.delete([key])
        return False
