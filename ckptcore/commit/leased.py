"""The steps of a directory that are held by leases."""

from __future__ import annotations

import re
from typing import Final

from ckptcore.commit.clocks import Clock
from ckptcore.commit.holders import new_holder
from ckptcore.commit.holding import ADMINISTRATION, Hold, Purpose
from ckptcore.commit.leases import LeasePlace, take_lease
from ckptcore.commit.sightings import Sightings, break_lease, look_at_lease
from ckptcore.errors import StorageError
from ckptcore.protocols import IF_ABSENT, StorageBackend

__all__ = ["LeasedSteps"]

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
