"""Deleting a checkpoint that the user names, in whatever state it is."""

from __future__ import annotations

from ckptcore.commit.bases import announced_deletion, find_bases, referring_to
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.location import Location
from ckptcore.commit.mark import Mark, read_mark
from ckptcore.commit.occupants import read_root
from ckptcore.commit.root import Claimed, Composite, PartialSave, Root, new_save_id
from ckptcore.commit.sessions import find_partial
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReferredError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.io.threads import IOThreads

__all__ = ["delete_checkpoint"]


def delete_checkpoint(resolved: Location, conditions: Conditions, threads: IOThreads) -> None:
    """See `ckptcore.delete`."""
    root: Root | Composite | Claimed | PartialSave | None = None
    try:
        root = read_root(resolved.store)
        ours = root is not None
    except (CorruptCheckpointError, UnsupportedVersionError):
        ours = True
    if not ours:
        mark = read_mark(resolved)
        if mark.root is not None or (mark != Mark(None) and not mark.is_at(resolved)):
            return delete_checkpoint(resolved, conditions, threads)  # a save was committed, or deleted, meanwhile
        if mark != Mark(None):
            raise CheckpointExistsError(
                f"{resolved.display} was not written by ckptcore and is left alone; remove it with your own tools"
            )
        if not _has_partial(resolved):
            raise CheckpointNotFoundError(f"there is nothing at {resolved.display} to delete")
        if not resolved.commits.remove_sessions(resolved, new_save_id()):
            return delete_checkpoint(resolved, conditions, threads)  # it was finalized or deleted since: look again
        resolved.commits.sweep(resolved)
        return
    if isinstance(root, Claimed | PartialSave):
        resolved.commits.remove(resolved, new_save_id(), conditions)
    else:
        with announced_deletion(resolved, conditions):
            _refuse_referred(resolved, None if root is None else root.save_id, threads)
            resolved.commits.remove(resolved, new_save_id(), conditions)
    resolved.commits.sweep(resolved)


def _refuse_referred(location: Location, save_id: str | None, threads: IOThreads) -> None:
    """Refuse to delete a checkpoint to which another one in the same directory refers.

    Args:
        location: of the checkpoint.
        save_id: its own; None where that cannot be read.
        threads: to read what is beside it.

    Raises:
        CheckpointReferredError
        StorageError: that cannot be told.
    """
    try:
        beside = find_bases(location.parent, threads, without=location.name)
    except StorageError as error:
        error.add_note(
            f"Nothing was deleted: whether others have arrays in {location.display} is looked up in the directory that it is in, which must be "
            "listed and read for that"
        )
        raise
    names = referring_to(location.name, save_id, beside)
    if names:
        raise CheckpointReferredError(
            f"{location.display} has arrays of {', '.join(names[:20])}, beside it: delete {'that' if len(names) == 1 else 'those'} first; a copy "
            "by ckptcore.copy needs no base. Nothing was deleted"
        )


def _has_partial(location: Location) -> bool:
    """Whether sessions wrote beside the location, also where what says so cannot be read."""
    try:
        return find_partial(location) is not None
    except (CorruptCheckpointError, UnsupportedVersionError):
        return True
