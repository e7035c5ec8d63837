"""Locations given by a user, and descriptions of their checkpoints."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping, Sequence

from ckptcore.commit.location import AnyLocation, open_directory, resolve_location
from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, InvalidLocationError
from ckptcore.inspection.completeness import FileCheck, StoredFiles
from ckptcore.inspection.describe import CheckpointMetadata, describe_checkpoint, describe_either, describe_tree_at
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint
from ckptcore.opening.members import is_deleted, member_opener, present_members
from ckptcore.opening.open_checkpoints import ConsistentRead, Opener, open_either
from ckptcore.runtime import runtime_of


def child_location(directory: str, name: str) -> str:
    """Return the location of an entry of a directory."""
    if directory[:7].lower() == "file://":
        escaped = urllib.parse.quote(name, errors="surrogateescape")  # percent escapes in file URLs are decoded
        return f"{directory.rstrip('/')}/{escaped}"
    return os.path.join(directory, name)


class FileGivenError(InvalidLocationError):
    """A file is given where a directory is expected."""


def names_in(directory: str, context: Context) -> Sequence[str]:
    """Return the names in a directory. Names of subdirectories end in ``/``.

    Raises:
        CheckpointNotFoundError: if the directory does not exist.
        FileGivenError: if it is a file.
    """
    names = open_directory(directory, runtime_of(context).storages).list_names()
    if names:
        return names
    try:
        location = resolve_location(directory, runtime_of(context).storages)
    except InvalidLocationError:
        return names  # the root of a storage, which always exists
    around = location.parent.list_names()
    if location.name in around:
        raise FileGivenError(
            f"{directory} is a file, not a directory: give its directory, or use `ckptcore inspect {directory}`"
        )
    if f"{location.name}/" not in around:
        raise CheckpointNotFoundError(f"{directory}: no such directory; check the path")
    return names


def describe_and_check(
    location: AnyLocation,
    context: Context,
    opener: Opener[Checkpoint | CompositeCheckpoint] = open_either,
    check: FileCheck | None = None,
) -> tuple[CheckpointMetadata, StoredFiles]:
    """Return the metadata of a checkpoint, and its files that are missing or have another size. Reads no array.

    Args:
        location: its location.
        context: options.
        opener: opens it.
        check: checks files; None: a new one. One for several checkpoints checks each base once.

    Raises:
        CheckpointError: see `ckptcore.metadata`.
    """
    files = FileCheck(context) if check is None else check

    def describe(checkpoint: Checkpoint | CompositeCheckpoint) -> tuple[CheckpointMetadata, StoredFiles]:
        open_one = member_opener(checkpoint, location, context)
        return describe_either(checkpoint, context, open_one), files.check(checkpoint, location, open_one)

    return ConsistentRead(location, context, opener).retry_if_replaced(describe)


def first_directories(location: AnyLocation, context: Context) -> Mapping[str, str]:
    """Return the directory of each checkpointable, within a checkpoint of several. Reads no tree.

    If every process saved its own state, a checkpointable has a directory for each process. The result has the first of
    them that exists, which `describe_and_check` describes.

    Raises:
        CheckpointError: see `ckptcore.metadata`.
    """

    def find(checkpoint: Checkpoint | CompositeCheckpoint) -> Mapping[str, str]:
        if isinstance(checkpoint, Checkpoint):
            return {}
        return {
            # The last directory is not checked, because there is no alternative to it.
            name: next((path for path in directories[:-1] if not is_deleted(checkpoint, path)), directories[-1])
            for name, directories in present_members(checkpoint).items()
        }

    return ConsistentRead(location, context, open_either).retry_if_replaced(find)


def describe_directories(location: str, context: Context) -> Mapping[str, tuple[str, CheckpointMetadata]]:
    """Return the location and the metadata of each directory of a checkpoint that contains a tree or files.

    The key is the directory within the checkpoint. A checkpoint of one tree has one entry, with an empty key. A
    checkpoint of several checkpointables has one entry per checkpointable, or per process if every process saved its
    own. Deleted checkpointables are left out.

    Raises:
        CheckpointNotFoundError: also if a checkpointable that other software wrote cannot be read.
        CheckpointError: see `ckptcore.metadata`.
    """

    def describe_each(checkpoint: Checkpoint | CompositeCheckpoint) -> Mapping[str, tuple[str, CheckpointMetadata]]:
        if isinstance(checkpoint, Checkpoint):
            return {"": (location, describe_tree_at(location, context))}
        if checkpoint.root is None:
            members = describe_checkpoint(location, context).checkpointables
            for reason in members.unreadable.values():
                raise CheckpointNotFoundError(f"{reason}. To compare another checkpointable, give its own location")
            return {name: (child_location(location, name), member) for name, member in members.items()}
        locations = {
            directory: child_location(location, directory)
            for directories in present_members(checkpoint).values()
            for directory in directories
            if not is_deleted(checkpoint, directory)
        }
        return {directory: (member, describe_tree_at(member, context)) for directory, member in locations.items()}

    return ConsistentRead(location, context, open_either).retry_if_replaced(describe_each)
