"""Metadata of checkpoints: structure, layout and origin, without reading arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptcore.commit.location import AnyLocation
from ckptcore.commit.root import SaveOrder
from ckptcore.commit.root_json import with_order
from ckptcore.context import Context
from ckptcore.distributions import ShownInNotebooks
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    StorageError,
    UncommittedCheckpointError,
)
from ckptcore.events import Event, readable_events
from ckptcore.loading.stored_trees import abstract_tree, transformed
from ckptcore.model.metadata import ObjectRecord, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint
from ckptcore.opening.open_checkpoints import (
    ConsistentRead,
    MemberOpener,
    existing_members,
    is_deleted,
    member_opener,
    open_either,
    open_tree,
    tree_attempts,
)
from ckptcore.protocols import Transforms
from ckptcore.runtime import runtime_of


@dataclass(frozen=True, slots=True)
class TreeContents:
    """Contents of a checkpoint of one tree, without arrays. See the properties of `CheckpointMetadata`."""

    abstract: Any
    tree: TreeMetadata
    layout: str
    objects: Mapping[str, ObjectRecord]
    bases: tuple[str, ...] = ()
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_files: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointablesMetadata(Mapping[str, "CheckpointMetadata"]):
    """Metadata of each object of a checkpoint of several objects: a mapping by name.

    Objects that were deleted since the save are left out. If every process saved a separate state, the metadata is
    that of the first existing state.

    Attributes:
        members: the metadata by name.
        deleted: names of objects that were deleted.
        processes: by name, the number of processes that saved a separate state. Names that all processes saved together
            are left out.
        unreadable: by name, the reason why an object that other software wrote cannot be read: no installed layout
            reads it, or it is damaged. The other objects can be loaded by name.
    """

    members: Mapping[str, CheckpointMetadata] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    processes: Mapping[str, int] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> CheckpointMetadata:
        """Return the metadata of an object."""
        return self.members[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of the save."""
        return iter(self.members)

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.members)


@dataclass(frozen=True, slots=True)
class CheckpointMetadata(ShownInNotebooks):
    """Metadata of a checkpoint, without its arrays.

    A checkpoint has either one tree (`contents`) or several objects (`checkpointables`). One of other software, or its
    copy, has both if it has several objects and `ckptcore.load` loads one of them by default.

    Attributes:
        created: start of the save, ISO 8601 in UTC; None if other software wrote the checkpoint and does not state it.
        writer: the software that wrote it.
        custom: metadata of the user.
        save_id: id of the save; None for checkpoints of other software.
        metrics: measurements saved with the checkpoint.
        timeline: events of the save until its commit; empty for checkpoints of other software.
        contents: the tree; None if there are several objects.
        checkpointables: by name, the metadata of each object; empty for one tree.
        digest: ``sha256:`` and the SHA-256 of the root, `checkpoint.json`, in hexadecimal. The root has the checksums
            of all data files, so another save has another digest, and a copy has the same: the place of a save among
            others there, ``order``, is left out. For several objects: the SHA-256 of the root, followed by the digests
            of the objects. None for checkpoints of other software.
    """

    created: str | None
    writer: str
    custom: Mapping[str, JSON]
    save_id: str | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    timeline: Sequence[Event] = ()
    contents: TreeContents | None = None
    checkpointables: CheckpointablesMetadata = field(default_factory=CheckpointablesMetadata)
    digest: str | None = None

    @property
    def is_composite(self) -> bool:
        """True for several objects, which `ckptcore.load_checkpointables` loads by name."""
        return self.contents is None or bool(self.checkpointables or self.checkpointables.unreadable)

    @property
    def abstract(self) -> Any:
        """Abstract tree that can be passed to `ckptcore.load`: `AbstractArray` for arrays, and small values themselves.

        None for files that an object wrote: they load as bytes. For several objects, a dict of such trees by name.
        """
        if self.contents is not None:
            return self.contents.abstract
        return {name: one.abstract for name, one in self.checkpointables.items()}

    @property
    def tree(self) -> TreeMetadata:
        """Structure of the tree, and a record of each leaf. Raises CompositeCheckpointError for several objects."""
        return self._one("tree").tree

    @property
    def layout(self) -> str:
        """Name of the layout, or "files". Raises CompositeCheckpointError for several objects."""
        return self._one("layout").layout

    @property
    def is_files(self) -> bool:
        """True for files that an object wrote. Raises CompositeCheckpointError for several objects."""
        return self._one("is_files").is_files

    @property
    def objects(self) -> Mapping[str, ObjectRecord]:
        """Objects in the storage, by key. Raises CompositeCheckpointError for several objects."""
        return self._one("objects").objects

    @property
    def bases(self) -> tuple[str, ...]:
        """Relative paths of the bases that store arrays of this checkpoint; empty if it has no base."""
        return self._one("bases").bases

    @property
    def unused(self) -> Mapping[str, Sequence[str]]:
        """By object, the names of arrays that other software stored and does not load: its index names other copies,
        or does not name them. Raises CompositeCheckpointError for several objects.
        """
        return self._one("unused").unused

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and files. Counts tied arrays once. Of states saved per process, counts one."""
        if self.contents is None or self.is_composite:
            return sum([one.nbytes for one in self.checkpointables.values()])
        if self.contents.is_files:
            return sum([record.size for record in self.contents.objects.values()])
        return self.contents.tree.nbytes

    def _one(self, attribute: str) -> TreeContents:
        if self.contents is None:
            names = list(self.checkpointables)
            raise CompositeCheckpointError(
                f"this checkpoint has several checkpointables ({', '.join(names)}): use "
                f"metadata.checkpointables[{names[0] if names else 'NAME'!r}].{attribute}",
                names,
            )
        return self.contents


def describe_checkpoint(location: AnyLocation, context: Context) -> CheckpointMetadata:
    """Describe a checkpoint of one tree or of several objects. See `ckptcore.metadata`.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
    """
    return ConsistentRead(location, context, open_either).retry_if_replaced(
        lambda found: describe_found(found, context, member_opener(found, location, context))
    )


def describe_found(
    found: Checkpoint | CompositeCheckpoint, context: Context, open_one: MemberOpener
) -> CheckpointMetadata:
    """Describe an open checkpoint of one tree or of several objects.

    Args:
        found: the checkpoint.
        context: options.
        open_one: opens one of several objects.

    Raises:
        Errors of `describe_checkpoint`.
    """
    if isinstance(found, Checkpoint):
        return describe_opened(found, context)
    return _describe_composite(found, context, open_one)


def describe_tree(location: AnyLocation, context: Context, transforms: Transforms = ()) -> CheckpointMetadata:
    """Describe a checkpoint of one tree, or the tree that `ckptcore.load` loads.

    Raises:
        CompositeCheckpointError: it has several objects, and `ckptcore.load` loads none of them.
        Errors of `describe_checkpoint`.
    """
    return tree_attempts(location, context).retry_if_replaced(
        lambda opened: describe_opened(transformed(opened, transforms, context), context)
    )


def describe_opened(opened: Checkpoint, context: Context) -> CheckpointMetadata:
    """Describe an open tree. Reads nothing."""
    root = opened.root
    contents = TreeContents(
        abstract=None if opened.is_files else abstract_tree(opened.tree, runtime_of(context).registry),
        tree=opened.tree,
        layout="files" if opened.is_files else opened.layout.name,
        objects=opened.objects,
        bases=tuple(dict.fromkeys([base.path for base in root.references.bases])) if root else (),
        unused=opened.origin.unused,
        is_files=opened.is_files,
    )
    return _metadata(opened, contents, CheckpointablesMetadata())


def _metadata(
    found: Checkpoint | CompositeCheckpoint, contents: TreeContents | None, checkpointables: CheckpointablesMetadata
) -> CheckpointMetadata:
    root, origin = found.root, found.origin
    timeline = None if root is None else root.timeline
    return CheckpointMetadata(
        created=origin.created,
        writer=origin.writer,
        custom=origin.custom,
        save_id=None if root is None else root.save_id,
        metrics=origin.metrics,
        timeline=() if timeline is None else readable_events(timeline, location=found.location.display),
        contents=contents,
        checkpointables=checkpointables,
        digest=_digest(found, checkpointables),
    )


def _digest(found: Checkpoint | CompositeCheckpoint, checkpointables: CheckpointablesMetadata) -> str | None:
    data = found.version.root
    if found.root is None or not isinstance(data, bytes):
        return None
    if b'"order":' in data:
        data = with_order(data, SaveOrder())
    members = "".join([one.digest or "" for one in checkpointables.values()])
    return f"sha256:{hashlib.sha256(data + members.encode()).hexdigest()}"


def _describe_composite(composite: CompositeCheckpoint, context: Context, open_one: MemberOpener) -> CheckpointMetadata:
    root, members = composite.root, composite.members
    found: dict[str, CheckpointMetadata] = {}
    unreadable: dict[str, str] = {}
    for name, directories in existing_members(composite):
        try:
            described = _describe_first(composite, name, directories, context, open_one)
        except StorageError:
            raise
        except CheckpointError as error:
            if root is not None:
                raise
            unreadable[name] = str(error)
            continue
        if described is not None:
            found[name] = described
    checkpointables = CheckpointablesMetadata(
        members=found,
        deleted=tuple([name for name in members if name not in found and name not in unreadable]),
        processes={name: member.processes for name, member in members.items() if member.processes is not None},
        unreadable=unreadable,
    )
    contents = None if root is not None and root.default is None else _contents_to_load(composite, context)
    return _metadata(composite, contents, checkpointables)


def _contents_to_load(composite: CompositeCheckpoint, context: Context) -> TreeContents | None:
    """Return the tree that `ckptcore.load` loads from a composite without a name; None if it loads none."""
    try:
        opened = open_tree(composite.location, composite.version, context)
    except UncommittedCheckpointError:
        raise
    except CheckpointError:
        return None
    return describe_opened(opened, context).contents


def _describe_first(
    composite: CompositeCheckpoint, name: str, directories: Iterable[str], context: Context, open_one: MemberOpener
) -> CheckpointMetadata | None:
    """Describe the checkpoint in the first of the directories that still exists; None if all were deleted."""
    for directory in directories:
        try:
            opened = open_one(name, directory)
        except CheckpointNotFoundError:
            if is_deleted(composite, directory):  # deleted since it was reached
                continue
            raise
        return describe_opened(opened, context)
    return None
