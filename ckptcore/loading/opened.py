"""Opened: a checkpoint that can be read, and what its objects hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

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
    from ckptcore.loading.host_copies import HostCopies

__all__ = [
    "MadeArrays",
    "Opened",
    "OpenedComposite",
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
class Opened:
    """A checkpoint that can be read.

    Attributes:
        location: where it is.
        mark: what was there when it was opened.
        root: its root; None where other software wrote it.
        layout, state: how its arrays are stored in its objects.
        tree: what is in it.
        objects: what is known of its objects; nothing where other software wrote it.
        store: to read its objects from.
        writer: who wrote it.
        custom: metadata of the user's.
        metrics: measurements that were given with it.
        created: when it was saved, ISO 8601 in UTC; None where other software wrote it and does not say.
        copies: what this host has copies of, where hosts have disks of their own.
        derived: what makes its arrays, where they are not stored as they are in the tree. Layout, state and objects are then those of
            the checkpoint that is read, and only `read` knows the way from one to the other.
        indexes: the cache of `index`.
    """

    location: Location
    mark: Mark
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
    derived: MadeArrays | None = None
    indexes: IndexCache = field(default_factory=IndexCache, repr=False, compare=False)

    @classmethod
    def of_root(
        cls,
        location: Location,
        mark: Mark,
        root: Root,
        layout: Layout,
        store: ObjectReader,
        copies: HostCopies | None,
        indexes: IndexCache | None = None,
    ) -> Opened:
        """Return a checkpoint that ckptcore wrote."""
        return cls(
            location, mark, root, layout, root.state, root.tree, root.objects, store, _writer(root), root.custom,
            root.metrics, root.created, copies, indexes=IndexCache() if indexes is None else indexes,
        )  # fmt: skip

    @property
    def index(self) -> ChunkIndex:
        """Where the chunks of its arrays are; of a derived checkpoint, those of the checkpoint that is read.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """
        return self.indexes.index(self.layout, self.tree, self.state)

    def __str__(self) -> str:
        return self.location.display

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
        """Fill buffers with the boxes of a plan of this checkpoint; yields the number of each once it is complete."""
        if self.derived is not None:
            return self.derived.read(plan, buffers)

        def read_whole(plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
            return self.store.read_boxes(self.index, plan.items, buffers)

        return read_whole(plan, buffers) if self.copies is None else self.copies.read(plan, buffers, read_whole)


class MadeArrays(Protocol):
    """Arrays that are made of those of other checkpoints as they are read."""

    @property
    def below(self) -> Sequence[Opened]:
        """The checkpoints that are read; the first is the one whose layout, state and objects are told."""
        ...

    @property
    def told(self) -> str:
        """What transforms do, in words; in a job the same on every rank. Empty where there are none."""
        ...

    @property
    def changes(self) -> Mapping[int, tuple[int, str]]:
        """By number of the leaf, of arrays that matching may have changed: its number before, and what was done, in words; other ranks may have
        other ones.
        """
        ...

    @property
    def opened_so(self) -> bool:
        """Whether opening the checkpoint makes it so by itself, because it refers to others: to users it is one as any other."""
        ...

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
        """See `Opened.read`."""
        ...

    def stored(self, leaves: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """By number of a checkpoint, those of its leaves that leaves of the tree are or are made of."""
        ...

    def bands(self, leaf: int, nbytes: int) -> tuple[int, int] | None:
        """An axis of an array, and how many elements along it make bands of about so many bytes that lie together in what is stored, so
        that each reads its own part of that. None where there are none, or the whole is one.
        """
        ...

    def pieces(self, leaf: int, most_bytes: int) -> Sequence[Box]:
        """Bands of an array along its first axis, of at most so many bytes where it can be: one after the other they read little more than all
        at once would. The whole array where they would read more.
        """
        ...


Source: TypeAlias = Place | Opened
"""What can be read: a place, or a checkpoint that is open already."""


@dataclass(frozen=True, slots=True)
class OpenedComposite:
    """A checkpoint of several checkpointables.

    Attributes:
        location: where it is.
        mark: what was there when it was opened.
        root: its root; None where other software wrote it.
        members: what is in it, by name; what was deleted since is still listed.
        writer, custom, metrics, created: as of an `Opened`.
    """

    location: Location
    mark: Mark
    root: Composite | None
    members: Mapping[str, Member]
    writer: str
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str | None = None

    @classmethod
    def of_root(cls, location: Location, mark: Mark, root: Composite) -> OpenedComposite:
        """One of ours."""
        return cls(location, mark, root, root.members, _writer(root), root.custom, root.metrics, root.created)


def _writer(root: Root | Composite) -> str:
    """Who wrote a checkpoint, in words."""
    return " ".join(f"{name} {version}" for name, version in root.writer.items())


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


@contextmanager
def naming_further(opened: Opened) -> Iterator[None]:
    """Let errors about bytes of a further checkpoint name that, and its arrays: who reads the first one knows the files of that one only."""
    try:
        with naming_arrays(opened):
            yield
    except CheckpointError as error:
        if not opened.mark.is_at(opened.location):
            raise replaced_beside(opened) from error
        if not isinstance(error, CorruptCheckpointError):
            raise
        raise type(error)(f"{error}. It is read for arrays of another checkpoint") from error


def replaced_beside(opened: Opened) -> CorruptCheckpointError:
    """Return the error for an additional checkpoint that was replaced while its arrays were read."""
    return CorruptCheckpointError(
        f"{opened.location.display} was replaced while its arrays were combined with those of another checkpoint; "
        "load again"
    )


def arrays_at(opened: Opened, key: str | None, start: int | None, stop: int | None) -> list[str]:
    """The paths of the arrays that have bytes in a range of an object, as they are stored."""
    if key is None:
        return []
    if opened.derived is not None:
        return arrays_at(opened.derived.below[0], key, start, stop)
    return [
        format_path(opened.tree.paths[leaf])
        for leaf, own, first, last in extents_of(opened)
        if own == key and (start is None or stop is None or (first < stop and start < last))
    ]


def extents_of(opened: Opened) -> Iterator[tuple[int, str, int, int]]:
    """Return the ranges of bytes (leaf, object, start, stop) that hold the arrays of a checkpoint, by leaf."""
    index, tree = opened.index, opened.tree
    for leaf, record in enumerate(tree.leaves):
        if isinstance(record, ArrayRecord) and leaf not in tree.aliases:
            for key, start, stop in index.extents(leaf):
                yield leaf, key, start, stop


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
