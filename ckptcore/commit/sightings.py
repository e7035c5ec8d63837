"""What a process saw of leases, to tell which of them are dead."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from ckptcore.commit.clocks import Clock
from ckptcore.commit.holders import Holder, decode_holder, new_holder
from ckptcore.errors import ConditionFailedError, ObjectNotFoundError
from ckptcore.protocols import IfTag, StorageBackend

__all__ = ["PATIENCE", "SeenLease", "Sightings", "break_lease", "look_at_lease"]

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
