"""Deleting a checkpoint that the user names, in whatever state it is."""

from __future__ import annotations

from ckptcore.commit.base_holds import announced_deletion
from ckptcore.commit.commit import remove_checkpoint, sweep_location
from ckptcore.commit.location import Location, LocationLike, resolve_location
from ckptcore.commit.occupants import read_root
from ckptcore.commit.referrers import find_bases, referring_to
from ckptcore.commit.root import Claimed, Composite, PartialSave, Root, new_save_id
from ckptcore.commit.session_claims import find_partial, remove_partial
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReferredError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.loading.opened import Mark, read_mark

__all__ = ["delete_checkpoint"]


def delete_checkpoint(location: LocationLike, context: Context) -> None:
    """See `ckptcore.delete`."""
    durable = context.durability == "full"
    resolved = resolve_location(location, context.registry, durable=durable, config=context.storage)
    root: Root | Composite | Claimed | PartialSave | None = None
    try:
        root = read_root(resolved.store)
        ours = root is not None
    except (CorruptCheckpointError, UnsupportedVersionError):
        ours = True
    if not ours:
        mark = read_mark(resolved)
        if mark.root is not None or (mark != Mark(None) and not mark.is_at(resolved)):
            return delete_checkpoint(location, context)  # a save was committed, or deleted, meanwhile
        if mark != Mark(None):
            raise CheckpointExistsError(
                f"{resolved.display} was not written by ckptcore and is left alone; remove it with your own tools"
            )
        if not _has_partial(resolved):
            raise CheckpointNotFoundError(f"there is nothing at {resolved.display} to delete")
        if not remove_partial(resolved, new_save_id()):
            return delete_checkpoint(location, context)  # it was finalized or deleted since: look again
        sweep_location(resolved)
        return
    if isinstance(root, Claimed | PartialSave):
        remove_checkpoint(resolved, new_save_id(), context.conditions)
    else:
        with announced_deletion(resolved, context.conditions):
            _refuse_referred(resolved, None if root is None else root.save_id, context)
            remove_checkpoint(resolved, new_save_id(), context.conditions)
    sweep_location(resolved)


def _refuse_referred(location: Location, save_id: str | None, context: Context) -> None:
    """Refuse to delete a checkpoint to which another one in the same directory refers.

    Args:
        location: of the checkpoint.
        save_id: its own; None where that cannot be read.
        context: options.

    Raises:
        CheckpointReferredError
        StorageError: that cannot be told.
    """
    try:
        beside = find_bases(location.parent, context.io_threads, without=location.name)
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
