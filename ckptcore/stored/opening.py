"""Opening a checkpoint to read it: ours by its root, any other by asking every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ckptcore.builtin.files_layout import FilesLayout
from ckptcore.builtin.keys import check_key
from ckptcore.commits.hidden_names import is_hidden_name
from ckptcore.commits.occupants import holds_members, parse_root, root_bytes
from ckptcore.context import Context
from ckptcore.engine.reader import ObjectReader
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    UncommittedCheckpointError,
)
from ckptcore.locations import Location, Place, resolve_location
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.tree import Node
from ckptcore.protocols import InspectedComposite, InspectsComposites, Layout, StorageBackend
from ckptcore.roots.root import ROOT_KEY, Claimed, Composite, Member, PartialSave, Root
from ckptcore.step_names import StepNames
from ckptcore.stored.opened import Opened, OpenedComposite

if TYPE_CHECKING:
    from ckptcore.roots.known_roots import KnownRoots

__all__ = [
    "ATTEMPTS",
    "expect_committed",
    "find_composite",
    "find_names",
    "open_checkpoint",
    "open_files",
    "open_resolved",
    "open_root",
    "replaced_too_often",
    "root_mark",
]

ATTEMPTS: Final = 20
"""How often a checkpoint that is replaced while it is read is read again."""

_STEPS_TOLD: Final = 10

_HEAD_BYTES: Final = 1 << 12
"""In so many bytes a root says whether it is one of a member."""


def find_composite(location: Place, context: Context) -> OpenedComposite | None:
    """The checkpoint of several checkpointables at a location; None if what is there is none, or nothing is.

    What other software wrote is none if it has one name only and is opened as a tree without it.

    Raises:
        CorruptCheckpointError: if its root cannot be read.
    """
    found = find_names(location, context)
    if found is None or found.root is not None or len(found.members) != 1:
        return found
    return None if _is_tree(found.location, context) else found


def find_names(location: Place, context: Context) -> OpenedComposite | None:
    """What has names at a location: also one tree that the software which wrote it knows by a name.

    Raises:
        What `find_composite` does.
    """
    refused = None
    for attempt in range(ATTEMPTS):
        resolved = _resolve(location, context)
        try:
            data = root_bytes(resolved.store)
        except InvalidLocationError as error:
            # A directory that was exchanged as its root was opened looks like a link that leads out of it.
            if str(error) == refused:
                raise
            refused = str(error)
            continue
        if is_hidden_name(resolved.name):
            return None
        if data is None:
            try:
                found = _find_foreign_names(resolved, context)
            except CheckpointError:
                if attempt + 1 == ATTEMPTS or root_mark(resolved.store) is None:
                    raise
                continue
            if found is not None or root_mark(resolved.store) is None:
                return found
            continue  # a save has committed meanwhile
        try:
            root = parse_root(resolved.store, data)
        except CheckpointError:
            # A part of the root is gone with a checkpoint that was replaced since.
            if attempt + 1 < ATTEMPTS and root_mark(resolved.store) != data:
                continue
            raise
        return OpenedComposite.of_root(resolved, data, root) if isinstance(root, Composite) else None
    raise replaced_too_often(location)


def _find_foreign_names(location: Location, context: Context) -> OpenedComposite | None:
    """Ask every layout that knows checkpoints of several checkpointables.

    Raises:
        CorruptCheckpointError: also if a name is none that a directory can have, or it was written by ckptcore and lost its root.
    """
    layouts = [layout for layout in context.registry.layouts() if isinstance(layout, InspectsComposites)]
    if not layouts or location.is_object:
        return None
    store = ObjectReader(location.store, {}, context.io_threads, verify=context.verify)
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
    return OpenedComposite(location, None, None, members, found.writer, found.custom, found.metrics, found.created)


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
        head = location.store.get(f"{name}/{ROOT_KEY}", 0, _HEAD_BYTES)
    except ObjectNotFoundError:
        return
    if b'"member":true' in head:
        raise _lost_root(location)


def _is_tree(location: Location, context: Context) -> bool:
    try:
        _open_tree(location, context)
    except UncommittedCheckpointError:
        raise
    except (CheckpointNotFoundError, CompositeCheckpointError):
        return False
    return True


def open_checkpoint(location: Place, context: Context) -> Opened:
    """Open the checkpoint at a location.

    Raises:
        CheckpointNotFoundError: if there is nothing that any installed layout reads.
        UncommittedCheckpointError: if a save began there and never committed.
        CorruptCheckpointError: if it cannot be read.
    """
    return open_resolved(_resolve(location, context), context)


def open_resolved(location: Location, context: Context) -> Opened:
    """Open the checkpoint at a location whose storage is open.

    Raises:
        What `open_checkpoint` does.
    """
    return open_root(location, root_bytes(location.store), context)


def open_files(location: Place, context: Context) -> Opened:
    """Open files that an object wrote: as a checkpoint of ours, or where there is none, every file that is there.

    Raises:
        CheckpointNotFoundError: if there is no file.
        What `open_checkpoint` does.
    """
    resolved = _resolve(location, context)
    data = root_bytes(resolved.store)
    if data is not None:
        return open_root(resolved, data, context)
    objects = {key: ObjectRecord(key, resolved.store.size(key)) for key in resolved.store.list()}
    if not objects:
        raise CheckpointNotFoundError(f"there is no file at {resolved.display}; check the path")
    store = ObjectReader(resolved.store, objects, context.io_threads, verify=context.verify, strict=True)
    tree = TreeMetadata(Node("dict", (), ()), ())
    return Opened(resolved, None, FilesLayout(), None, tree, objects, store, "", {})


def root_mark(store: StorageBackend) -> bytes | str | None:
    """What changes when a checkpoint is replaced: the bytes of its root, or in words why there is none that can be read."""
    try:
        return root_bytes(store)
    except InvalidLocationError as error:
        return str(error)


def replaced_too_often(location: Place) -> CorruptCheckpointError:
    """What is raised where every one of `ATTEMPTS` was overtaken."""
    return CorruptCheckpointError(
        f"{location} was replaced {ATTEMPTS} times while it was read; load it when it is saved less often"
    )


def _resolve(location: Place, context: Context) -> Location:
    return resolve_location(location, context.registry, durable=False, config=context.storage)


def open_root(resolved: Location, data: bytes | None, context: Context, known: KnownRoots | None = None) -> Opened:
    """Open the checkpoint that these bytes are the root of; a foreign one where there are none.

    Args:
        resolved: where it is.
        data: the bytes of its root.
        context: how it is read.
        known: roots that need not be parsed again, for who gives out nothing of them that could be changed; None: it is parsed.

    Raises:
        What `open_checkpoint` does.
    """
    root = None
    if data is not None:
        root = (
            parse_root(resolved.store, data)
            if known is None
            else known.root(data, lambda: parse_root(resolved.store, data))
        )
    if isinstance(root, Claimed) or is_hidden_name(resolved.name):
        raise UncommittedCheckpointError(
            f"{resolved.display} holds a save that was not committed"
            + (f" (it began at {root.created})" if root is not None else "")
            + ": it is under way or died; load another checkpoint, or save here again"
        )
    if isinstance(root, PartialSave):
        raise _not_finalized(resolved, root)
    if root is None:
        try:
            return _open_foreign(resolved, context)
        except CheckpointNotFoundError:
            from ckptcore.commits.session_claims import find_partial  # only where nothing else is there

            partial = find_partial(resolved)
            if partial is None:
                raise
            raise _not_finalized(resolved, partial) from None
    if isinstance(root, Composite):
        raise _several(resolved, list(root.members))
    if root.member:
        expect_committed(resolved, root)
    layout = (
        _layout_of(root, context)
        if known is None or data is None
        else known.layout(data, root, lambda: _layout_of(root, context))
    )
    store = ObjectReader(resolved.store, root.objects, context.io_threads, verify=context.verify, strict=True)
    copies = None
    if resolved.of_host:
        from ckptcore.stored.host_copies import find_copies  # only who has hosts needs it

        copies = find_copies(resolved, root, context)
    opened = Opened.of_root(resolved, root, layout, store, copies)
    if root.references:
        from ckptcore.stored.bases import with_bases  # only who refers to others needs it

        return with_bases(opened, root, context)
    return opened


def _layout_of(root: Root, context: Context) -> Layout:
    return FilesLayout() if root.layout == FilesLayout.name else context.registry.layout(root.layout)


def _not_finalized(location: Location, partial: PartialSave) -> UncommittedCheckpointError:
    return UncommittedCheckpointError(
        f"{location.display} is being filled by a partial save that is not finalized: it has {partial}"
        + ("" if partial.owner is None else ", and one that is under way or died")
        + ". Save what is missing with ckptcore.save_partial, then call ckptcore.finalize; or remove it with ckptcore.delete"
    )


def expect_committed(resolved: Location, member: Root) -> None:
    """Do nothing if the composite that a member belongs to is committed.

    Where there is no composite around it, somebody copied the member out. It is whole by itself: its root was written after
    everything else of it.

    Raises:
        UncommittedCheckpointError
    """
    data = root_bytes(resolved.parent)
    hidden = is_hidden_name(resolved.parent_name)
    if data is None and not hidden:
        return
    around = None if data is None else parse_root(resolved.parent, data)
    if hidden or not isinstance(around, Composite) or around.save_id != member.save_id:
        raise UncommittedCheckpointError(
            f"{resolved.display} belongs to a checkpoint of several checkpointables that was not committed, or was replaced "
            "meanwhile; load another checkpoint, or save again"
        )


def _open_foreign(location: Location, context: Context) -> Opened:
    """Open what other software wrote.

    Raises:
        CompositeCheckpointError: if it has several names, and none stands for all of it.
    """
    try:
        return _open_tree(location, context)
    except UncommittedCheckpointError:
        raise
    except CheckpointNotFoundError:
        found = _find_foreign_names(location, context)
        if found is None:
            raise
        raise _several(location, list(found.members)) from None


def _several(location: Location, names: Sequence[str]) -> CompositeCheckpointError:
    return CompositeCheckpointError(
        f"{location.display} holds several checkpointables ({', '.join(names)}): use load_checkpointables, or load one "
        f"by its own location, such as {location.display.rstrip('/')}/{names[0] if names else 'NAME'}",
        names,
    )


def _open_tree(location: Location, context: Context) -> Opened:
    """Open the tree that other software wrote.

    Raises:
        CheckpointNotFoundError: if no layout finds one.
    """
    entry = location.name if location.is_object else None
    storage = location.parent if entry is not None else location.store
    if entry is None and not storage.list_names():
        raise CheckpointNotFoundError(
            f"there is nothing at {location.display}; check the path, or list the directory above"
        )
    store = ObjectReader(storage, {}, context.io_threads, verify=context.verify)
    layouts = context.registry.layouts()
    for layout in layouts:
        inspection = layout.inspect(store, entry)
        if inspection is not None:
            return Opened(
                location,
                None,
                layout,
                inspection.state,
                inspection.tree,
                {},
                store,
                inspection.writer,
                inspection.custom,
                inspection.metrics,
                inspection.created,
            )
    if entry is None and holds_members(storage):
        raise _lost_root(location)
    if entry is None and (steps := StepNames().find([name[:-1] for name in storage.list_names() if name[-1] == "/"])):
        raise CheckpointNotFoundError(_of_steps(location, steps))
    failed = "".join(f"; {name} cannot be used: {reason}" for name, reason in context.registry.failed_layouts().items())
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
