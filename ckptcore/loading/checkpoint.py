"""Open checkpoints of one tree or of several checkpointables, and errors that name their arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import xxhash

from ckptcore.builtin.files import FilesLayout
from ckptcore.commit.location import AnyLocation, Location
from ckptcore.commit.root import Composite, Member, Root
from ckptcore.commit.target import LocationVersion
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.io.reader import ObjectReader
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.transfer import ReadPlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.protocols import ChunkIndex, Layout, ReadBoxes, ReadThrough, StorageBackend
from ckptcore.runtime import runtime_of

if TYPE_CHECKING:
    from ckptcore.loading.derived import Derived

__all__ = [
    "Checkpoint",
    "CompositeCheckpoint",
    "Origin",
    "Source",
    "arrays_at",
    "check_file",
    "extents_of",
    "file_pieces",
    "naming_arrays",
    "naming_further",
    "reader_of",
    "replaced_beside",
    "stored_format",
]

_PIECE_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Origin:
    """Statements of a checkpoint about itself.

    Attributes:
        writer: the software that wrote it, in words.
        custom: metadata of the user.
        metrics: measurements saved with it.
        created: when the save began, ISO 8601 in UTC; None if other software wrote it and does not say.
    """

    writer: str = ""
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str | None = None

    @classmethod
    def of_root(cls, root: Root | Composite) -> Origin:
        """Return the statements of a root."""
        writer = " ".join([f"{name} {version}" for name, version in root.writer.items()])
        return cls(writer, root.custom, root.metrics, root.created)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint of one tree, or of files.

    Attributes:
        location: its location.
        version: the state of the location when it was opened.
        root: its root; None if other software wrote it.
        stored: where its arrays are in its objects.
        tree: its tree.
        store: reads its objects.
        foreign: what it states about itself, if other software wrote it.
        read_instead: reads its boxes in place of `store`: from copies on this host, by a strategy, or, if `derived` is
            set, by computing them.
        derived: computes its arrays from those of other checkpoints; None if they are stored as they are in the tree.
            `stored` and `store` are then those of the checkpoint that is read.
    """

    location: Location
    version: LocationVersion
    root: Root | None
    stored: StoredFormat
    tree: TreeMetadata
    store: ObjectReader
    foreign: Origin = Origin()  # immutable
    read_instead: ReadBoxes | None = None
    derived: Derived | None = None

    @classmethod
    def of_root(
        cls,
        location: Location,
        version: LocationVersion,
        root: Root,
        context: Context,
        stored: StoredFormat | None = None,
    ) -> Checkpoint:
        """Return a checkpoint of ckptcore, with the arrays that it stores itself.

        Args:
            location, version, root: as of the checkpoint.
            context: options.
            stored: the layout and its state, if an earlier checkpoint with this root has them.
        """
        store = reader_of(location.store, root.objects, context)
        return cls(location, version, root, stored or stored_format(root, context), root.tree, store)

    def __str__(self) -> str:
        return self.location.display

    @property
    def layout(self) -> Layout:
        """Its layout."""
        return self.stored.layout

    @property
    def state(self) -> JSON:
        """The state that its layout stored with the tree."""
        return self.stored.state

    @property
    def origin(self) -> Origin:
        """Its statements about itself."""
        return self.foreign if self.root is None else Origin.of_root(self.root)

    @property
    def objects(self) -> Mapping[str, ObjectRecord]:
        """Records of its objects by key; empty for a tree that other software wrote."""
        return self.store.objects

    @property
    def index(self) -> ChunkIndex:
        """The chunk index of its arrays; for a derived checkpoint, that of the checkpoint that is read.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """
        return self.stored.index(self.tree) if self.derived is None else self.derived.sources[0].index

    @property
    def is_files(self) -> bool:
        """True for files that an object wrote, which are no tree."""
        return self.layout.name == FilesLayout.name

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
        """Fill buffers with the boxes of a plan. Yields the number of each box once it is complete."""
        if self.read_instead is not None:
            return self.read_instead(plan, buffers)
        return self.store.read_boxes(self.index, plan.items, buffers)

    def reading_through(self, read_through: ReadThrough) -> Checkpoint:
        """Return this checkpoint, whose boxes are read by a strategy."""
        root = self.version.root
        # The members of a composite have one save id, but each has a root of its own.
        content_id = xxhash.xxh3_128_hexdigest(root) if isinstance(root, bytes) else None
        return replace(self, read_instead=lambda plan, buffers: read_through(content_id, plan, buffers, self.read))


def stored_format(root: Root, context: Context) -> StoredFormat:
    """Return the layout of a tree of ckptcore, or of files, with its state."""
    is_files = root.layout == FilesLayout.name
    layout = FilesLayout() if is_files else runtime_of(context).registry.layout(root.layout)
    return StoredFormat(layout, root.state)


def reader_of(storage: StorageBackend, objects: Mapping[str, ObjectRecord], context: Context) -> ObjectReader:
    """Return what reads the recorded objects of a checkpoint, and no others."""
    return ObjectReader(storage, objects, runtime_of(context).io_threads, verify=context.io.verify, strict=True)


Source: TypeAlias = AnyLocation | Checkpoint
"""A location of a checkpoint, or an open one."""


@dataclass(frozen=True, slots=True)
class CompositeCheckpoint:
    """An open checkpoint of several checkpointables.

    Attributes:
        location, version: as of a `Checkpoint`.
        root: its root; None if other software wrote it.
        members: its checkpointables by name, with those that were deleted since the save.
        origin: what it states about itself.
    """

    location: Location
    version: LocationVersion
    root: Composite | None
    members: Mapping[str, Member]
    origin: Origin

    @classmethod
    def of_root(cls, location: Location, version: LocationVersion, root: Composite) -> CompositeCheckpoint:
        """Return a composite of ours."""
        return cls(location, version, root, root.members, Origin.of_root(root))


@contextmanager
def naming_arrays(opened: Checkpoint) -> Iterator[None]:
    """Add the names of the affected arrays to errors about bytes."""
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


@contextmanager
def naming_further(opened: Checkpoint) -> Iterator[None]:
    """Add the name of a further checkpoint, and of its arrays, to errors about its bytes."""
    try:
        with naming_arrays(opened):
            yield
    except CheckpointError as error:
        if not opened.version.is_current(opened.location):
            raise replaced_beside(opened) from error
        if not isinstance(error, CorruptCheckpointError):
            raise
        raise type(error)(f"{error}. It is read for arrays of another checkpoint") from error


def replaced_beside(opened: Checkpoint) -> CorruptCheckpointError:
    """Return the error for an additional checkpoint that was replaced while its arrays were read."""
    return CorruptCheckpointError(
        f"{opened.location.display} was replaced while its arrays were combined with those of another checkpoint; "
        "load again"
    )


def arrays_at(opened: Checkpoint, key: str | None, start: int | None, stop: int | None) -> list[str]:
    """Return the paths of the stored arrays that have bytes in a range of an object."""
    if key is None:
        return []
    if opened.derived is not None:
        return arrays_at(opened.derived.sources[0], key, start, stop)
    return [
        format_path(opened.tree.paths[leaf])
        for leaf, own, first, last in extents_of(opened)
        if own == key and (start is None or stop is None or (first < stop and start < last))
    ]


def extents_of(opened: Checkpoint) -> Iterator[tuple[int, str, int, int]]:
    """Return the ranges of bytes (leaf, object, start, stop) that hold the arrays of a checkpoint, by leaf."""
    index, tree = opened.index, opened.tree
    for leaf, record in enumerate(tree.leaves):
        if isinstance(record, ArrayRecord) and leaf not in tree.aliases:
            for key, start, stop in index.extents(leaf):
                yield leaf, key, start, stop


def check_file(opened: Checkpoint, record: ObjectRecord) -> None:
    """Refuse a file whose size is not the recorded one. A hostile root may state any size.

    Raises:
        CorruptCheckpointError
    """
    there = opened.location.store.size(record.key)
    if there != record.size:
        raise CorruptCheckpointError(
            f"{record.key} in {opened.location.display} has {there} bytes, where {record.size} were written; load "
            "another checkpoint",
            key=record.key, start=min(there, record.size), stop=max(there, record.size),
        )  # fmt: skip


def file_pieces(opened: Checkpoint, record: ObjectRecord) -> Iterator[bytes]:
    """Iterate over the bytes of a file, verified, 16 MiB at a time.

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
