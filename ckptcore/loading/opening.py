"""Opening checkpoints: consistent reads, roots of trees and composites, and the members of composites."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Final, Generic, TypeAlias, TypeVar

from ckptcore.commit.location import AnyLocation, Location, SubPath, resolve_location
from ckptcore.commit.root import ROOT_KEY, Claim, Composite, KnownRoots, PartialSave, Root
from ckptcore.commit.root_json import is_claim
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import LocationVersion, is_hidden_name, parse_root, read_version, root_bytes
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    UncommittedCheckpointError,
)
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint, Source, naming_arrays, stored_format
from ckptcore.loading.foreign import (
    find_composite,
    inspect_tree,
    not_finalized,
    open_foreign,
    open_foreign_files,
    several_checkpointables,
)
from ckptcore.runtime import runtime_of

__all__ = [
    "ATTEMPTS",
    "ConsistentRead",
    "Known",
    "is_deleted",
    "names_shown",
    "open_checkpoint",
    "open_either",
    "open_files",
    "open_member",
    "open_names",
    "open_tree",
    "present_members",
    "replaced_too_often",
    "tree_read",
]

Found = TypeVar("Found", bound=Checkpoint | CompositeCheckpoint)
T = TypeVar("T")

Opener: TypeAlias = Callable[[Location, LocationVersion, Context], Found]
"""Opens the checkpoint at a location, given its version. If the result is of another save, the version has changed."""

Known: TypeAlias = KnownRoots[StoredFormat]
"""Cache of parsed roots. For callers that return no mutable part of a root."""

ATTEMPTS: Final = 20
"""Attempts to read a checkpoint that is replaced during each of them."""

_NAMES_SHOWN: Final = 20
_OF_RANK: Final = re.compile(r"(.+)\.rank_(0|[1-9][0-9]{0,8})", re.DOTALL)


class ConsistentRead(Generic[Found]):
    """Attempts to read a checkpoint. Each opens it; the last one is not interrupted by a replacement."""

    def __init__(self, location: AnyLocation, context: Context, opener: Opener[Found]) -> None:
        """Open nothing yet."""
        self._location = location
        self._context = context
        self._opener = opener
        self._left = ATTEMPTS
        self._found: Found | None = None

    def open(self) -> Found:
        """Begin an attempt. The result is of one save.

        Raises:
            CorruptCheckpointError: also if it was replaced too often.
            What the opener does.
        """
        context = self._context
        while self._left:
            self._left -= 1
            # Opened anew each time: a storage may keep objects open by name.
            resolved = resolve_location(self._location, runtime_of(context).storages)
            version = read_version(resolved)
            self._found = None
            try:
                found = self._opener(resolved, version, context)
            except CheckpointError:
                if version.is_current(resolved):
                    raise
                continue
            # Without a root, the opener has read files, which a save may have committed meanwhile.
            if version.root is not None or version.still_exists(resolved):
                self._found = found
                return found
        raise replaced_too_often(self._location)

    def retry_if_replaced(self, attempt: Callable[[Found], T]) -> T:
        """Open and read a checkpoint; begin again if it was replaced meanwhile, so that the result is of one save.

        Raises:
            What the opener and `attempt` do. Errors about bytes of a tree name the arrays that have them.
        """
        while True:
            found = self.open()
            try:
                with naming_arrays(found) if isinstance(found, Checkpoint) else nullcontext():
                    made = attempt(found)
            except CheckpointError:
                if self.is_current():
                    raise
                continue
            if self.is_unchanged():
                return made

    def is_current(self) -> bool:
        """Return True if the last opened checkpoint was not replaced: an error is about the checkpoint itself."""
        return self._found is None or self._found.version.is_current(self._found.location)

    def is_unchanged(self) -> bool:
        """Return True if all data read without an error since the last `open` is of one save."""
        if self._found is None:
            return True
        version, location = self._found.version, self._found.location
        return version.still_exists(location) if version.root is None else version.has_current_root(location)


class _AlreadyOpen(ConsistentRead[Checkpoint]):
    """A single attempt with an open checkpoint. The caller that opened it checks for replacement."""

    def __init__(self, opened: Checkpoint) -> None:
        self._opened = opened

    def open(self) -> Checkpoint:
        return self._opened

    def is_current(self) -> bool:
        return True

    def is_unchanged(self) -> bool:
        return True


def tree_read(source: Source, context: Context, known: Known | None = None) -> ConsistentRead[Checkpoint]:
    """Return attempts to read a tree; a single one for an open checkpoint."""
    if isinstance(source, Checkpoint):
        return _AlreadyOpen(source)
    opener: Opener[Checkpoint] = open_tree if known is None else functools.partial(open_tree, known=known)
    return ConsistentRead(source, context, opener)


def open_checkpoint(location: AnyLocation, context: Context) -> Checkpoint:
    """Open the tree at a location. The caller checks for replacement after reading.

    Raises:
        What `open_tree` does.
    """
    return ConsistentRead(location, context, open_tree).open()


def replaced_too_often(location: AnyLocation) -> CorruptCheckpointError:
    """The error for a checkpoint that was replaced in every one of `ATTEMPTS`."""
    return CorruptCheckpointError(
        f"{location} was replaced {ATTEMPTS} times while it was read; load it when it is saved less often"
    )


def open_tree(location: Location, version: LocationVersion, context: Context, known: Known | None = None) -> Checkpoint:
    """Open the tree at a location, or the files that an object wrote there.

    Args:
        location: its location.
        version: its state: the bytes of the root, or the names of files of other software.
        context: options.
        known: cache of parsed roots.

    Raises:
        CheckpointNotFoundError: if there is nothing that any installed layout reads.
        UncommittedCheckpointError: if a save began there and never committed.
        CompositeCheckpointError: if it holds several checkpointables.
        CorruptCheckpointError: if it cannot be read.
    """
    root = _committed_root(location, version, known)
    if root is None:
        return open_foreign(location, version, context)
    if isinstance(root, Composite):
        raise several_checkpointables(location, list(root.members))
    return _open_own(location, version, root, context, known)


def open_names(location: Location, version: LocationVersion, context: Context) -> CompositeCheckpoint:
    """Open a checkpoint of several checkpointables, or one tree that the software which wrote it knows by a name.

    Raises:
        CompositeCheckpointError: if it is one tree.
        What `open_tree` does.
    """
    root = _committed_root(location, version)
    if isinstance(root, Composite):
        return CompositeCheckpoint.of_root(location, version, root)
    if root is None and (found := find_composite(location, version, context)) is not None:
        return found
    opened = open_tree(location, version, context)
    raise CompositeCheckpointError(f"{opened.location.display} is one tree and has no names: use load")


def open_either(location: Location, version: LocationVersion, context: Context) -> Checkpoint | CompositeCheckpoint:
    """Open one tree or a composite. A single item of other software is a tree if it can be opened without its name.

    Raises:
        What `open_tree` does.
    """
    root = _committed_root(location, version)
    if isinstance(root, Composite):
        return CompositeCheckpoint.of_root(location, version, root)
    if root is not None:
        return _open_own(location, version, root, context, None)
    found = find_composite(location, version, context)
    if found is None:
        return open_foreign(location, version, context)
    if len(found.members) != 1:
        return found
    try:
        return inspect_tree(location, version, context)
    except UncommittedCheckpointError:
        raise
    except (CheckpointNotFoundError, CompositeCheckpointError):
        return found


def open_files(location: Location, version: LocationVersion, context: Context) -> Checkpoint:
    """Open files that an object wrote: a checkpoint of ckptcore; without a root, every file at the location.

    Raises:
        CheckpointNotFoundError: if there is no file.
        What `open_tree` does.
    """
    opener = open_foreign_files if version.root is None else open_tree
    return opener(location, version, context)


def _committed_root(
    location: Location, version: LocationVersion, known: Known | None = None
) -> Root | Composite | None:
    """Return the root of a committed checkpoint; None if there is no root.

    Raises:
        InvalidLocationError, CorruptCheckpointError, UnsupportedVersionError: if it cannot be read.
        UncommittedCheckpointError: if the checkpoint is not committed.
    """
    data, root = version.root, None
    if isinstance(data, str):
        raise InvalidLocationError(data)
    if data is not None:
        parse = functools.partial(parse_root, location.store, data, location.display)
        root = parse() if known is None else known.root(data, parse)
    if isinstance(root, Claim) or is_hidden_name(location.name):
        began = "" if root is None else f" (it began at {root.created})"
        raise UncommittedCheckpointError(
            f"{location.display} holds a save that was not committed{began}: it is running or was interrupted; load "
            "another checkpoint, or save here again"
        )
    if isinstance(root, PartialSave):
        raise not_finalized(location, root)
    return root


def _open_own(
    location: Location, version: LocationVersion, root: Root, context: Context, known: Known | None
) -> Checkpoint:
    """Open a tree that ckptcore wrote."""
    if root.role == "member":
        _expect_committed(location, version, root)

    data, stored = version.root, None
    if known is not None and isinstance(data, bytes):
        stored = known.keep(data, root, functools.partial(stored_format, root, context))
    opened = Checkpoint.of_root(location, version, root, context, stored)
    if root.references.leaf:
        from ckptcore.loading.bases import with_bases  # only updates refer to bases

        return with_bases(opened, root, context)
    if location.of_host:
        from ckptcore.loading.host_copies import with_copies  # only per-host directories have copies

        return with_copies(opened, root, context)
    return opened


def _expect_committed(location: Location, version: LocationVersion, member: Root) -> None:
    """Check that the composite of a member is committed.

    A member that was copied out of its composite is complete: its root was written after everything else of it.

    Raises:
        UncommittedCheckpointError
    """
    data = version.composite_root
    hidden = is_hidden_name(location.parent_name)
    if data is None and not hidden:
        return
    if isinstance(data, str):
        raise InvalidLocationError(data)
    around = None if data is None else parse_root(location.parent, data, f"the directory around {location.display}")
    if hidden or not isinstance(around, Composite) or around.save_id != member.save_id:
        raise UncommittedCheckpointError(
            f"{location.display} belongs to a checkpoint of several checkpointables that was not committed, or was "
            "replaced meanwhile; load another checkpoint, or save again"
        )


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
    """Return the directories with roots of members, without a listing. Sends a request for each, and for each name."""
    found = set()
    for name, member in composite.members.items():
        for rank in range(member.processes or 1):  # a hostile root may state any number: stop at the first missing one
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
    composite: CompositeCheckpoint, name: str, directory: str, location: AnyLocation, context: Context
) -> Checkpoint:
    """Open a member of a composite.

    Raises:
        CorruptCheckpointError: if its directory has another checkpoint.
        What `open_checkpoint` does; for a checkpoint of other software with a hint how to load the other members.
    """
    if composite.root is None:
        return _open_foreign_member(composite, name, directory, location, context)
    opened = open_checkpoint(SubPath(location, directory), context)
    if opened.root is None or opened.root.role != "member" or opened.root.save_id != composite.root.save_id:
        raise CorruptCheckpointError(
            f"{opened.location.display} was replaced by something else than it was saved with; load it by its own "
            "location, or delete it"
        )
    kind = composite.members[name].kind
    if opened.is_files != (kind == "files"):
        raise CorruptCheckpointError(
            f"{opened.location.display} has the layout {opened.layout.name!r}, and {composite.location.display} says "
            f"that it is a {kind!r}: one of the two is damaged or forged; load another checkpoint"
        )
    return opened


def _open_foreign_member(
    composite: CompositeCheckpoint, name: str, directory: str, location: AnyLocation, context: Context
) -> Checkpoint:
    opener = open_files if composite.members[name].kind == "files" else open_tree
    others = names_shown([other for other in composite.members if other != name])
    hint = f"ask load_checkpointables for the names that you need, to load the others without it: {others}"
    try:
        return ConsistentRead(SubPath(location, directory), context, opener).open()
    except (CheckpointNotFoundError, CompositeCheckpointError) as error:
        raise CheckpointNotFoundError(
            f"{name!r} in {composite.location.display} is nothing that an installed plugin reads: {error}; {hint}"
        ) from error
    except CheckpointError as error:
        error.add_note(hint)
        raise


def names_shown(names: Collection[str]) -> str:
    """Return names for a message, limited in number: a hostile root may list any."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(itertools.islice(names, _NAMES_SHOWN)) or "none") + more
