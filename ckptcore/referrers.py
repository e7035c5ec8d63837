"""Referrers: the checkpoints in a directory that refer to one of them, which is not to be deleted before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptcore.directory_claims import is_hidden_name
from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.holds import ADMINISTRATION
from ckptcore.locations import subdirectory
from ckptcore.protocols import StorageBackend
from ckptcore.root import ROOT_KEY, Base
from ckptcore.root_json import bases_of_root

__all__ = ["base_pin", "bases_beside", "find_referrers"]


def base_pin(name: str) -> str:
    """Under what name an update that is being saved pins its base beside the pin of a reader: who deletes by hand asks for this one alone."""
    return f"{name}.base"


def bases_beside(directory: StorageBackend, name: str) -> Sequence[Base]:
    """What a checkpoint in a directory refers to, whichever version wrote it; nothing where no root is that can be read."""
    try:
        return bases_of_root(subdirectory(directory, name).get(ROOT_KEY))
    except (ObjectNotFoundError, CorruptCheckpointError):
        return ()


def find_referrers(
    directory: StorageBackend,
    name: str,
    save_id: str | None,
    bases_of: Callable[[StorageBackend, str], Sequence[Base]] = bases_beside,
) -> Sequence[str]:
    """The names of checkpoints in a directory that have arrays in one of them. One listing, and a small request for each other name.

    Those elsewhere cannot be known. One whose root cannot be read refers to nothing: nobody can load it.

    Args:
        directory: the storage, opened at the directory.
        name: the checkpoint that may be referred to.
        save_id: the save that it is; None: that cannot be known, and any counts.
        bases_of: gives what one of them refers to.
    """
    found = []
    for entry in directory.list_names():
        other = entry.removesuffix("/")
        if other in (entry, name, ADMINISTRATION) or is_hidden_name(other):
            continue
        if any(base.path == name and save_id in (None, base.save_id) for base in bases_of(directory, other)):
            found.append(other)
    return found
