"""Referrers: the checkpoints in a directory that refer to one of them, which is not to be deleted before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, UnsupportedVersionError
from ckptcore.locations import subdirectory
from ckptcore.protocols import StorageBackend
from ckptcore.root import ROOT_KEY, Summary
from ckptcore.root_json import summarize_root

__all__ = ["base_pin", "find_referrers", "summary_beside"]


def base_pin(name: str) -> str:
    """Under what name an update that is being saved pins its base beside the pin of a reader: who deletes by hand asks for this one alone."""
    return f"{name}.base"


def find_referrers(
    directory: StorageBackend,
    name: str,
    save_id: str,
    summary_of: Callable[[StorageBackend, str], Summary | None] | None = None,
) -> Sequence[str]:
    """The names of checkpoints in a directory that have arrays in one of them. One listing, and a small request for each other name.

    Those elsewhere cannot be known. One whose root cannot be read refers to nothing: nobody can load it.

    Args:
        directory: the storage, opened at the directory.
        name: the checkpoint that may be referred to.
        save_id: the save that it is.
        summary_of: gives what a root says, or None; None: it is read.
    """
    read = summary_of or summary_beside
    found = []
    for entry in directory.list_names():
        other = entry.removesuffix("/")
        if other == entry or other == name or other.startswith("."):
            continue
        summary = read(directory, other)
        if summary is not None and any(base.path == name and base.save_id == save_id for base in summary.bases):
            found.append(other)
    return found


def summary_beside(directory: StorageBackend, name: str) -> Summary | None:
    """What the root of a checkpoint in a directory says; None where there is none that can be read."""
    try:
        return summarize_root(subdirectory(directory, name).get(ROOT_KEY))
    except (ObjectNotFoundError, CorruptCheckpointError, UnsupportedVersionError):
        return None
