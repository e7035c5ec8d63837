"""Who owns a directory of steps, for somebody who only wants to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptcore.commit.holders import Holder, decode_holder
from ckptcore.commit.holding import ADMINISTRATION
from ckptcore.commit.sightings import look_at_lease
from ckptcore.errors import ObjectNotFoundError
from ckptcore.protocols import AtomicDirectories, StorageBackend

__all__ = ["SeenOwner", "look_at_owner"]

_OWNER: Final = "owner"
_RECORD_BYTES: Final = 1 << 16


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
        seen = look_at_lease(store, f"{ADMINISTRATION}/{_OWNER}.json")
        return None if seen is None or seen.is_released else SeenOwner(seen.holder, None)
    # Looked for first: to try a lock makes the directory.
    if f"{_OWNER}/" not in store.list_names(ADMINISTRATION):
        return None
    lock = store.lock_directory(f"{ADMINISTRATION}/{_OWNER}")
    if lock is not None:
        with lock:
            return None
    try:
        record = store.get(f"{ADMINISTRATION}/{_OWNER}/{_OWNER}.json", 0, _RECORD_BYTES)
    except ObjectNotFoundError:
        return SeenOwner(None, is_alive=True)
    return SeenOwner(decode_holder(record), is_alive=True)
