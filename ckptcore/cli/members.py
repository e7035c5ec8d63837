"""What a checkpoint is made of: one tree, or several checkpointables by name."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore import CheckpointablesMetadata, CheckpointMetadata
from ckptcore.cli.locating import child_location
from ckptcore.cli.options import command_context
from ckptcore.context import Context
from ckptcore.describing import describe_checkpoint, describe_checkpointables, describe_either
from ckptcore.errors import CheckpointNotFoundError
from ckptcore.locations import Place
from ckptcore.stored.members import is_deleted, present_members
from ckptcore.stored.opening import find_composite

__all__ = ["describe", "describe_directories"]


def describe(location: Place, context: Context) -> CheckpointMetadata | CheckpointablesMetadata:
    """What a checkpoint of either sort says of itself. Any thread.

    Raises:
        What `ckptcore.metadata` does.
    """
    return describe_either(location, context)


def describe_directories(location: str) -> Mapping[str, tuple[str, CheckpointMetadata]]:
    """Everything in a checkpoint that is one: by directory, where it is and what it says.

    Of one tree that is itself, with an empty directory. Of several checkpointables each one that is still there, of each
    process that saved its own.

    Raises:
        CheckpointNotFoundError: also if one of what other software wrote cannot be read.
        What `ckptcore.metadata` does.
    """
    context = command_context()
    composite = find_composite(location, context)
    if composite is None:
        return {"": (location, describe_checkpoint(location, context))}
    if composite.root is None:
        found = describe_checkpointables(location, context)
        for reason in found.unreadable.values():
            raise CheckpointNotFoundError(f"{reason}; name one of the others by its own location")
        return {name: (child_location(location, name), told) for name, told in found.checkpointables.items()}
    places = {
        directory: child_location(location, directory)
        for directories in present_members(composite).values()
        for directory in directories
        if not is_deleted(composite, directory)
    }
    return {directory: (place, describe_checkpoint(place, context)) for directory, place in places.items()}
