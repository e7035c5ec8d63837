"""What is in a directory that the user names, and how a user would name something in it."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Sequence

from ckptcore.commit.location import open_directory, resolve_location
from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, InvalidLocationError

__all__ = ["child_location", "names_in"]


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
    names = open_directory(directory, context.registry, durable=False, config=context.storage).list_names()
    if names:
        return names
    try:
        location = resolve_location(directory, context.registry, durable=False, config=context.storage)
    except InvalidLocationError:
        return names  # the root of a storage, which is always there
    if f"{location.name}/" not in location.parent.list_names():
        raise CheckpointNotFoundError(f"there is no directory {directory}; check the path")
    return names
