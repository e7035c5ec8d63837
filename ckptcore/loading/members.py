"""Members of a checkpoint of several checkpointables: list them, and open one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from typing import Final

from ckptcore.builtin.files import FilesLayout
from ckptcore.commit.location import Location, Place, Within
from ckptcore.commit.occupants import root_bytes
from ckptcore.commit.root import ROOT_KEY
from ckptcore.commit.root_json import is_claim
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint
from ckptcore.loading.consistent_read import ConsistentRead, open_checkpoint
from ckptcore.loading.opening import open_files, open_tree

__all__ = [
    "is_deleted",
    "open_member",
    "present_members",
    "told_names",
]

_NAMES_TOLD: Final = 20
_OF_RANK: Final = re.compile(r"(.+)\.rank_(0|[1-9][0-9]{0,8})", re.DOTALL)


def present_members(composite: CompositeCheckpoint) -> dict[str, list[str]]:
    """Return the members that exist, each with its directories in the order of ranks. Sends one request.

    A member that other software wrote may be a file. Members may have been deleted since the save. On storages without
    directories an interrupted deletion leaves a directory: see `is_deleted`.
    """
    names = composite.location.store.list_names()
    there = {entry.removesuffix("/") for entry in names if entry.endswith("/") or composite.root is None}
    if composite.root is not None and ROOT_KEY not in names:
        # The root is not listed: the storage lists nothing (a web server), or an earlier state.
        there |= _found_by_roots(composite)
    of_ranks: dict[str, list[int]] = {}
    for directory in there:
        if (matched := _OF_RANK.fullmatch(directory)) is not None:
            of_ranks.setdefault(matched[1], []).append(int(matched[2]))
    present = {}
    for name, member in composite.members.items():
        # Not by counting to the number of processes: a hostile root may state any.
        ranks = [0] if member.processes in (None, 1) else sorted(of_ranks.get(name, ()))
        directories = [member.directory(name, rank) for rank in ranks if rank < (member.processes or 1)]
        if found := [directory for directory in directories if directory in there]:
            present[name] = found
    return present


def _found_by_roots(composite: CompositeCheckpoint) -> set[str]:
    """Return the directories with roots of members, without a listing. Sends a request for each, and one for each name."""
    found = set()
    for name, member in composite.members.items():
        for rank in range(
            member.processes or 1
        ):  # a hostile root may state any number: stop at the first that is missing
            directory = member.directory(name, rank)
            if root_bytes(subdirectory(composite.location.store, directory)) is None:
                break
            found.add(directory)
    return found


def is_deleted(composite: CompositeCheckpoint, directory: str) -> bool:
    """Return True if a directory of the composite is empty, or its deletion began."""
    inside = subdirectory(composite.location.store, directory)
    data = root_bytes(inside)
    if data is not None:
        return is_claim(data)
    return not inside.list_names() and not (composite.root is None and _is_file(composite.location, directory))


def _is_file(location: Location, name: str) -> bool:
    try:
        location.store.size(name)
    except ObjectNotFoundError:
        return False
    return True


def open_member(
    composite: CompositeCheckpoint, name: str, directory: str, location: Place, context: Context
) -> Checkpoint:
    """Open a member of a composite.

    Raises:
        CorruptCheckpointError: if its directory has another checkpoint.
        What `open_checkpoint` does; for a checkpoint of other software with a hint how to load the other members.
    """
    if composite.root is None:
        return _open_foreign_member(composite, name, directory, location, context)
    opened = open_checkpoint(Within(location, directory), context)
    if opened.root is None or opened.root.role != "member" or opened.root.save_id != composite.root.save_id:
        raise CorruptCheckpointError(
            f"{opened.location.display} was replaced by something else than it was saved with; load it by its own location, "
            "or delete it"
        )
    kind = composite.members[name].kind
    if (opened.layout.name == FilesLayout.name) != (kind == "files"):
        raise CorruptCheckpointError(
            f"{opened.location.display} has the layout {opened.layout.name!r}, and {composite.location.display} says that it is "
            f"a {kind!r}: one of the two is damaged or forged; load another checkpoint"
        )
    return opened


def _open_foreign_member(
    composite: CompositeCheckpoint, name: str, directory: str, location: Place, context: Context
) -> Checkpoint:
    opener = open_files if composite.members[name].kind == "files" else open_tree
    others = told_names([other for other in composite.members if other != name])
    hint = f"ask load_checkpointables for the names that you need, to load the others without it: {others}"
    try:
        return ConsistentRead(Within(location, directory), context, opener).open()
    except (CheckpointNotFoundError, CompositeCheckpointError) as error:
        raise CheckpointNotFoundError(
            f"{name!r} in {composite.location.display} is nothing that an installed plugin reads: {error}; {hint}"
        ) from error
    except CheckpointError as error:
        error.add_note(hint)
        raise


def told_names(names: Collection[str]) -> str:
    """Return names for a message, limited in number: a hostile root may list any."""
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return (", ".join(itertools.islice(names, _NAMES_TOLD)) or "none") + more
