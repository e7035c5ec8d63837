"""Claiming a location for a save, and turning the claim into a committed checkpoint.

Storage with real directories: everything is written into a hidden sibling directory, which is renamed (or exchanged with what
it replaces) as the commit. Other storage: the root is created as a claim, and replaced by the committed root if it is still
the claim. Either way a checkpoint is there whole or not at all, and what dead saves left is removed by the next save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from ckptcore.commit.conditions import Conditions
from ckptcore.commit.directory_claims import (
    DirectoryClaim,
    hidden_store,
    partial_name,
    remove_hidden,
    sweep_beside,
    sweep_directories,
)
from ckptcore.commit.fences import FencedStore
from ckptcore.commit.location import Location
from ckptcore.commit.object_claims import claim_objects, continue_objects, remove_dead_save, remove_objects
from ckptcore.commit.occupants import IsForeign, Overwrite, expect_no_nested, none_is_foreign
from ckptcore.commit.root import Claimed
from ckptcore.io.background import wait_for_saves_to
from ckptcore.protocols import AtomicDirectories, StorageBackend

__all__ = [
    "Claim",
    "claim_location",
    "claimed_store",
    "continue_claim",
    "remove_checkpoint",
    "remove_leftover",
    "sweep_leftovers",
    "sweep_location",
]


class Claim(Protocol):
    """A save's right to write a checkpoint at a location."""

    @property
    def store(self) -> StorageBackend:
        """Where its objects go."""
        ...

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """Make what was written the checkpoint at the location; durable where the storage was opened so.

        Args:
            root: its root; None of a checkpoint that other software wrote and that has none.
            parts: by key, what the root names beside objects.

        Raises:
            CheckpointExistsError, SaveLostError: nothing was committed.
        """
        ...

    def abort(self) -> None:
        """Remove what was written. Does nothing after a commit."""
        ...

    def leave(self) -> None:
        """Let go of the claim and leave what was written, for `continue_claim`. Does nothing after a commit."""
        ...


def claim_location(
    location: Location,
    claimed: Claimed,
    overwrite: Overwrite,
    conditions: Conditions,
    is_foreign: IsForeign = none_is_foreign,
) -> Claim:
    """Claim a location and remove what dead saves left there. Waits for earlier asynchronous saves of this process.

    Args:
        location: where.
        claimed: the save.
        overwrite: whether a checkpoint there is replaced.
        conditions: what is known of those of storages.
        is_foreign: recognises checkpoints of other software, which are replaced like those of ckptcore.

    Raises:
        CheckpointExistsError: if something is there that is not to be replaced.
        AtomicityError: if replacing it atomically was asked for and the storage cannot, or if it keeps no conditions.
    """
    wait_for_saves_to(location.identity)
    if isinstance(location.parent, AtomicDirectories):
        return DirectoryClaim(location, location.parent, claimed.save_id, overwrite, is_foreign=is_foreign)
    return claim_objects(location, claimed, overwrite, conditions, is_foreign)


def continue_claim(
    location: Location,
    claimed: Claimed,
    overwrite: Overwrite,
    conditions: Conditions,
    is_foreign: IsForeign = none_is_foreign,
) -> Claim:
    """Claim a location as `claim_location` does; what a process that died or left had written under this save id stays.

    Where there are no locks, nobody can tell that such a process is dead: while it lives, both write, so under one save id must
    stand the same bytes, whoever writes them.

    Raises:
        SaveLostError: another process is at it; where there are locks.
        What `claim_location` does.
    """
    wait_for_saves_to(location.identity)
    if isinstance(location.parent, AtomicDirectories):
        return DirectoryClaim(location, location.parent, claimed.save_id, overwrite, claimed.save_id, is_foreign)
    return continue_objects(location, claimed, overwrite, conditions, is_foreign)


def claimed_store(location: Location, save_id: str, conditions: Conditions) -> StorageBackend:
    """Where the objects of a save go that another process of the job claimed the location for."""
    if isinstance(location.parent, AtomicDirectories):
        return hidden_store(location, save_id)
    return FencedStore(conditions.open(location), save_id)


def remove_checkpoint(location: Location, save_id: str, conditions: Conditions) -> None:
    """Remove the checkpoint of ours at a location, so that it is never there in part.

    Args:
        location: where it is.
        save_id: a new one, for the name under which it is hidden first, or for the claim that replaces it.
        conditions: what is known of those of storages.

    Raises:
        CheckpointExistsError: another checkpoint is in its directory. Nothing was removed.
        SaveLostError: something else was put in its place meanwhile, and stays.
    """
    expect_no_nested(location)
    if isinstance(location.parent, AtomicDirectories):
        remove_hidden(location, location.parent, location.name, save_id)
    else:
        remove_objects(location, save_id, conditions)


def remove_leftover(location: Location, save_id: str, conditions: Conditions) -> None:
    """Remove the claim of a dead save, or of a deletion that died, with what is there; nothing where it has committed after all.

    On storage with real directories there is none: see `sweep_leftovers`.

    Args:
        location: where it is.
        save_id: a new one, for the claim that takes its place.
        conditions: what is known of those of storages.

    Raises:
        CheckpointExistsError: another checkpoint is in its directory. Nothing was removed.
        SaveLostError: something else took its place meanwhile, and stays.
    """
    if not isinstance(location.parent, AtomicDirectories):
        expect_no_nested(location)
        remove_dead_save(location, save_id, conditions)


def sweep_location(location: Location) -> None:
    """Delete what dead saves to a location and deletions of it left beside it. Lists the directory that it is in."""
    if isinstance(location.parent, AtomicDirectories):
        sweep_beside(location, location.parent, continued=partial_name(location))


def sweep_leftovers(store: StorageBackend, names: Iterable[str]) -> None:
    """Delete what dead saves and deletions left in a directory of checkpoints.

    Args:
        store: the storage, opened at the directory.
        names: hidden directories in it; those that a living save holds stay.

    Raises:
        StorageError
    """
    if isinstance(store, AtomicDirectories):
        sweep_directories(store, names)
