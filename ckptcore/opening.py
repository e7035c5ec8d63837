"""Opening a checkpoint to read it: ours by its root, any other by asking every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from ckptcore.builtin.files_layout import FilesLayout
from ckptcore.builtin.keys import check_key
from ckptcore.context import Context
from ckptcore.directory_claims import is_hidden_name
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
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.transfer import ReadPlan
from ckptcore.model.tree import JSON, Node, format_path
from ckptcore.occupants import holds_members, parse_root, root_bytes
from ckptcore.protocols import InspectedComposite, InspectsComposites, Layout, StorageBackend
from ckptcore.root import ROOT_KEY, Claimed, Composite, Member, Root
from ckptcore.step_names import StepNames

if TYPE_CHECKING:
    from ckptcore.host_copies import HostCopies

__all__ = [
    "ATTEMPTS",
    "Opened",
    "OpenedComposite",
    "Source",
    "Tries",
    "arrays_at",
    "check_file",
    "file_pieces",
    "find_composite",
    "find_names",
    "naming_arrays",
    "open_checkpoint",
    "open_files",
    "open_resolved",
    "replaced_too_often",
    "root_mark",
    "while_unchanged",
]

T = TypeVar("T")

ATTEMPTS: Final = 20
"""How often a checkpoint that is replaced while it is read is read again."""
"""How often a load begins again because the checkpoint was replaced under it."""
_PIECE_BYTES: Final = 1 << 24

_STEPS_TOLD: Final = 10

_HEAD_BYTES: Final = 1 << 12
"""In so many bytes a root says whether it is one of a member."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint that can be read.

    Attributes:
        location: where it is.
        root: its root; None where other software wrote it.
        layout, state: how its arrays lie in its objects.
        tree: what is in it.
        objects: what is known of its objects; nothing where other software wrote it.
        store: to read its objects from.
        writer: who wrote it.
        custom: metadata of the user's.
        metrics: measurements that were given with it.
        created: when it was saved, ISO 8601 in UTC; None where other software wrote it and does not say.
        copies: what this host has copies of, where hosts have disks of their own.
    """

    location: Location
    root: Root | None
    layout: Layout
    state: JSON
    tree: TreeMetadata
    objects: Mapping[str, ObjectRecord]
    store: ObjectReader
    writer: str
    custom: Mapping[str, JSON]
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str | None = None
    copies: HostCopies | None = None

    def __str__(self) -> str:
        return self.location.display

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
        """Fill buffers with the boxes of a plan of this checkpoint; yields the number of each as it is there, as `Layout.read` does."""

        def read_whole(plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
            return self.layout.read(plan, buffers, self.store)

        return read_whole(plan, buffers) if self.copies is None else self.copies.read(plan, buffers, read_whole)


Source: TypeAlias = Place | Opened
"""What can be read: a place, or a checkpoint that is open already."""


@dataclass(frozen=True, slots=True)
class OpenedComposite:
    """A checkpoint of several checkpointables.

    Attributes:
        location: where it is.
        data: the bytes of its root, which no two saves share; None where other software wrote it.
        root: its root; None where other software wrote it.
        members: what is in it, by name; what was deleted since is still listed.
        writer, custom, metrics, created: as of an `Opened`.
    """

    location: Location
    data: bytes | None
    root: Composite | None
    members: Mapping[str, Member]
    writer: str
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str | None = None

    @classmethod
    def of_root(cls, location: Location, data: bytes, root: Composite) -> OpenedComposite:
        """One of ours."""
        return cls(location, data, root, root.members, _writer(root), root.custom, root.metrics, root.created)


def _writer(root: Root | Composite) -> str:
    return " ".join(f"{name} {version}" for name, version in root.writer.items())


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
    return _open(location, root_bytes(location.store), context)


def open_files(location: Place, context: Context) -> Opened:
    """Open files that an object wrote: as a checkpoint of ours, or where there is none, every file that is there.

    Raises:
        CheckpointNotFoundError: if there is no file.
        What `open_checkpoint` does.
    """
    resolved = _resolve(location, context)
    data = root_bytes(resolved.store)
    if data is not None:
        return _open(resolved, data, context)
    objects = {key: ObjectRecord(key, resolved.store.size(key)) for key in resolved.store.list()}
    if not objects:
        raise CheckpointNotFoundError(f"there is no file at {resolved.display}; check the path")
    store = ObjectReader(resolved.store, objects, context.io_threads, verify=context.verify, strict=True)
    tree = TreeMetadata(Node("dict", (), ()), ())
    return Opened(resolved, None, FilesLayout(), None, tree, objects, store, "", {})


def while_unchanged(location: Source, context: Context, attempt: Callable[[Opened], T]) -> T:
    """Open and read a checkpoint; begin again if it was replaced meanwhile, so that the result is of one save.

    One that is open already is read as it was opened: who opened it looks whether it was replaced.

    Raises:
        What `open_checkpoint` and `attempt` do, with errors about bytes naming the arrays that lie there.
    """
    tries = Tries(location, context)
    while True:
        opened = tries.open()
        if opened is None:
            continue
        try:
            with naming_arrays(opened):
                made = attempt(opened)
        except CheckpointError:
            if tries.stands():
                raise
            continue
        if tries.is_unchanged():
            return made


class Tries:
    """Tries to read a checkpoint, each of which opens it, until it was not replaced from its opening to its end.

    What is open already is opened once, as it is, and taken to stand.
    """

    def __init__(self, location: Source, context: Context) -> None:
        """Open nothing yet."""
        self._location = location
        self._context = context
        self._left = ATTEMPTS
        self._failed_at: tuple[object, object] | None = None
        self._now: tuple[Opened, bytes | None] | None = None

    def open(self) -> Opened | None:
        """Begin a try; None where it was exchanged as it was opened, so that another one is to begin.

        Raises:
            CorruptCheckpointError: also if it was replaced too often.
            What `open_checkpoint` does.
        """
        if isinstance(self._location, Opened):
            return self._location
        if not self._left:
            raise replaced_too_often(self._location)
        self._left -= 1
        # Opened anew each time: a storage may keep objects open by name.
        resolved = _resolve(self._location, self._context)
        self._now = None
        try:
            before = root_bytes(resolved.store)
            self._now = _open(resolved, before, self._context), before
        except (CorruptCheckpointError, CheckpointNotFoundError, InvalidLocationError, ObjectNotFoundError):
            # A member is not of the composite around it while that is exchanged: who finds the same twice has found it.
            now = root_mark(resolved.store), root_mark(resolved.parent)
            if now in ((None, None), self._failed_at):
                raise
            self._failed_at = now
            return None
        return self._now[0]

    def stands(self) -> bool:
        """Whether what was opened last is there still, so that an error about it is one of the checkpoint."""
        return self._now is None or _still_stands(*self._now)

    def is_unchanged(self) -> bool:
        """Whether what was opened last is there still, so that what was read is of one save."""
        return self._now is None or root_mark(self._now[0].location.store) == self._now[1]

    @property
    def root(self) -> bytes | None:
        """The bytes of the root of what was opened last; None where it has none, or was open already."""
        return None if self._now is None else self._now[1]


def root_mark(store: StorageBackend) -> bytes | str | None:
    """What changes when a checkpoint is replaced: the bytes of its root, or in words why there is none that can be read."""
    try:
        return root_bytes(store)
    except InvalidLocationError as error:
        return str(error)


def _still_stands(opened: Opened, before: bytes | None) -> bool:
    """Whether a checkpoint, and the composite that it is a member of, are those that were opened."""
    if root_mark(opened.location.store) != before:
        return False
    if opened.root is not None and opened.root.member:
        try:
            _expect_committed(opened.location, opened.root)
        except CheckpointError:
            return False
    return True


def replaced_too_often(location: Place) -> CorruptCheckpointError:
    """What is raised where every one of `ATTEMPTS` was overtaken."""
    return CorruptCheckpointError(
        f"{location} was replaced {ATTEMPTS} times while it was read; load it when it is saved less often"
    )


def _resolve(location: Place, context: Context) -> Location:
    return resolve_location(location, context.registry, durable=False, config=context.storage)


def _open(resolved: Location, data: bytes | None, context: Context) -> Opened:
    """Open the checkpoint that these bytes are the root of; a foreign one where there are none."""
    root = None if data is None else parse_root(resolved.store, data)
    if isinstance(root, Claimed) or is_hidden_name(resolved.name):
        raise UncommittedCheckpointError(
            f"{resolved.display} holds a save that was not committed"
            + (f" (it began at {root.created})" if root is not None else "")
            + ": it is under way or died; load another checkpoint, or save here again"
        )
    if root is None:
        return _open_foreign(resolved, context)
    if isinstance(root, Composite):
        raise _several(resolved, list(root.members))
    if root.member:
        _expect_committed(resolved, root)
    layout = FilesLayout() if root.layout == FilesLayout.name else context.registry.layout(root.layout)
    store = ObjectReader(resolved.store, root.objects, context.io_threads, verify=context.verify, strict=True)
    copies = None
    if resolved.of_host:
        from ckptcore.host_copies import find_copies  # only who has hosts needs it

        copies = find_copies(resolved, root, context)
    return Opened(
        resolved, root, layout, root.state, root.tree, root.objects, store, _writer(root), root.custom, root.metrics, root.created,
        copies,
    )  # fmt: skip


def _expect_committed(resolved: Location, member: Root) -> None:
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


@contextmanager
def naming_arrays(opened: Opened) -> Iterator[None]:
    """Let an error about a range of bytes say which arrays lie there."""
    try:
        yield
    except CorruptCheckpointError as error:
        affected = arrays_at(opened, error.key, error.start, error.stop)
        if not affected:
            raise
        named = ", ".join(affected[:5]) + (f" and {len(affected) - 5} more" if len(affected) > 5 else "")
        raise type(error)(
            f"{opened.location.display}: {error} (this is in {named})",
            key=error.key,
            start=error.start,
            stop=error.stop,
        ) from error
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(
            f"{opened.location.display} lacks an object that it is made of: {error}"
        ) from error


def arrays_at(opened: Opened, key: str | None, start: int | None, stop: int | None) -> list[str]:
    """The paths of the arrays that have bytes in a range of an object."""
    if key is None:
        return []
    return [
        format_path(opened.tree.paths[leaf])
        for leaf, own, first, last in opened.layout.extents(opened.tree, opened.state)
        if own == key and (start is None or stop is None or (first < stop and start < last))
    ]


def check_file(opened: Opened, record: ObjectRecord) -> None:
    """Refuse a file that has not as many bytes as were written. A hostile root may state any number.

    Raises:
        CorruptCheckpointError
    """
    there = opened.location.store.size(record.key)
    if there != record.size:
        raise CorruptCheckpointError(
            f"{record.key} in {opened.location.display} has {there} bytes, where {record.size} were written; load another "
            "checkpoint",
            key=record.key, start=min(there, record.size), stop=max(there, record.size),
        )  # fmt: skip


def file_pieces(opened: Opened, record: ObjectRecord) -> Iterator[bytes]:
    """The bytes of a file, verified, a few MiB at a time.

    Raises:
        CorruptCheckpointError: also if it is shorter or longer than it was written.
    """
    check_file(opened, record)
    for start in range(0, record.size, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, record.size)
        data = opened.store.get(record.key, start, stop)
        if len(data) != stop - start:
            raise CorruptCheckpointError(
                f"{record.key} ends at byte {start + len(data)}, where {record.size} were written",
                key=record.key, start=start + len(data), stop=record.size,
            )  # fmt: skip
        yield data
