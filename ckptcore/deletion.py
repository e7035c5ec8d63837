"""Deleting a checkpoint that the user names, in whatever state it is."""

from __future__ import annotations

from ckptcore.commit import remove_checkpoint, sweep_location
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedVersionError,
)
from ckptcore.locations import Location, LocationLike, resolve_location
from ckptcore.occupants import read_root
from ckptcore.root import new_save_id
from ckptcore.session_claims import find_partial, remove_partial

__all__ = ["delete_checkpoint"]


def delete_checkpoint(location: LocationLike, context: Context) -> None:
    """See `ckptcore.delete`."""
    durable = context.durability == "full"
    resolved = resolve_location(location, context.registry, durable=durable, config=context.storage)
    try:
        ours = read_root(resolved.store) is not None
    except (CorruptCheckpointError, UnsupportedVersionError):
        ours = True
    if not ours:
        if resolved.is_object or resolved.store.list_names():
            raise CheckpointExistsError(
                f"{resolved.display} was not written by ckptcore and is left alone; remove it with your own tools"
            )
        if not _has_partial(resolved):
            raise CheckpointNotFoundError(f"there is nothing at {resolved.display} to delete")
        remove_partial(resolved, new_save_id())
        sweep_location(resolved)
        return
    remove_checkpoint(resolved, new_save_id(), context.conditions)
    sweep_location(resolved)


def _has_partial(location: Location) -> bool:
    """Whether sessions wrote beside the location, also where what says so cannot be read."""
    try:
        return find_partial(location) is not None
    except (CorruptCheckpointError, UnsupportedVersionError):
        return True
