"""Opening checkpoints: consistent reads, roots of trees and composites, and the members of composites."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Final, Generic, TypeAlias, TypeVar

from ckptcore.commit.location import AnyLocation, Location, SubPath, resolve_location
from ckptcore.commit.names import is_hidden_name
from ckptcore.commit.root import ROOT_KEY, Claim, CompositeRoot, Member, PartialSave, Root, split_rank
from ckptcore.commit.root_json import is_claim, summarize_root
from ckptcore.commit.stored_root import (
    LocationVersion,
    ParsedRoots,
    deletion_mark,
    parse_root,
    read_version,
    root_bytes,
)
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    UncommittedCheckpointError,
)
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.opening.checkpoint import (
    Checkpoint,
    CompositeCheckpoint,
    Source,
    naming_arrays,
    naming_other_file,
    stored_format,
)
from ckptcore.opening.foreign import (
    find_composite,
    format_names,
    inspect_tree,
    not_finalized,
    open_foreign,
    open_foreign_files,
    several_checkpointables,
)
from ckptcore.runtime import runtime_of

OpenedT = TypeVar("OpenedT", bound=Checkpoint | CompositeCheckpoint)
T = TypeVar("T")

Opener: TypeAlias = Callable[[Location, LocationVersion, Context], OpenedT]
"""Opens the checkpoint at a location. The version, read before, shows later whether the checkpoint was replaced."""

MemberOpener: TypeAlias = Callable[[str, str], Checkpoint]
"""Opens a member of a composite by its name and its directory."""

RootCache: TypeAlias = ParsedRoots[StoredFormat]
"""Cache of parsed roots. Only for callers that do not return mutable parts of a root."""

ATTEMPTS: Final = 20
"""Limit of attempts to read a checkpoint that is replaced again and again."""

_MAX_COMPOSITES: Final = 64
"""Limit of the composites whose save ids are kept."""


class ConsistentRead(Generic[OpenedT]):
    """Attempts to read a checkpoint. Each attempt opens it again, and succeeds if it was not replaced meanwhile."""

    def __init__(
        self,
        location: AnyLocation,
        context: Context,
        opener: Opener[OpenedT],
        composite_root: bytes | str | None = None,
    ) -> None:
        """Open nothing yet. See `read_version` for the root of the composite."""
        self._location = location
        self._composite_root = composite_root
        self._context = context
        self._opener = opener
        self._attempts_left = ATTEMPTS
        self._opened: OpenedT | None = None

    def open(self) -> OpenedT:
        """Begin an attempt. The opened checkpoint is of one save.

        Raises:
            CorruptCheckpointError: the checkpoint is damaged, or was replaced too often.
            Errors of the opener.
        """
        context = self._context
        while self._attempts_left:
            self._attempts_left -= 1
            # Open the storage again for each attempt: it may keep objects open by name.
            resolved = resolve_location(self._location, runtime_of(context).storages)
            version = read_version(resolved, self._composite_root)
            self._opened = None
            try:
                opened = self._opener(resolved, version, context)
            except CheckpointError as error:
                if version.is_current(resolved) and not _restores(resolved, error):
                    named = naming_other_file(error, resolved) if isinstance(error, CorruptCheckpointError) else error
                    if named is not error:
                        raise named from error
                    raise
                continue
            # Without a root, the opener listed files; check that no save was committed meanwhile.
            if version.root is not None or version.still_exists(resolved):
                self._opened = opened
                return opened
        raise replaced_too_often(self._location)

    def retry_if_replaced(self, attempt: Callable[[OpenedT], T]) -> T:
        """Open and read a checkpoint. Repeats this if it was replaced meanwhile, so that the result is of one save.

        Raises:
            Errors of the opener and of `attempt`. Errors about bytes name the arrays that contain them.
        """
        while True:
            opened = self.open()
            try:
                result = attempt(opened)
            except CheckpointError:
                if not self.is_current():
                    continue
                if isinstance(opened, Checkpoint):
                    with naming_arrays(opened):
                        raise
                raise
            if self.is_unchanged():
                return result

    def is_current(self) -> bool:
        """Return True if the opened checkpoint was not replaced, so that an error is about the checkpoint itself.

        Also returns True if no checkpoint is open.
        """
        return self._opened is None or self._opened.version.is_current(self._opened.location)

    def is_unchanged(self) -> bool:
        """Return True if all data that was read since `open` is of one save. Reads the root, or the names, again."""
        if self._opened is None:
            return True
        version, location = self._opened.version, self._opened.location
        return version.still_exists(location) if version.root is None else version.has_current_root(location)


def _restores(location: Location, error: CheckpointError) -> bool:
    """Restore the checkpoint that a killed process was replacing, or had saved, if that is why there is no root."""
    if not isinstance(error, CheckpointNotFoundError | CorruptCheckpointError):
        return False
    try:
        return location.commit_method.restore(location.name)
    except StorageError as failure:
        error.add_note(f"A save that was killed has hidden the old checkpoint, which cannot be restored: {failure}")
        return False


class _AlreadyOpen(ConsistentRead[Checkpoint]):
    """A single attempt with an open checkpoint. The caller that opened it checks for replacement."""

    def __init__(self, opened: Checkpoint, context: Context) -> None:
        super().__init__(opened.location.display, context, open_tree)
        self._checkpoint = self._opened = opened

    def open(self) -> Checkpoint:
        return self._checkpoint

    def is_current(self) -> bool:
        return True

    def is_unchanged(self) -> bool:
        return True


def tree_attempts(source: Source, context: Context, known: RootCache | None = None) -> ConsistentRead[Checkpoint]:
    """Return attempts to read a tree; a single one for an open checkpoint.

    Args:
        source: a location, or an open checkpoint.
        context: options.
        known: cache of parsed roots; None: parse the root.
    """
    if isinstance(source, Checkpoint):
        return _AlreadyOpen(source, context)
    opener: Opener[Checkpoint] = open_tree if known is None else functools.partial(open_tree, known=known)
    return ConsistentRead(source, context, opener)


def open_checkpoint(location: AnyLocation, context: Context) -> Checkpoint:
    """Open the tree at a location. The caller checks for replacement after reading.

    Raises:
        Errors of `open_tree`.
    """
    return ConsistentRead(location, context, open_tree).open()


def replaced_too_often(location: AnyLocation) -> CorruptCheckpointError:
    """Return the error for a checkpoint that was replaced in every attempt."""
    return CorruptCheckpointError(
        f"{location} was replaced {ATTEMPTS} times while it was read: load it while no process saves to it"
    )


def open_tree(
    location: Location, version: LocationVersion, context: Context, known: RootCache | None = None
) -> Checkpoint:
    """Open the tree at a location, or the files that an object wrote there.

    The only checkpointable of a composite is opened without its name: Orbax saves each tree under a name. So is the
    default one of a copy.

    Args:
        location: the location.
        version: the state of the location: the bytes of the root, or the names of files of other software.
        context: options.
        known: cache of parsed roots.

    Raises:
        CheckpointNotFoundError: there is no checkpoint that an installed layout reads.
        UncommittedCheckpointError: a save began there and was not committed.
        CompositeCheckpointError: the checkpoint has several checkpointables.
        CorruptCheckpointError: the checkpoint is damaged.
        InvalidLocationError, UnsupportedVersionError: the root cannot be read.
    """
    root = _committed_root(location, version, known)
    if root is None:
        return open_foreign(location, version, context)
    if isinstance(root, CompositeRoot):
        name = next(iter(root.members)) if len(root.members) == 1 else root.default
        if name is None or root.members[name].processes not in (None, 1):
            raise several_checkpointables(location, list(root.members))
        return _open_default(location, version, root, name, context, known)
    return _open_with_root(location, version, root, context, known)


def _open_default(
    location: Location,
    version: LocationVersion,
    composite: CompositeRoot,
    name: str,
    context: Context,
    known: RootCache | None,
) -> Checkpoint:
    inner = location.within(name)
    inner_version = read_version(inner, version.root)
    root = _committed_root(inner, inner_version, known)
    others = [other for other in composite.members if other != name]
    if root is None and others:  # it was deleted
        raise several_checkpointables(location, others)
    if not isinstance(root, Root):
        raise _replaced_member(inner)
    opened = _open_with_root(inner, inner_version, root, context, known)
    _expect_member(opened, location, composite, composite.members[name])
    return opened


def open_names(location: Location, version: LocationVersion, context: Context) -> CompositeCheckpoint:
    """Open a checkpoint of several checkpointables, or a named tree of other software.

    Raises:
        CompositeCheckpointError: it is one tree.
        Errors of `open_tree`.
    """
    root = _committed_root(location, version)
    if isinstance(root, CompositeRoot):
        return CompositeCheckpoint.of_root(location, version, root)
    if root is None and (found := find_composite(location, version, context)) is not None:
        return found
    opened = open_tree(location, version, context)
    raise CompositeCheckpointError(f"{opened.location.display} is one tree and has no names: use load")


def open_either(location: Location, version: LocationVersion, context: Context) -> Checkpoint | CompositeCheckpoint:
    """Open one tree or a composite. A single item of other software is a tree if it can be opened without its name.

    Raises:
        Errors of `open_tree`.
    """
    root = _committed_root(location, version)
    if isinstance(root, CompositeRoot):
        return CompositeCheckpoint.of_root(location, version, root)
    if root is not None:
        return _open_with_root(location, version, root, context, None)
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
    """Open files that an object wrote: those of a root, or, without a root, every file at the location.

    Raises:
        CheckpointNotFoundError: there is no file.
        Errors of `open_tree`.
    """
    opener = open_foreign_files if version.root is None else open_tree
    return opener(location, version, context)


def _committed_root(
    location: Location, version: LocationVersion, known: RootCache | None = None
) -> Root | CompositeRoot | None:
    """Return the root of a committed checkpoint; None if there is no root.

    Raises:
        InvalidLocationError, CorruptCheckpointError, UnsupportedVersionError: the root cannot be read.
        UncommittedCheckpointError: the checkpoint is not committed.
    """
    data, root = version.root, None
    if isinstance(data, str):
        raise InvalidLocationError(data)
    if data is not None:
        parse = functools.partial(parse_root, location.store, data, location.display)
        root = parse() if known is None else known.root(data, parse)
    if isinstance(root, Claim) or location.is_hidden:
        began = "" if root is None else f" (it began at {root.created})"
        raise UncommittedCheckpointError(
            f"{location.display} has a save that was not committed{began}: it is running or was interrupted. Load "
            "another checkpoint. If no process writes there, you can save here again"
        )
    if isinstance(root, PartialSave):
        raise not_finalized(location, root)
    return root


def _open_with_root(
    location: Location, version: LocationVersion, root: Root, context: Context, known: RootCache | None
) -> Checkpoint:
    """Open a tree that ckptcore wrote."""
    if root.role == "member":
        _expect_committed(location, version, root, context)
        version = version.digested()
    data, stored = version.root, None
    if known is not None and isinstance(data, bytes):
        stored = known.keep(data, root, functools.partial(stored_format, root, context))
    opened = Checkpoint.of_root(location, version, root, context, stored)
    if root.references.leaf:
        from ckptcore.opening.bases import with_bases  # only updates refer to bases

        return with_bases(opened, root, context)
    if location.of_host:
        from ckptcore.opening.host_copies import with_copies  # only per-host directories have copies

        return with_copies(opened, root, context)
    return opened


def _expect_committed(location: Location, version: LocationVersion, member: Root, context: Context) -> None:
    """Check that the composite of a member is committed.

    A member that was copied out of its composite is valid: its root was written after all of its other files.

    Raises:
        UncommittedCheckpointError: the composite is not committed, or belongs to another save than the member.
        InvalidLocationError: the root of the composite cannot be read.
    """
    data = version.composite_root
    hidden = is_hidden_name(location.parent_name)
    if data is None and not hidden:
        return
    if isinstance(data, str):
        raise InvalidLocationError(data)
    try:
        save_id = None if data is None else _composite_save_id(data, runtime_of(context).composite_save_ids)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"the directory around {location.display}: {error}", key=error.key) from error
    if hidden or save_id != member.save_id:
        raise UncommittedCheckpointError(
            f"{location.display} belongs to a checkpoint of several checkpointables that was not committed, or was "
            "replaced meanwhile. Load the others by their names, load another checkpoint, or save again"
        )


def _composite_save_id(data: bytes, known: dict[bytes, str | None]) -> str | None:
    """Return the save id of a committed composite; None for another root. Each of many members asks for it.

    Args:
        data: the root.
        known: a cache by digest. It does not hold roots, which may be large and are needed no more.
    """
    import hashlib  # only members of composites need it

    digest = hashlib.sha256(data).digest()
    if digest in known:
        return known[digest]
    summary = summarize_root(data)
    found = summary.save_id if summary.committed and summary.members is not None else None
    known[digest] = found
    while len(known) > _MAX_COMPOSITES:
        known.pop(next(iter(known)), None)
    return found


def present_members(composite: CompositeCheckpoint) -> dict[str, list[str]]:
    """Return the members that exist, each with its directories in order of rank.

    Sends one request. If the listing lacks the root of the composite, or is not permitted, sends one more for each
    directory of a member.

    Members may have been deleted since the save. On storages without real directories, an interrupted deletion leaves a
    directory: see `is_deleted`. A member that other software wrote may be a file.
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
        if found := [directory for directory in directories if directory in listed]:
            present[name] = found
    return present


def existing_members(composite: CompositeCheckpoint) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each checkpointable in the order of the save, with its directories that exist and are not being deleted.

    Directories are in order of rank. Each costs a request, once it is reached.
    """
    present = present_members(composite)
    for name in composite.members:
        yield name, (directory for directory in present.get(name, ()) if not is_deleted(composite, directory))


def _found_by_roots(composite: CompositeCheckpoint) -> set[str]:
    """Find the directories of members by their roots, without a listing. Sends one request for each directory.

    Directories of ranks after a missing one are not found.
    """
    found = set()
    for name, member in composite.members.items():
        for rank in range(member.processes or 1):  # stops at the first missing one: a hostile root may state any number
            directory = member.directory(name, rank)
            if root_bytes(subdirectory(composite.location.store, directory)) is None:
                break
            found.add(directory)
    return found


def is_deleted(composite: CompositeCheckpoint, directory: str) -> bool:
    """Return True if a directory of the composite is empty or missing, or if its deletion began."""
    inside = subdirectory(composite.location.store, directory)
    data = root_bytes(inside)
    if data is not None:
        return is_claim(data)
    return not inside.list_names() and not (composite.root is None and _is_file(composite.location, directory))


def lost_members(composite: CompositeCheckpoint, absent: Collection[str]) -> list[str]:
    """Return the checkpointables that ckptcore did not delete, of those of which nothing exists.

    Sends one request, or one for each directory if the storage cannot list. Other software does not tell deletions.
    """
    root, store = composite.root, composite.location.store
    if root is None or not absent:
        return list(absent)
    try:
        names = frozenset(store.list_names())
    except StoragePermissionError:
        names = frozenset()
    listed = ROOT_KEY in names

    def is_told(directory: str) -> bool:
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
        if not all(is_told(member.directory(name, rank)) for rank in range(member.processes or 1)):
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
    # The root of the composite is not read again for each of its members.
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
    opened = open_directory(composite, name, directory, location, context)
    if composite.root is None:
        return opened
    _expect_member(opened, composite.location, composite.root, composite.members[name])
    return opened


def _expect_member(opened: Checkpoint, location: Location, composite: CompositeRoot, member: Member) -> None:
    """Check that an open checkpoint is the member that a composite states."""
    if opened.root is None or opened.root.role != "member" or opened.root.save_id != composite.save_id:
        raise _replaced_member(opened.location)
    if opened.is_files != (member.kind == "files"):
        raise CorruptCheckpointError(
            f"{opened.location.display} has {'files' if opened.is_files else 'a tree'}, but {location.display} lists "
            f"it as {member.kind!r}: one of the two is damaged or forged. Load another checkpoint"
        )


def _replaced_member(location: Location) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{location.display} was replaced by a checkpoint of another save: load it by its own location, and "
        "the others by their names"
    )


def member_opener(found: Checkpoint | CompositeCheckpoint, location: AnyLocation, context: Context) -> MemberOpener:
    """Return a function that opens each member of a composite once. See `open_member`."""

    @functools.cache
    def open_one(name: str, directory: str) -> Checkpoint:
        assert isinstance(found, CompositeCheckpoint)  # a tree has no members
        return open_member(found, name, directory, location, context)

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
