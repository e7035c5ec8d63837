"""Members of composites: find existing and deleted members, and open them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from ckptcore.commit.location import AnyLocation, Location, SubPath
from ckptcore.commit.root import ROOT_KEY, split_rank
from ckptcore.commit.root_json import is_claim
from ckptcore.commit.stored_root import deletion_mark, root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    ObjectNotFoundError,
    StoragePermissionError,
)
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, format_names
from ckptcore.opening.open_checkpoints import ConsistentRead, expect_member, open_files, open_tree

MemberOpener: TypeAlias = Callable[[str, str], Checkpoint]
"""Opens a member of a composite by its name and its directory."""


def present_members(composite: CompositeCheckpoint) -> dict[str, list[str]]:
    """Return the members that exist, each with its directories in order of rank.

    Sends one request. If the listing lacks the root of the composite, or is not permitted, sends one more for each
    directory of a member.

    Members may have been deleted since the save. On storages without real directories, a directory is still listed
    after an interrupted deletion: see `is_deleted`. A member that other software wrote may be a file.
    """
    try:
        names = composite.location.store.list_names()
    except StoragePermissionError:
        if composite.root is None:
            raise
        names = ()
    listed = {entry.removesuffix("/") for entry in names if entry.endswith("/") or composite.root is None}
    if composite.root is not None and ROOT_KEY not in names:
        # The root is not listed: the storage cannot list (a web server), or its listing is outdated.
        listed |= _found_by_roots(composite)
    of_ranks: dict[str, list[int]] = {}
    for directory in listed:
        if (of_rank := split_rank(directory)) is not None:
            of_ranks.setdefault(of_rank[0], []).append(of_rank[1])
    present = {}
    for name, member in composite.members.items():
        # Do not count up to the number of processes: a hostile root may state any number.
        ranks = [0] if member.processes in (None, 1) else sorted(of_ranks.get(name, ()))
        directories = [member.directory(name, rank) for rank in ranks if rank < (member.processes or 1)]
        if existing := [directory for directory in directories if directory in listed]:
            present[name] = existing
    return present


def existing_members(composite: CompositeCheckpoint) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each checkpointable in the order of the save, with its directories that exist and are not being deleted.

    Directories are in order of rank. Checking a directory costs one request, sent when the iterator reaches it.
    """
    present = present_members(composite)
    for name in composite.members:
        yield name, (directory for directory in present.get(name, ()) if not is_deleted(composite, directory))


def _found_by_roots(composite: CompositeCheckpoint) -> set[str]:
    """Find the directories of members by their roots, without a listing. Sends one request for each directory.

    Stops at the first missing directory of a member, so the directories of later ranks are not found.
    """
    with_root = set()
    for name, member in composite.members.items():
        for rank in range(member.processes or 1):  # stops at the first missing one: a hostile root may state any number
            directory = member.directory(name, rank)
            if root_bytes(subdirectory(composite.location.store, directory)) is None:
                break
            with_root.add(directory)
    return with_root


def is_deleted(composite: CompositeCheckpoint, directory: str) -> bool:
    """Return True if a directory of the composite is empty or missing, or if its deletion began."""
    inside = subdirectory(composite.location.store, directory)
    data = root_bytes(inside)
    if data is not None:
        return is_claim(data)
    return not inside.list_names() and not (composite.root is None and _is_file(composite.location, directory))


def lost_members(composite: CompositeCheckpoint, absent: Collection[str]) -> list[str]:
    """Return the absent checkpointables that are lost, because ckptcore did not delete them.

    Sends one request to list the composite, and one for each absent directory that is listed without a mark. If the
    storage cannot list, sends one for each directory. Returns all of `absent` if other software wrote the composite,
    because other software does not mark deletions.
    """
    root, store = composite.root, composite.location.store
    if root is None or not absent:
        return list(absent)
    try:
        names = frozenset(store.list_names())
    except StoragePermissionError:
        names = frozenset()
    listed = ROOT_KEY in names

    def is_marked(directory: str) -> bool:
        mark = deletion_mark(root.save_id, directory)
        if mark in names or (not listed and _is_file(composite.location, mark)):
            return True
        # A claim: the deletion was interrupted.
        data = root_bytes(subdirectory(store, directory)) if f"{directory}/" in names else None
        return data is not None and is_claim(data)

    lost = []
    for name in absent:
        member = root.members[name]
        # Stops at the first lost directory: a hostile root may state any number of processes.
        if not all(is_marked(member.directory(name, rank)) for rank in range(member.processes or 1)):
            lost.append(name)
    return lost


def _is_file(location: Location, name: str) -> bool:
    try:
        location.store.size(name)
    except ObjectNotFoundError:
        return False
    return True


def open_directory(
    composite: CompositeCheckpoint, name: str, directory: str, location: AnyLocation, context: Context
) -> Checkpoint:
    """Open the checkpoint in a directory of a composite. The caller checks that it belongs to the composite.

    Raises:
        Errors of `open_checkpoint`.
    """
    if composite.root is None:
        return _open_foreign_member(composite, name, directory, location, context)
    # Pass the root of the composite, so that it is not read again for each member.
    return ConsistentRead(SubPath(location, directory), context, open_tree, composite.version.root).open()


def open_member(
    composite: CompositeCheckpoint, name: str, directory: str, location: AnyLocation, context: Context
) -> Checkpoint:
    """Open a member of a composite.

    Raises:
        CorruptCheckpointError: its directory has a checkpoint of another save, or of another kind than the composite
            states.
        Errors of `open_checkpoint`. If other software wrote the checkpoint, they have a hint to load the other members.
    """
    checkpoint = open_directory(composite, name, directory, location, context)
    if composite.root is None:
        return checkpoint
    expect_member(checkpoint, composite.location, composite.root, composite.members[name])
    return checkpoint


def member_opener(composite: Checkpoint | CompositeCheckpoint, location: AnyLocation, context: Context) -> MemberOpener:
    """Return a function that opens each member of a composite once. See `open_member`."""

    @functools.cache
    def open_one(name: str, directory: str) -> Checkpoint:
        assert isinstance(composite, CompositeCheckpoint)  # a tree has no members
        return open_member(composite, name, directory, location, context)

    return open_one


def _open_foreign_member(
    composite: CompositeCheckpoint, name: str, directory: str, location: AnyLocation, context: Context
) -> Checkpoint:
    opener = open_files if composite.members[name].kind == "files" else open_tree
    others = format_names([other for other in composite.members if other != name])
    hint = f"to load the others without it, pass their names to load_checkpointables: {others}"
    try:
        return ConsistentRead(SubPath(location, directory), context, opener).open()
    except (CheckpointNotFoundError, CompositeCheckpointError) as error:
        raise CheckpointNotFoundError(
            f"{name!r} in {composite.location.display} cannot be read by any installed plugin: {error}; {hint}"
        ) from error
    except CheckpointError as error:
        error.add_note(hint)
        raise
