"""Metadata of checkpoints: structure, layout and origin, without reading arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
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
from ckptcore.inspection.completeness import open_members
from ckptcore.loading.abstract_trees import abstract_tree
from ckptcore.loading.load import transformed
from ckptcore.model.metadata import ObjectRecord, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint
from ckptcore.opening.members import MemberOpener, existing_members, is_deleted, member_opener
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either, open_tree, tree_attempts
from ckptcore.protocols import Transforms
from ckptcore.records import dataclass
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

    Objects that were deleted or lost since the save are left out. If every process saved a separate state, the metadata
    is that of the first existing state.

    Attributes:
        members: the metadata by name.
        deleted: names of objects that were deleted or lost.
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

    A checkpoint has either one tree (`contents`) or several objects (`checkpointables`). A checkpoint of other
    software, or a copy of it, has both if it has several objects and `ckptcore.load` loads one of them by default.

    Attributes:
        created: start of the save, ISO 8601 in UTC; None if other software wrote the checkpoint without a time.
        writer: the software that wrote it.
        custom: metadata of the user.
        save_id: id of the save; None for checkpoints of other software.
        metrics: measurements saved with the checkpoint.
        timeline: events of the save until its commit; empty for checkpoints of other software.
        contents: the tree; None if there are several objects, and `ckptcore.load` loads none of them by default.
        checkpointables: by name, the metadata of each object; empty for one tree.
        digest: ``sha256:`` and the SHA-256 of the root, `checkpoint.json`, in hexadecimal. The root has the checksums
            of all data files, so each save has its own digest, and a copy has the digest of its original. The field
            ``order``, the place of a save among other saves, is left out. For several objects: the SHA-256 of the
            root, followed by the digests of the objects. None for checkpoints of other software.
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
        return {name: metadata.abstract for name, metadata in self.checkpointables.items()}

    @property
    def tree(self) -> TreeMetadata:
        """Structure of the tree, and a record of each leaf. Raises CompositeCheckpointError for several objects."""
        return self._contents_for("tree").tree

    @property
    def layout(self) -> str:
        """Name of the layout, or "files". Raises CompositeCheckpointError for several objects."""
        return self._contents_for("layout").layout

    @property
    def is_files(self) -> bool:
        """True for files that an object wrote. Raises CompositeCheckpointError for several objects."""
        return self._contents_for("is_files").is_files

    @property
    def objects(self) -> Mapping[str, ObjectRecord]:
        """Objects in the storage, by key. Raises CompositeCheckpointError for several objects."""
        return self._contents_for("objects").objects

    @property
    def bases(self) -> tuple[str, ...]:
        """Relative paths of the bases that store arrays of this checkpoint; empty if it has no base."""
        return self._contents_for("bases").bases

    @property
    def unused(self) -> Mapping[str, Sequence[str]]:
        """By object, the names of stored arrays that the other software does not load.

        The index of the checkpoint names other copies of the arrays, or does not name them. Raises
        CompositeCheckpointError for several objects.
        """
        return self._contents_for("unused").unused

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and files. Counts tied arrays once, and only one of the separate states of processes."""
        if self.contents is None or self.is_composite:
            return sum([metadata.nbytes for metadata in self.checkpointables.values()])
        if self.contents.is_files:
            return sum([record.size for record in self.contents.objects.values()])
        return self.contents.tree.nbytes

    def _contents_for(self, attribute: str) -> TreeContents:
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
        lambda checkpoint: describe_either(checkpoint, context, member_opener(checkpoint, location, context))
    )


def describe_either(
    checkpoint: Checkpoint | CompositeCheckpoint, context: Context, open_one: MemberOpener
) -> CheckpointMetadata:
    """Describe an open checkpoint of one tree or of several objects.

    Args:
        checkpoint: the checkpoint.
        context: options.
        open_one: opens an object of a composite.

    Raises:
        Errors of `describe_checkpoint`.
    """
    if isinstance(checkpoint, Checkpoint):
        return describe_opened(checkpoint, context)
    return _describe_composite(checkpoint, context, open_one)


def describe_tree_at(location: AnyLocation, context: Context, transforms: Transforms = ()) -> CheckpointMetadata:
    """Describe a checkpoint of one tree. For several objects, describe the tree that `ckptcore.load` loads.

    Raises:
        CompositeCheckpointError: it has several objects, and `ckptcore.load` loads none of them.
        Errors of `describe_checkpoint`.
    """
    return tree_attempts(location, context).retry_if_replaced(
        lambda checkpoint: describe_opened(transformed(checkpoint, transforms, context), context)
    )


def describe_opened(checkpoint: Checkpoint, context: Context) -> CheckpointMetadata:
    """Describe an open tree. Reads nothing."""
    root = checkpoint.root
    contents = TreeContents(
        abstract=None if checkpoint.is_files else abstract_tree(checkpoint.tree, runtime_of(context).registry),
        tree=checkpoint.tree,
        layout="files" if checkpoint.is_files else checkpoint.layout.name,
        objects=checkpoint.objects,
        bases=tuple(dict.fromkeys([base.path for base in root.references.bases])) if root else (),
        unused=checkpoint.origin.unused,
        is_files=checkpoint.is_files,
    )
    return _metadata(checkpoint, contents, CheckpointablesMetadata())


def _metadata(
    checkpoint: Checkpoint | CompositeCheckpoint,
    contents: TreeContents | None,
    checkpointables: CheckpointablesMetadata,
) -> CheckpointMetadata:
    root, origin = checkpoint.root, checkpoint.origin
    timeline = None if root is None else root.timeline
    return CheckpointMetadata(
        created=origin.created,
        writer=origin.writer,
        custom=origin.custom,
        save_id=None if root is None else root.save_id,
        metrics=origin.metrics,
        timeline=() if timeline is None else readable_events(timeline, location=checkpoint.location.display),
        contents=contents,
        checkpointables=checkpointables,
        digest=_digest(checkpoint, checkpointables),
    )


def _digest(checkpoint: Checkpoint | CompositeCheckpoint, checkpointables: CheckpointablesMetadata) -> str | None:
    data = checkpoint.version.root
    if checkpoint.root is None or not isinstance(data, bytes):
        return None
    if b'"order":' in data:
        data = with_order(data, SaveOrder())
    members = "".join([metadata.digest or "" for metadata in checkpointables.values()])
    return f"sha256:{hashlib.sha256(data + members.encode()).hexdigest()}"


def _describe_composite(composite: CompositeCheckpoint, context: Context, open_one: MemberOpener) -> CheckpointMetadata:
    root, members = composite.root, composite.members
    described: dict[str, CheckpointMetadata] = {}
    unreadable: dict[str, str] = {}
    for name, directories in existing_members(composite):
        for directory, member in open_members({name: directories}, open_one):
            if isinstance(member, CheckpointNotFoundError) and is_deleted(composite, directory):
                continue  # it was deleted after the iterator reached it
            try:
                if isinstance(member, CheckpointError):
                    raise member
                described[name] = describe_opened(member, context)
            except CheckpointError as error:
                if root is not None or isinstance(error, StorageError):
                    raise
                unreadable[name] = str(error)
            break
    checkpointables = CheckpointablesMetadata(
        members=described,
        deleted=tuple([name for name in members if name not in described and name not in unreadable]),
        processes={name: member.processes for name, member in members.items() if member.processes is not None},
        unreadable=unreadable,
    )
    contents = None if root is not None and root.default is None else _contents_to_load(composite, context)
    return _metadata(composite, contents, checkpointables)


def _contents_to_load(composite: CompositeCheckpoint, context: Context) -> TreeContents | None:
    """Return the tree that `ckptcore.load` loads from a composite if no name is given; None if it loads none."""
    try:
        checkpoint = open_tree(composite.location, composite.version, context)
    except UncommittedCheckpointError:
        raise
    except CheckpointError:
        return None
    return describe_opened(checkpoint, context).contents
