"""Referrers: the checkpoints in a directory that refer to one of them, which is not to be deleted before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckptcore.commit.holding import ADMINISTRATION
from ckptcore.commit.occupants import is_hidden_name
from ckptcore.commit.root import ROOT_KEY, Base
from ckptcore.commit.root_json import bases_of_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import CorruptCheckpointError, InvalidLocationError, ObjectNotFoundError
from ckptcore.io.requests import requests_of
from ckptcore.io.threads import IOThreads, ask_each
from ckptcore.protocols import StorageBackend

__all__ = ["bases_beside", "find_bases", "referring_to"]


def bases_beside(directory: StorageBackend, name: str) -> Sequence[Base]:
    """Return the bases of a checkpoint in a directory, of any format version; none without a readable root.

    Links out of the directory are not followed: a checkpoint behind one has its bases in its own directory.
    """
    try:
        return bases_of_root(subdirectory(directory, name).get(ROOT_KEY))
    except (ObjectNotFoundError, CorruptCheckpointError, InvalidLocationError):
        return ()


def find_bases(
    directory: StorageBackend,
    threads: IOThreads,
    bases_of: Callable[[StorageBackend, str], Sequence[Base]] = bases_beside,
    *,
    without: str = "",
) -> Mapping[str, Sequence[Base]]:
    """By name, what the checkpoints in a directory refer to. One listing, and a small request for each name, many at once.

    One whose root cannot be read refers to nothing: nobody can load it.

    Args:
        directory: the storage, opened at the directory.
        threads: on which they are asked.
        bases_of: gives what one of them refers to; called on any thread.
        without: a name that is not asked.
    """
    directories = [entry[:-1] for entry in directory.list_names() if entry.endswith("/")]
    names = [name for name in directories if name not in (without, ADMINISTRATION) and not is_hidden_name(name)]
    parallelism = requests_of(directory).concurrency
    bases = ask_each(threads, names, lambda name: bases_of(directory, name), parallelism=parallelism)
    return dict(zip(names, bases, strict=True))


def referring_to(name: str, save_id: str | None, bases: Mapping[str, Sequence[Base]]) -> Sequence[str]:
    """The names of those that have arrays in a checkpoint, or in something inside it.

    Args:
        name: the checkpoint that may be referred to.
        save_id: the save that it is; None: that cannot be known, and any counts.
        bases: of the others, as by `find_bases`.
    """
    return [
        other
        for other, of in bases.items()
        if other != name
        and any(
            (base.path == name and save_id in (None, base.save_id)) or base.path.startswith(f"{name}/") for base in of
        )
    ]
