"""What a checkpoint is made of: one tree, or several checkpointables by name."""

from __future__ import annotations

from collections.abc import Mapping

import ckptcore
from ckptcore import CheckpointablesMetadata, CheckpointMetadata
from ckptcore.cli.locating import child_location
from ckptcore.composites import is_deleted, present_members
from ckptcore.context import default_context
from ckptcore.errors import CompositeCheckpointError
from ckptcore.opening import find_composite

__all__ = ["describe", "describe_directories"]


def describe(location: str) -> CheckpointMetadata | CheckpointablesMetadata:
    """What a checkpoint of either sort says of itself.

    Raises:
        What `ckptcore.metadata` does.
    """
    try:
        return ckptcore.metadata(location)
    except CompositeCheckpointError:
        return ckptcore.checkpointables_metadata(location)


def describe_directories(location: str) -> Mapping[str, tuple[str, CheckpointMetadata]]:
    """Everything in a checkpoint that is one: by directory, where it is and what it says.

    Of one tree that is itself, with an empty directory. Of several checkpointables each one that is still there, of each
    process that saved its own.

    Raises:
        What `ckptcore.metadata` does.
    """
    composite = find_composite(location, default_context())
    if composite is None:
        return {"": (location, ckptcore.metadata(location))}
    places = {
        directory: child_location(location, directory)
        for directories in present_members(composite).values()
        for directory in directories
        if not is_deleted(composite, directory)
    }
    return {directory: (place, ckptcore.metadata(place)) for directory, place in places.items()}
