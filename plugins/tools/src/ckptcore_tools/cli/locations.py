"""Locations that the user names, and descriptions of the checkpoints at them."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping, Sequence

from ckptcore.commit.location import Place, open_directory, resolve_location
from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, InvalidLocationError
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint
from ckptcore.loading.describe import CheckpointMetadata, describe_checkpoint, describe_tree
from ckptcore.loading.opening import ConsistentRead, is_deleted, open_either, present_members
from ckptcore.runtime import runtime_of
from ckptcore_tools.cli.command import command_context

__all__ = ["child_location", "describe", "describe_directories", "names_in"]


def child_location(directory: str, name: str) -> str:
    """The location of something in a directory."""
    if directory[:7].lower() == "file://":
        escaped = urllib.parse.quote(name, errors="surrogateescape")  # escapes in such a URL are decoded
        return f"{directory.rstrip('/')}/{escaped}"
    return os.path.join(directory, name)


def names_in(directory: str, context: Context) -> Sequence[str]:
    """The names in a directory; those of directories end in ``/``.

    Raises:
        CheckpointNotFoundError: if there is no such directory.
    """
    names = open_directory(directory, runtime_of(context).registry, durable=False, config=context.storage).list_names()
    if names:
        return names
    try:
        location = resolve_location(directory, runtime_of(context).registry, durable=False, config=context.storage)
    except InvalidLocationError:
        return names  # the root of a storage, which is always there
    if f"{location.name}/" not in location.parent.list_names():
        raise CheckpointNotFoundError(f"there is no directory {directory}; check the path")
    return names


def describe(location: Place, context: Context) -> CheckpointMetadata:
    """What a checkpoint of either sort says of itself. Any thread.

    Raises:
        What `ckptcore.metadata` does.
    """
    return describe_checkpoint(location, context)


def describe_directories(location: str) -> Mapping[str, tuple[str, CheckpointMetadata]]:
    """Everything in a checkpoint that is one: by directory, where it is and what it says.

    Of one tree that is itself, with an empty directory. Of several checkpointables each one that is still there, of
    each process that saved its own.

    Raises:
        CheckpointNotFoundError: also if one of what other software wrote cannot be read.
        What `ckptcore.metadata` does.
    """
    context = command_context()

    def describe_each(found: Checkpoint | CompositeCheckpoint) -> Mapping[str, tuple[str, CheckpointMetadata]]:
        if isinstance(found, Checkpoint):
            return {"": (location, describe_tree(location, context))}
        if found.root is None:
            told = describe_checkpoint(location, context).checkpointables
            for reason in told.unreadable.values():
                raise CheckpointNotFoundError(f"{reason}; name one of the others by its own location")
            return {name: (child_location(location, name), one) for name, one in told.items()}
        places = {
            directory: child_location(location, directory)
            for directories in present_members(found).values()
            for directory in directories
            if not is_deleted(found, directory)
        }
        return {directory: (place, describe_tree(place, context)) for directory, place in places.items()}

    return ConsistentRead(location, context, open_either).retry_if_replaced(describe_each)
