"""What stages hand to each other: plans, receipts, and the pieces that layouts ask the core to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.tree import JSON

__all__ = [
    "ArraySegment",
    "BytesSegment",
    "Checksum",
    "ChecksumSegment",
    "ChunkRead",
    "Pending",
    "ReadItem",
    "ReadPlan",
    "Ready",
    "Receipt",
    "Segment",
    "WriteItem",
    "WritePlan",
]

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Pending(Protocol[T_co]):
    """A result that may still be on its way. A `concurrent.futures.Future` is one, a `Ready` too."""

    def result(self) -> T_co:
        """Wait for the result and return it, or raise what went wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Ready(Generic[T]):
    """A result that is there already."""

    value: T

    def result(self) -> T:
        """The value."""
        return self.value


@dataclass(frozen=True, slots=True)
class WriteItem:
    """An array, and the boxes of it that this process writes.

    Attributes:
        leaf: the number of the leaf in the tree.
        spec: the whole array.
        boxes: without overlap, in the order in which a `Snapshot` gives their elements.
    """

    leaf: int
    spec: ArraySpec
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes in host memory."""
        return sum([box.size for box in self.boxes]) * self.spec.numpy_dtype.itemsize


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What this process writes of a tree.

    Attributes:
        tree: the tree of the whole job.
        items: the arrays of which this process writes a part; shared arrays once, under their first leaf.
        rank, size: which process of how many this is.
        save_id: the save; goes into the names of objects whose names no format fixes.
        name: of the checkpointable that the tree is; empty where the tree is the whole checkpoint.
        session: where a checkpoint is filled in several sessions, which one this is: the rank of its first process among those of all
            sessions. The tree is that of the session then, and `rank` this process's among those of all. See
            `ckptcore.protocols.WritesSessions`.
    """

    tree: TreeMetadata
    items: tuple[WriteItem, ...]
    rank: int
    size: int
    save_id: str
    name: str = ""
    session: int | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one process wrote.

    Attributes:
        rank: the process.
        items: what it wrote, as its plan said. Of another process they may be an `ItemColumns`.
        state: JSON that the layout owns: where things went. Where it comes from another process, lists of whole numbers in it may be of
            another type: an `IntegerColumn`, over which one iterates as over a list, and which NumPy takes as it is.
        objects: every object written, with its checksums.
    """

    rank: int
    items: Sequence[WriteItem]
    state: JSON
    objects: tuple[ObjectRecord, ...]


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A box of an array that this process needs.

    Attributes:
        leaf: the number of the leaf in the tree; never an alias.
        box: where in the array.
    """

    leaf: int
    box: Box


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What this process reads of a checkpoint.

    Attributes:
        tree: the tree that was saved.
        items: the boxes, in no particular order.
    """

    tree: TreeMetadata
    items: tuple[ReadItem, ...]


@dataclass(frozen=True, slots=True)
class BytesSegment:
    """Bytes of an object that are known: a header, a footer, padding."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class ArraySegment:
    """Bytes of an object that are the elements of a box, in C order, little endian.

    Attributes:
        box: the box whose elements these are.
        itemsize: bytes per element.
        open: gives the boxes and arrays that together hold all of `box`; may block until they are there. Their bytes
            are cast to little endian and gathered as they are written.
        close: called once, when all bytes are in the storage, or the write failed: the memory can be given back.
    """

    box: Box
    itemsize: int
    open: Callable[[], Sequence[tuple[Box, HostArray]]]
    close: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.box.size * self.itemsize


class Checksum(Protocol):
    """A checksum that stands in an object, right behind the bytes it is of, as a format says. Any thread."""

    @property
    def name(self) -> str:
        """The algorithm, as errors call it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in an object; at least one, the same for every value."""
        ...

    def of(self, data: memoryview) -> int:
        """The checksum of bytes: a view with format ``B``, that may be empty. Gives up the interpreter lock for many."""
        ...

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """The checksum of two runs of bytes, one after the other.

        Args:
            first: the checksum of the first run.
            second: the checksum of the second run.
            second_bytes: how long the second run is, in bytes; may be zero.
        """
        ...

    def encode(self, value: int) -> bytes:
        """A checksum as it stands in an object: `nbytes` bytes."""
        ...


@dataclass(frozen=True, slots=True)
class ChecksumSegment:
    """Bytes of an object that are a checksum of those right before it; whoever writes the object computes it.

    Attributes:
        checksum: which one.
        segments: how many segments before this one it is of, at least one. None of them may be a `ChecksumSegment`: what
            is written first would have to wait for it.
    """

    checksum: Checksum
    segments: int = 1

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.checksum.nbytes


Segment: TypeAlias = BytesSegment | ArraySegment | ChecksumSegment
"""A run of bytes of an object that is being written."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """Read of a chunk stored in C order, uncompressed and little endian, into the arrays that want elements of it.

    Attributes:
        key: the object it is in.
        offset: where in the object its first element is, in bytes.
        box: where in the array its elements are.
        itemsize: bytes per element.
        targets: for each array that wants some of it: its number, its box and the array to fill (C-contiguous and
            writable, of the box's shape). A target may want only part of the chunk, and the chunk only be part of it.
        checksum: of all bytes of the chunk, stored right behind them; None: there is none.
    """

    key: str
    offset: int
    box: Box
    itemsize: int
    targets: tuple[tuple[int, Box, HostArray], ...]
    checksum: Checksum | None = None
