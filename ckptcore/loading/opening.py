"""Opening a checkpoint to read it: ours by its root, any other by asking every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from ckptcore.builtin.files import FilesLayout
from ckptcore.commit.location import Location
from ckptcore.commit.mark import Mark
from ckptcore.commit.occupants import IsForeign, holds_members, is_hidden_name, parse_root
from ckptcore.commit.root import ROOT_KEY, Claimed, Composite, KnownRoots, Member, PartialSave, Root
from ckptcore.commit.root_json import HEAD_BYTES, read_head
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
from ckptcore.io.chunk_reads import IndexCache
from ckptcore.io.reader import ObjectReader
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint, Origin
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.objects import ObjectRecord, check_key
from ckptcore.model.tree import Node
from ckptcore.protocols import InspectedComposite, InspectsComposites, Layout
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames

__all__ = ["Opener", "foreign_checkpoints", "open_either", "open_files", "open_names", "open_tree"]

_Found = TypeVar("_Found", bound=Checkpoint | CompositeCheckpoint)

Opener: TypeAlias = Callable[[Location, Mark, Context], _Found]
"""Opens the checkpoint at a location, given its mark. If the result is of another save, the mark has changed."""

_STEPS_TOLD: Final = 10

_MOST_NAMES: Final = 1000
"""Limit of names that are tested for files that are checkpoints by themselves."""


def _find_foreign_names(location: Location, mark: Mark, context: Context) -> CompositeCheckpoint | None:
    """Ask every layout that knows checkpoints of several checkpointables.

    Raises:
        CorruptCheckpointError: also if a name is none that a directory can have, or it was written by ckptcore and lost its root.
    """
    layouts = [layout for layout in runtime_of(context).registry.layouts() if isinstance(layout, InspectsComposites)]
    if not layouts or not mark.names:
        return None
    _expect_no_root(location, mark)
    store = ObjectReader(location.store, {}, runtime_of(context).io_threads, verify=context.io.verify)
    found: InspectedComposite | None = None
    for layout in layouts:
        found = layout.inspect_composite(store)
        if found is not None:
            break
    if found is None:
        return None
    for name in found.members:
        _check_member(location, name)
    members = {name: Member(kind) for name, kind in found.members.items()}
    origin = Origin(found.writer, found.custom, found.metrics, found.created)
    return CompositeCheckpoint(location, mark, None, members, origin)


def _expect_no_root(location: Location, mark: Mark) -> None:
    """Refuse a directory that lists a root which could not be read.

    Raises:
        CheckpointNotFoundError
    """
    if ROOT_KEY in mark.names:
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {location.display}: {ROOT_KEY} is listed and cannot be read, so it is being "
            "written or deleted, or is a broken link; load again later, or remove the link"
        )


def _check_member(location: Location, name: str) -> None:
    """Refuse a name that leads elsewhere, and a member of a composite of ours."""
    try:
        check_key(name)
    except InvalidLocationError as error:
        raise CorruptCheckpointError(f"{location.display} names {name[:80]!r} as a checkpointable: {error}") from error
    if "/" in name:
        raise CorruptCheckpointError(
            f"{location.display} names {name[:80]!r} as a checkpointable: a name is one directory and has no '/'"
        )
    try:
        head = read_head(location.store.get(f"{name}/{ROOT_KEY}", 0, HEAD_BYTES))
    except ObjectNotFoundError:
        return
    if head is not None and head.role == "member":
        raise _lost_root(location)


Known: TypeAlias = KnownRoots[tuple[Layout, IndexCache]]
"""Cache of parsed roots, with what reads their checkpoints."""


def open_tree(location: Location, mark: Mark, context: Context, known: Known | None = None) -> Checkpoint:
    """Open the tree at a location, or the files that an object wrote there.

    Args:
        location: where it is.
        mark: its state: the bytes of the root, or the names of files of other software.
        context: how it is read.
        known: cache of parsed roots, for callers that return no mutable part of a root; None: no cache.

    Raises:
        CheckpointNotFoundError: if there is nothing that any installed layout reads.
        UncommittedCheckpointError: if a save began there and never committed.
        CompositeCheckpointError: if it holds several checkpointables.
        CorruptCheckpointError: if it cannot be read.
    """
    root = _root_of(location, mark, known)
    if root is None:
        return _open_foreign(location, mark, context)
    if isinstance(root, Composite):
        raise _several(location, list(root.members))
    return _open_own(location, mark, root, context, known)


def open_names(location: Location, mark: Mark, context: Context) -> CompositeCheckpoint:
    """Open a checkpoint of several checkpointables, or one tree that the software which wrote it knows by a name.

    Raises:
        CompositeCheckpointError: if it is one tree.
        What `open_tree` does.
    """
    root = _root_of(location, mark)
    if isinstance(root, Composite):
        return CompositeCheckpoint.of_root(location, mark, root)
    if root is None and (found := _find_foreign_names(location, mark, context)) is not None:
        return found
    opened = open_tree(location, mark, context)
    raise CompositeCheckpointError(f"{opened.location.display} is one tree and has no names: use load")


def open_either(location: Location, mark: Mark, context: Context) -> Checkpoint | CompositeCheckpoint:
    """Open one tree or a composite. A single item of other software is a tree if it can be opened without its name.

    Raises:
        What `open_tree` does.
    """
    root = _root_of(location, mark)
    if isinstance(root, Composite):
        return CompositeCheckpoint.of_root(location, mark, root)
    if root is not None:
        return _open_own(location, mark, root, context, None)
    found = _find_foreign_names(location, mark, context)
    if found is None:
        return _open_foreign(location, mark, context)
    if len(found.members) != 1:
        return found
    try:
        return _open_tree(location, mark, context)
    except UncommittedCheckpointError:
        raise
    except (CheckpointNotFoundError, CompositeCheckpointError):
        return found


def open_files(location: Location, mark: Mark, context: Context) -> Checkpoint:
    """Open files that an object wrote: as a checkpoint of ours, or where there is none, every file that is there.

    Raises:
        CheckpointNotFoundError: if there is no file.
        What `open_tree` does.
    """
    if mark.root is not None:
        return open_tree(location, mark, context)
    _expect_no_root(location, mark)
    objects = {key: ObjectRecord(key, location.store.size(key)) for key in location.store.list()}
    if not objects:
        raise CheckpointNotFoundError(f"there is no file at {location.display}; check the path")
    store = ObjectReader(location.store, objects, runtime_of(context).io_threads, verify=context.io.verify, strict=True)
    tree = TreeMetadata(Node("dict", (), ()), ())
    return Checkpoint(location, mark, None, FilesLayout(), None, tree, store, Origin())


def _root_of(location: Location, mark: Mark, known: Known | None = None) -> Root | Composite | None:
    """The root of a checkpoint that is committed; None where there is none.

    Raises:
        InvalidLocationError, CorruptCheckpointError, UnsupportedVersionError: if it cannot be read.
        UncommittedCheckpointError: if the checkpoint is not committed.
    """
    data = mark.root
    root = None
    if isinstance(data, str):
        raise InvalidLocationError(data)
    if data is not None:
        root = (
            parse_root(location.store, data, location.display)
            if known is None
            else known.root(data, lambda: parse_root(location.store, data, location.display))
        )
    if isinstance(root, Claimed) or is_hidden_name(location.name):
        raise UncommittedCheckpointError(
            f"{location.display} holds a save that was not committed"
            + (f" (it began at {root.created})" if root is not None else "")
            + ": it is under way or died; load another checkpoint, or save here again"
        )
    if isinstance(root, PartialSave):
        raise _not_finalized(location, root)
    return root


def _open_own(location: Location, mark: Mark, root: Root, context: Context, known: Known | None) -> Checkpoint:
    """Open what ckptcore wrote."""
    if root.role == "member":
        _expect_committed(location, mark, root)
    data = mark.root

    def begin() -> tuple[Layout, IndexCache]:
        return _layout_of(root, context), IndexCache()

    layout, indexes = known.keep(data, root, begin) if known is not None and isinstance(data, bytes) else begin()
    store = ObjectReader(
        location.store, root.objects, runtime_of(context).io_threads, verify=context.io.verify, strict=True
    )
    copies = None
    if location.of_host:
        from ckptcore.loading.host_copies import find_copies  # only who has hosts needs it

        copies = find_copies(location, root, context)
    opened = Checkpoint(location, mark, root, layout, root.state, root.tree, store, copies=copies, indexes=indexes)
    if root.references:
        from ckptcore.loading.bases import with_bases  # only who refers to others needs it

        return with_bases(opened, root, context)
    return opened


def _layout_of(root: Root, context: Context) -> Layout:
    return FilesLayout() if root.layout == FilesLayout.name else runtime_of(context).registry.layout(root.layout)


def _not_finalized(location: Location, partial: PartialSave) -> UncommittedCheckpointError:
    return UncommittedCheckpointError(
        f"{location.display} is being filled by a partial save that is not finalized: it has {partial}"
        + ("" if partial.owner is None else ", and one that is under way or died")
        + ". Save what is missing with ckptcore.partial(...).save, then call ckptcore.partial(...).finalize; or remove it with ckptcore.delete"
    )


def _expect_committed(location: Location, mark: Mark, member: Root) -> None:
    """Do nothing if the composite that a member belongs to is committed.

    Where there is no composite around it, somebody copied the member out. It is whole by itself: its root was written after
    everything else of it.

    Raises:
        UncommittedCheckpointError
    """
    data = mark.around
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


def _open_foreign(location: Location, mark: Mark, context: Context) -> Checkpoint:
    """Open the tree that other software wrote.

    Raises:
        CompositeCheckpointError: if it has several names, and none stands for all of it.
        UncommittedCheckpointError: if sessions write there.
    """
    try:
        return _open_tree(location, mark, context)
    except UncommittedCheckpointError:
        raise
    except CheckpointNotFoundError:
        from ckptcore.commit.sessions import find_partial  # only where nothing else is there

        found = _find_foreign_names(location, mark, context)
        if found is not None:
            raise _several(location, list(found.members)) from None
        partial = find_partial(location)
        if partial is None:
            raise
        raise _not_finalized(location, partial) from None


def _several(location: Location, names: Sequence[str]) -> CompositeCheckpointError:
    return CompositeCheckpointError(
        f"{location.display} holds several checkpointables ({', '.join(names)}): use load_checkpointables, or load one "
        f"by its own location, such as {location.display.rstrip('/')}/{names[0] if names else 'NAME'}",
        names,
    )


def _open_tree(location: Location, mark: Mark, context: Context) -> Checkpoint:
    """Open the tree that other software wrote.

    Raises:
        CheckpointNotFoundError: if no layout finds one.
    """
    entry = location.name if mark.is_object else None
    storage = location.parent if entry is not None else location.store
    if entry is None and not mark.names:
        raise CheckpointNotFoundError(
            f"there is nothing at {location.display}; check the path, or list the directory above"
        )
    _expect_no_root(location, mark)
    store = ObjectReader(storage, {}, runtime_of(context).io_threads, verify=context.io.verify)
    layouts = runtime_of(context).registry.layouts()
    for layout in layouts:
        inspection = layout.inspect(store, entry)
        if inspection is not None:
            origin = Origin(inspection.writer, inspection.custom, inspection.metrics, inspection.created)
            return Checkpoint(location, mark, None, layout, inspection.state, inspection.tree, store, origin)
    if entry is None and holds_members(storage):
        raise _lost_root(location)
    if entry is None and (steps := StepNames().find([name[:-1] for name in mark.names if name[-1] == "/"])):
        raise CheckpointNotFoundError(_of_steps(location, steps))
    failed = "".join(
        f"; {name} cannot be used: {reason}" for name, reason in runtime_of(context).registry.failed_layouts().items()
    )
    raise CheckpointNotFoundError(
        f"{location.display} is no checkpoint that an installed layout reads (tried "
        f"{', '.join(layout.name for layout in layouts)}{failed}); check the path, or install the plugin of its format"
    )


def _of_steps(location: Location, steps: Mapping[int, str]) -> str:
    """What to do with a directory of steps: which one is meant is not guessed."""
    names = list(steps.values())
    told = ", ".join(names if len(names) <= _STEPS_TOLD else [names[0], "...", *names[1 - _STEPS_TOLD :]])
    within = location.display.rstrip("/")
    return (
        f"{location.display} is no checkpoint but, by the names in it, a directory of steps ({told}): load one by its own location, "
        f"such as {within}/{names[-1]}, or the newest with CheckpointReader({within!r}).load()"
    )


def _lost_root(location: Location) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{location.display} was a checkpoint of several checkpointables and has lost its {ROOT_KEY}; restore that from a copy, "
        "load another checkpoint, or copy a directory in it elsewhere to load that alone",
        key=ROOT_KEY,
    )


def foreign_checkpoints(context: Context) -> IsForeign:
    """Return a function that recognises checkpoints of other software, with the layouts of a Context."""
    return functools.partial(_is_foreign, context)


def _is_foreign(context: Context, location: Location) -> bool:
    store = ObjectReader(location.store, {}, runtime_of(context).io_threads, verify=context.io.verify)
    for layout in runtime_of(context).registry.layouts():
        try:
            found = layout.inspect(store, None) is not None
        except CompositeCheckpointError:
            found = True  # of several items
        except CheckpointError:
            return False  # unfinished or damaged: its extent is unknown
        if found:
            return not _has_single_files(layout, store)
    return False


def _has_single_files(layout: Layout, store: ObjectReader) -> bool:
    """Return whether a file in the directory is a checkpoint by itself, like ``model.safetensors``.

    Such a directory is the user's: it may have other files, such as a tokenizer or a configuration.
    """
    names = store.list_names("")
    if len(names) > _MOST_NAMES:
        return True  # a checkpoint of other software has few
    for name in [name for name in names if not name.endswith("/") and not name.startswith(".")]:
        try:
            if layout.inspect(store, name) is not None:
                return True
        except CheckpointError:
            continue  # no file of this layout
    return False
