"""Open checkpoints: what is known of one, and errors that name its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import xxhash

from ckptcore.builtin.files import FilesLayout
from ckptcore.commit.location import Location, Place
from ckptcore.commit.mark import Mark
from ckptcore.commit.root import Composite, Member, Root
from ckptcore.errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.chunk_reads import IndexCache
from ckptcore.io.reader import ObjectReader
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.transfer import ReadPlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.protocols import ChunkIndex, Layout

if TYPE_CHECKING:
    from ckptcore.protocols import ReadBoxes, ReadThrough

__all__ = [
    "BoxCopies",
    "Checkpoint",
    "CompositeCheckpoint",
    "DerivedArrays",
    "Origin",
    "Source",
    "arrays_at",
    "check_file",
    "extents_of",
    "file_pieces",
    "naming_arrays",
    "naming_further",
    "replaced_beside",
]

_PIECE_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Origin:
    """What a checkpoint states about itself.

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
        """Return what a root states."""
        writer = " ".join([f"{name} {version}" for name, version in root.writer.items()])
        return cls(writer, root.custom, root.metrics, root.created)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint of one tree, or of files.

    Attributes:
        location: where it is.
        mark: the state of the location when it was opened.
        root: its root; None if other software wrote it.
        layout, state: where its arrays are in its objects.
        tree: its tree.
        store: reads its objects.
        foreign: what it states about itself, if other software wrote it.
        copies: copies of its boxes that are read instead: on a disk of this host, or those of a strategy.
        derived: makes its arrays, if they are not stored as they are in the tree. Layout, state and objects are then
            those of the checkpoint that is read, and only `read` translates between the two.
        indexes: the cache of `index`.
    """

    location: Location
    mark: Mark
    root: Root | None
    layout: Layout
    state: JSON
    tree: TreeMetadata
    store: ObjectReader
    foreign: Origin = Origin()  # immutable
    copies: BoxCopies | None = None
    derived: DerivedArrays | None = None
    indexes: IndexCache = field(default_factory=IndexCache, repr=False, compare=False)

    def __str__(self) -> str:
        return self.location.display

    @property
    def origin(self) -> Origin:
        """What it states about itself."""
        return self.foreign if self.root is None else Origin.of_root(self.root)

    @property
    def objects(self) -> Mapping[str, ObjectRecord]:
        """Records of its objects by key; empty for a tree that other software wrote."""
        return self.store.objects

    @property
    def index(self) -> ChunkIndex:
        """Where the chunks of its arrays are; of a derived checkpoint, those of the checkpoint that is read.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """
        if self.derived is not None:
            return self.derived.sources[0].index
        return self.indexes.index(self.layout, self.tree, self.state)

    @property
    def is_files(self) -> bool:
        """True for files that an object wrote, which are no tree."""
        return self.layout.name == FilesLayout.name

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
        """Fill buffers with the boxes of a plan of this checkpoint. Yields the number of each box once it is complete."""
        if self.copies is not None:
            return self.copies.read(plan, buffers, replace(self, copies=None).read)
        if self.derived is not None:
            return self.derived.read(plan, buffers)
        return self.store.read_boxes(self.index, plan.items, buffers)

    def reading_through(self, read_through: ReadThrough) -> Checkpoint:
        """Return this checkpoint, of which boxes are read by a strategy."""
        return replace(self, copies=_Through(self, read_through))


class BoxCopies(Protocol):
    """Copies of boxes of a checkpoint, which are read instead of it."""

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray], read_stored: ReadBoxes) -> Iterable[int]:
        """Fill buffers with the boxes of a plan, those without a copy from the checkpoint. See `Checkpoint.read`."""
        ...


@dataclass(frozen=True, slots=True)
class _Through:
    """Boxes that a strategy reads in place of a checkpoint."""

    checkpoint: Checkpoint
    read_through: ReadThrough

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray], read_stored: ReadBoxes) -> Iterable[int]:
        """See `BoxCopies.read`. The checkpoint may itself have copies on this host."""
        root = self.checkpoint.mark.root
        # The members of a composite have one save id, but each has a root of its own.
        content_id = xxhash.xxh3_128_hexdigest(root) if isinstance(root, bytes) else None
        return self.read_through(content_id, plan, buffers, self.checkpoint.read)


class DerivedArrays(Protocol):
    """Arrays that are computed from those of other checkpoints as they are read."""

    @property
    def sources(self) -> Sequence[Checkpoint]:
        """The checkpoints that are read. The first is the one of which layout, state and objects are known."""
        ...

    @property
    def description(self) -> str:
        """A description of the transforms, equal on every rank of a job; empty without transforms."""
        ...

    @property
    def changes(self) -> Mapping[int, tuple[int, str]]:
        """Changes by matching, which may differ by rank: by leaf, its number before, and a description of the change."""
        ...

    @property
    def is_builtin(self) -> bool:
        """True if these arrays come from the checkpoint's base, not from user transforms."""
        ...

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
        """See `Checkpoint.read`."""
        ...

    def stored(self, leaves: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Return, by number of a source, its leaves that leaves of the tree are or are computed from."""
        ...

    def bands(self, leaf: int, nbytes: int) -> tuple[int, int] | None:
        """Return an axis of an array and a number of elements along it, for bands of about `nbytes` stored bytes.

        Each band reads its own contiguous part of the stored bytes. None if there are no such bands, or only one.
        """
        ...

    def pieces(self, leaf: int, most_bytes: int) -> Sequence[Box]:
        """Return bands of an array along its first axis, of at most `most_bytes` if possible.

        Reading them one after the other reads little more than reading all at once; otherwise the whole array.
        """
        ...


Source: TypeAlias = Place | Checkpoint
"""A location of a checkpoint, or an open one."""


@dataclass(frozen=True, slots=True)
class CompositeCheckpoint:
    """An open checkpoint of several checkpointables.

    Attributes:
        location, mark: as of a `Checkpoint`.
        root: its root; None if other software wrote it.
        members: its checkpointables by name, with those that were deleted since the save.
        origin: what it states about itself.
    """

    location: Location
    mark: Mark
    root: Composite | None
    members: Mapping[str, Member]
    origin: Origin

    @classmethod
    def of_root(cls, location: Location, mark: Mark, root: Composite) -> CompositeCheckpoint:
        """Return a composite of ours."""
        return cls(location, mark, root, root.members, Origin.of_root(root))


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
    """Add the name of a further checkpoint, and of its arrays, to errors about its bytes.

    The reader of the first checkpoint knows the files of that one only.
    """
    try:
        with naming_arrays(opened):
            yield
    except CheckpointError as error:
        if not opened.mark.is_at(opened.location):
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
            f"{record.key} in {opened.location.display} has {there} bytes, where {record.size} were written; load another "
            "checkpoint",
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
