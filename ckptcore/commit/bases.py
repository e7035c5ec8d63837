"""Bases: the checkpoints that updates refer to, which are not deleted before them.

An update pins a base, waits while a deletion of it is announced, checks that the base exists, and commits. A deletion
announces itself, looks for pins, then for checkpoints that refer to the base, and only then removes it. So at least one
of two concurrent operations sees the other (see `ckptcore.commit.locks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from ckptcore.commit.clocks import SYSTEM_CLOCK
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.location import Location, commit_method
from ckptcore.commit.locks import Locks
from ckptcore.commit.occupants import ADMINISTRATION, is_hidden_name
from ckptcore.commit.root import ROOT_KEY, Base
from ckptcore.commit.root_json import bases_of_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    CheckpointReferredError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
)
from ckptcore.io.requests import requests_of
from ckptcore.io.threads import IOThreads, ask_each
from ckptcore.protocols import StorageBackend

__all__ = ["announced_deletion", "base_locks", "bases_beside", "find_bases", "pin_name", "referring_to"]

_PIN_SECONDS: Final = 90.0
"""Seconds that a deletion waits for a leased pin: longer than the lease of a killed process takes to expire."""

_LAST_POLL_SECONDS: Final = 2.0


@contextmanager
def announced_deletion(location: Location, conditions: Conditions) -> Iterator[None]:
    """Announce the deletion of a checkpoint, so that later updates of it wait. The checkpoint stays visible.

    Args:
        location: the location of the checkpoint.
        conditions: of the Context.

    Raises:
        CheckpointReferredError: an update that refers to the checkpoint is being saved.
        StorageError: the storage failed, or the directory around the checkpoint cannot be written.
    """
    locks = base_locks(location, conditions)
    pin = pin_name(location)
    deadline = SYSTEM_CLOCK.now() + _PIN_SECONDS
    while (announced := location.commits.announce_deletion(location, locks, pin)) is None:
        if SYSTEM_CLOCK.now() >= deadline or not locks.may_expire(pin):
            raise CheckpointReferredError(
                f"an update that refers to {location.display} is being saved: wait until it is committed, and delete it first. "
                "Nothing was deleted"
            )
        SYSTEM_CLOCK.sleep(_LAST_POLL_SECONDS)
    with announced:
        yield


def base_locks(location: Location, conditions: Conditions) -> Locks:
    """Return the locks of the directory around a base, in which updates pin it."""
    directory = location.commits.with_conditions(conditions, location.absolute)
    return commit_method(directory).locks(location.display)


def pin_name(base: Location) -> str:
    """Return the name of the pin of an update. Differs from a reader's pin, which `ckptcore.delete` ignores."""
    return f"{base.name}.base"


def bases_beside(directory: StorageBackend, name: str) -> Sequence[Base]:
    """Return the bases of a checkpoint in a directory, of any format version; none without a readable root.

    Links out of the directory are not followed: a checkpoint behind one has its bases in its own directory.
    """
    try:
        return bases_of_root(subdirectory(directory, name).get(ROOT_KEY))
    except (ObjectNotFoundError, CorruptCheckpointError, InvalidLocationError):
        return ()


def find_bases(
    directory: StorageBackend,
    threads: IOThreads,
    bases_of: Callable[[StorageBackend, str], Sequence[Base]] = bases_beside,
    *,
    without: str = "",
) -> Mapping[str, Sequence[Base]]:
    """Return the bases of the checkpoints in a directory, by name. One listing, and a small request for each name.

    A checkpoint whose root cannot be read has no bases: it cannot be loaded.

    Args:
        directory: the storage, opened at the directory.
        threads: run the requests.
        bases_of: returns the bases of one; called on any thread.
        without: a name to leave out.
    """
    directories = [entry[:-1] for entry in directory.list_names() if entry.endswith("/")]
    names = [name for name in directories if name not in (without, ADMINISTRATION) and not is_hidden_name(name)]
    parallelism = requests_of(directory).concurrency
    bases = ask_each(threads, names, lambda name: bases_of(directory, name), parallelism=parallelism)
    return dict(zip(names, bases, strict=True))


def referring_to(name: str, save_id: str | None, bases: Mapping[str, Sequence[Base]]) -> Sequence[str]:
    """Return the names of the checkpoints that refer to one, or to a member of it.

    Args:
        name: the name of the checkpoint.
        save_id: its save id; None if it is unknown, and any counts.
        bases: the bases by name, as from `find_bases`.
    """
    return [
        other
        for other, of in bases.items()
        if other != name
        and any(
            (base.path == name and save_id in (None, base.save_id)) or base.path.startswith(f"{name}/") for base in of
        )
    ]
