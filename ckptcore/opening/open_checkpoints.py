"""Opening checkpoints: consistent reads, and the roots of trees and composites."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Generic, TypeAlias, TypeVar

from ckptcore.commit.location import AnyLocation, Location, resolve_location
from ckptcore.commit.names import is_hidden_name
from ckptcore.commit.root import Claim, CompositeRoot, Member, PartialSave, Root
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.stored_root import (
    LocationVersion,
    ParsedRoots,
    parse_root,
    read_version,
)
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    StorageError,
    UncommittedCheckpointError,
)
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.opening.checkpoint import (
    Checkpoint,
    CompositeCheckpoint,
    Source,
    naming_arrays,
    naming_other_file,
    not_finalized,
    several_checkpointables,
    stored_format,
)
from ckptcore.runtime import runtime_of

OpenedT = TypeVar("OpenedT", bound=Checkpoint | CompositeCheckpoint)
T = TypeVar("T")

Opener: TypeAlias = Callable[[Location, LocationVersion, Context], OpenedT]
"""Opens the checkpoint at a location. The caller read the version before, to detect a later replacement."""

RootCache: TypeAlias = ParsedRoots[StoredFormat]
"""Cache of parsed roots. Only for callers that do not return mutable parts of a root."""

ATTEMPTS: Final = 20
"""Maximum number of attempts to read a checkpoint that is replaced again and again."""

_MAX_COMPOSITES: Final = 64
"""Maximum number of cached save ids of composites."""


class ConsistentRead(Generic[OpenedT]):
    """Attempts to read a checkpoint.

    Each attempt opens the checkpoint again. It succeeds if the checkpoint was not replaced during the attempt.
    """

    def __init__(
        self,
        location: AnyLocation,
        context: Context,
        opener: Opener[OpenedT],
        composite_root: bytes | str | None = None,
        given: OpenedT | None = None,
    ) -> None:
        """Keep the arguments. `open` opens the checkpoint.

        Args:
            location: the location.
            context: options.
            opener: opens the checkpoint at the location.
            composite_root: see `read_version`.
            given: an open checkpoint for the only attempt. The caller that opened it checks for replacement.
        """
        self._given = given
        self._location = location
        self._composite_root = composite_root
        self._context = context
        self._opener = opener
        self._attempts_left = ATTEMPTS
        self._opened: OpenedT | None = None

    def open(self) -> OpenedT:
        """Begin an attempt. All metadata of the opened checkpoint is from one save.

        Raises:
            CorruptCheckpointError: the checkpoint is damaged, or was replaced too often.
            Errors of the opener.
        """
        if self._given is not None:
            return self._given
        context = self._context
        while self._attempts_left:
            self._attempts_left -= 1
            # Open the storage again for each attempt: it may keep objects open by name.
            resolved = resolve_location(self._location, runtime_of(context).storages)
            version = read_version(resolved, self._composite_root)
            self._opened = None
            try:
                checkpoint = self._opener(resolved, version, context)
            except CheckpointError as error:
                if version.is_current(resolved) and not _restores(resolved, error):
                    named = naming_other_file(error, resolved) if isinstance(error, CorruptCheckpointError) else error
                    if named is not error:
                        raise named from error
                    raise
                continue
            # Without a root, the opener listed files; check that no save was committed meanwhile.
            if version.root is not None or version.still_exists(resolved):
                self._opened = checkpoint
                return checkpoint
        raise replaced_too_often(self._location)

    def retry_if_replaced(self, attempt: Callable[[OpenedT], T]) -> T:
        """Open and read a checkpoint. Starts again if it was replaced meanwhile, so that the result is from one save.

        Raises:
            Errors of the opener and of `attempt`. Errors about bytes name the arrays that contain them.
        """
        while True:
            checkpoint = self.open()
            try:
                result = attempt(checkpoint)
            except CheckpointError:
                if not self.is_current():
                    continue
                if isinstance(checkpoint, Checkpoint):
                    with naming_arrays(checkpoint):
                        raise
                raise
            if self.is_unchanged():
                return result

    def is_current(self) -> bool:
        """Return True if the opened checkpoint was not replaced, so that an error is about the checkpoint itself.

        Also returns True if no checkpoint is open, or if the caller opened it.
        """
        return self._opened is None or self._opened.version.is_current(self._opened.location)

    def is_unchanged(self) -> bool:
        """Return True if all data that was read since `open` is from one save.

        Reads the root again, or lists the names again if there is no root.
        """
        if self._opened is None:
            return True
        version, location = self._opened.version, self._opened.location
        return version.still_exists(location) if version.root is None else version.has_current_root(location)


def _restores(location: Location, error: CheckpointError) -> bool:
    """Restore a checkpoint that a killed process left under a hidden name, if this explains the missing root.

    Returns True if a checkpoint was restored, so that the caller can open it again.
    """
    if not isinstance(error, CheckpointNotFoundError | CorruptCheckpointError):
        return False
    try:
        return location.commit_method.restore(location.name)
    except StorageError as failure:
        error.add_note(f"A save that was killed has hidden the old checkpoint, which cannot be restored: {failure}")
        return False


def tree_attempts(source: Source, context: Context, known: RootCache | None = None) -> ConsistentRead[Checkpoint]:
    """Return attempts to read a tree; a single one for an open checkpoint.

    Args:
        source: a location, or an open checkpoint.
        context: options.
        known: cache of parsed roots; None: parse the root.
    """
    if isinstance(source, Checkpoint):
        return ConsistentRead(source.location.display, context, open_tree, given=source)
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

    A composite with one checkpointable is opened as that tree, because Orbax saves each tree under a name. A copied
    composite with a default checkpointable is opened as that checkpointable.

    Args:
        location: the location.
        version: the state of the location: the bytes of the root, or the names of files of other software.
        context: options.
        known: cache of parsed roots.

    Raises:
        CheckpointNotFoundError: there is no checkpoint that an installed layout reads.
        UncommittedCheckpointError: a save at the location began and was not committed.
        CompositeCheckpointError: the checkpoint has several checkpointables.
        CorruptCheckpointError: the checkpoint is damaged.
        InvalidLocationError, UnsupportedVersionError: the root cannot be read.
    """
    root = _committed_root(location, version, known)
    if isinstance(root, CompositeRoot):
        name = next(iter(root.members)) if len(root.members) == 1 else root.default
        if name is None or root.members[name].processes not in (None, 1):
            raise several_checkpointables(location, list(root.members))
        return _open_default(location, version, root, name, context, known)
    checkpoint = _open_tree(location, version, root, context, known)
    return checkpoint if root is not None and not root.references.bases else _with_chain(checkpoint, context)


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
    checkpoint = _open_tree(inner, inner_version, root, context, known)
    expect_member(checkpoint, location, composite, composite.members[name])
    return checkpoint


def open_names(location: Location, version: LocationVersion, context: Context) -> CompositeCheckpoint:
    """Open a checkpoint of several checkpointables, or a named tree of other software.

    Raises:
        CompositeCheckpointError: it is one tree.
        Errors of `open_tree`.
    """
    root = _committed_root(location, version)
    composite = _open_composite(location, version, root, context)
    if composite is not None:
        return composite
    checkpoint = open_tree(location, version, context)
    raise CompositeCheckpointError(f"{checkpoint.location.display} is one tree and has no names: use load")


def open_either(location: Location, version: LocationVersion, context: Context) -> Checkpoint | CompositeCheckpoint:
    """Open one tree or a composite. A single item of other software is a tree if it can be opened without its name.

    Raises:
        Errors of `open_tree`.
    """
    opened = open_stored(location, version, context)
    return opened if isinstance(opened, CompositeCheckpoint) else _with_chain(opened, context)


def open_stored(location: Location, version: LocationVersion, context: Context) -> Checkpoint | CompositeCheckpoint:
    """Open like `open_either`, but do not follow the chain of a checkpoint that stores differences from a base.

    The arrays of such a checkpoint are then as in `ChainLink`. A chain can have thousands of checkpoints.

    Raises:
        Errors of `open_tree`.
    """
    root = _committed_root(location, version)
    composite = _open_composite(location, version, root, context)
    if composite is None:
        assert not isinstance(root, CompositeRoot)  # `_open_composite` returns a composite for it
        return _open_tree(location, version, root, context)
    if root is not None or len(composite.members) != 1:
        return composite
    from ckptcore.opening.foreign import inspect_tree  # only checkpoints of other software need it

    try:
        return inspect_tree(location, version, context)
    except UncommittedCheckpointError:
        raise
    except (CheckpointNotFoundError, CompositeCheckpointError):
        return composite


def _open_composite(
    location: Location, version: LocationVersion, root: Root | CompositeRoot | None, context: Context
) -> CompositeCheckpoint | None:
    """Open a composite by its root, or a composite of other software if there is no root; None for one tree."""
    if isinstance(root, CompositeRoot):
        return CompositeCheckpoint.of_root(location, version, root)
    if root is not None:
        return None
    from ckptcore.opening.foreign import find_composite  # only checkpoints of other software need it

    return find_composite(location, version, context)


def open_files(location: Location, version: LocationVersion, context: Context) -> Checkpoint:
    """Open the files that an object wrote: the files listed in the root, or every file if there is no root.

    Raises:
        CheckpointNotFoundError: the location has no files.
        Errors of `open_tree`.
    """
    if version.root is not None:
        return open_tree(location, version, context)
    from ckptcore.opening.foreign import open_foreign_files  # only checkpoints of other software need it

    return open_foreign_files(location, version, context)


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


def _open_tree(
    location: Location, version: LocationVersion, root: Root | None, context: Context, known: RootCache | None = None
) -> Checkpoint:
    """Open a tree by its root, or a tree of other software if there is no root. See `open_stored`."""
    if root is None:
        from ckptcore.opening.foreign import open_foreign  # only checkpoints of other software need it

        return open_foreign(location, version, context)
    if root.role == "member":
        _expect_committed(location, version, root, context)
        version = version.digested()
    data, stored = version.root, None
    if known is not None and isinstance(data, bytes):
        stored = known.keep(data, root, functools.partial(stored_format, root, context))
    checkpoint = Checkpoint.of_root(location, version, root, context, stored)
    if root.references.leaf:
        from ckptcore.opening.bases import with_bases  # only updates refer to bases

        return with_bases(checkpoint, root, context)
    if location.of_host and not root.references.bases:  # copies would be of differences
        from ckptcore.opening.host_copies import with_copies  # only per-host directories have copies

        return with_copies(checkpoint, root, context)
    return checkpoint


def _with_chain(checkpoint: Checkpoint, context: Context) -> Checkpoint:
    """Return a checkpoint with the arrays that are computed from its base, if it has one."""
    if checkpoint.is_files or checkpoint.read_instead is not None:
        return checkpoint  # copies on this host
    if checkpoint.root is not None and not checkpoint.root.references.bases:
        return checkpoint
    if checkpoint.layout.base(checkpoint.tree, checkpoint.state) is None:
        return checkpoint
    from ckptcore.opening.bases import with_chain  # only differences from a base need it

    return with_chain(checkpoint, context)


def _expect_committed(location: Location, version: LocationVersion, member: Root, context: Context) -> None:
    """Check that the composite of a member is committed.

    A member without a composite around it was copied. It is valid, because its root was written after its other files.

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
    """Return the save id of a committed composite; None for any other root.

    Cached, because opening each member of a composite needs it.

    Args:
        data: the root.
        known: a cache by digest of the root. It does not keep the roots, which may be large.
    """
    import hashlib  # only members of composites need it

    digest = hashlib.sha256(data).digest()
    if digest in known:
        return known[digest]
    summary = summarize_root(data)
    save_id = summary.save_id if summary.committed and summary.members is not None else None
    known[digest] = save_id
    while len(known) > _MAX_COMPOSITES:
        known.pop(next(iter(known)), None)
    return save_id


def expect_member(opened: Checkpoint, location: Location, composite: CompositeRoot, member: Member) -> None:
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
