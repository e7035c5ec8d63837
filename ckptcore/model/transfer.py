"""Data that stages pass to each other: plans, receipts, segments, chunks, and columns of many of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, overload

import numpy as np

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.tree import JSON

__all__ = [
    "ArraySegment",
    "BytesSegment",
    "Checksum",
    "ChecksumSegment",
    "Chunk",
    "ChunkPlaces",
    "ChunkRead",
    "IntegerColumn",
    "ItemColumns",
    "Pending",
    "ReadItem",
    "ReadPlan",
    "Ready",
    "Receipt",
    "Segment",
    "WriteItem",
    "WritePlan",
    "list_of_column",
]

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Pending(Protocol[T_co]):
    """A result that may still be on its way. A `concurrent.futures.Future` is one, a `Ready` too."""

    def result(self) -> T_co:
        """Wait for the result and return it, or raise what went wrong."""
        ...


class Ready(NamedTuple, Generic[T]):
    """A result that is there already."""

    value: T

    def result(self) -> T:
        """The value."""
        return self.value


class WriteItem(NamedTuple):
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


class WritePlan(NamedTuple):
    """What this process writes of a tree.

    Attributes:
        tree: the tree of the whole job.
        items: the arrays of which this process writes a part; shared arrays once, under their first leaf.
        rank, size: which process of how many this is.
        save_id: the save; goes into the names of objects whose names no format fixes.
        name: of the checkpointable that the tree is; empty where the tree is the whole checkpoint.
        session: where a checkpoint is filled in several sessions, which one this is: the rank of its first process
            among those of all sessions. The tree is that of the session then, and `rank` this process's among those of
            all. See `ckptcore.protocols.LayoutCapabilities.sessions`.
    """

    tree: TreeMetadata
    items: tuple[WriteItem, ...]
    rank: int
    size: int
    save_id: str
    name: str = ""
    session: int | None = None


class Receipt(NamedTuple):
    """What one process wrote.

    Attributes:
        rank: the process.
        items: what it wrote, as its plan said. Of another process they may be an `ItemColumns`.
        state: JSON that the layout owns: where things went. Where it comes from another process, lists of whole numbers
            in it may be of another type: an `IntegerColumn`, over which one iterates as over a list, and which NumPy
            takes as it is.
        objects: every object written, with its checksums.
    """

    rank: int
    items: Sequence[WriteItem]
    state: JSON
    objects: tuple[ObjectRecord, ...]


class ReadItem(NamedTuple):
    """A box of an array that this process needs.

    Attributes:
        leaf: the number of the leaf in the tree; never an alias.
        box: where in the array.
    """

    leaf: int
    box: Box


class ReadPlan(NamedTuple):
    """What this process reads of a checkpoint.

    Attributes:
        tree: the tree that was saved.
        items: the boxes, in no particular order.
    """

    tree: TreeMetadata
    items: tuple[ReadItem, ...]


class BytesSegment(NamedTuple):
    """Bytes of an object that are known: a header, a footer, padding."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return len(self.data)


class ArraySegment(NamedTuple):
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
    """A checksum that a format stores in an object, right after the bytes that it covers. Any thread."""

    @property
    def name(self) -> str:
        """The algorithm, as errors call it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in an object; at least one, the same for every value."""
        ...

    def of(self, data: memoryview) -> int:
        """Return the checksum of a view with format ``B``, which may be empty. Releases the GIL for many bytes."""
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
        """Encode a checksum for an object, as `nbytes` bytes."""
        ...


class ChecksumSegment(NamedTuple):
    """Bytes of an object that are a checksum of those right before it; whoever writes the object computes it.

    Attributes:
        checksum: which one.
        segments: how many segments before this one it is of, at least one. None of them may be a `ChecksumSegment`:
            what is written first would have to wait for it.
    """

    checksum: Checksum
    segments: int = 1

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.checksum.nbytes


Segment: TypeAlias = BytesSegment | ArraySegment | ChecksumSegment
"""A run of bytes of an object that is being written."""


class ChunkRead(NamedTuple):
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


class Chunk(NamedTuple):
    """A box of an array that is stored by itself, as the metadata describes it.

    Attributes:
        key: the object that holds it.
        offset: its first byte in the object; if the metadata does not tell that, a number that orders chunks.
        box: where it is in the array; may reach beyond the end of the array, if it is stored so.
        is_plain: whether any of its elements can be read, and verified, without the rest of the chunk.
        is_exact: whether its elements are known to be at this offset of this object, in C order, little endian,
            uncompressed, without a checksum behind them. Such chunks are read without `ChunkIndex.locate`.
        leaf: the number of the array in the tree.
        number: the index's own number of the chunk, unique within the array.
    """

    key: str
    offset: int
    box: Box
    is_plain: bool
    is_exact: bool = False
    leaf: int = 0
    number: int = 0


_EMPTY: Final[Mapping[int, Any]] = {}


class ChunkPlaces(NamedTuple):
    """Where the chunks of a batch are. Columns and mappings have a row for each chunk, in the order of the batch.

    Attributes:
        keys: the object of each chunk; empty for chunks that are `inline` or have a `fill`.
        starts: the first byte in the object.
        stops: by row, where encoded chunks end in the object; None: at its end.
        encoded: rows of chunks that are passed to `ChunkIndex.decode`; all others are elements in C order, little
            endian, uncompressed.
        checksums: by row, the checksum right behind the bytes of a raw chunk.
        inline: by row, the bytes of a chunk that is stored with its key.
        fills: by row, the value of all elements of a chunk that is not stored.
    """

    keys: Sequence[str]
    starts: Sequence[int]
    stops: Mapping[int, int | None] = _EMPTY
    encoded: Collection[int] = frozenset()
    checksums: Mapping[int, Checksum] = _EMPTY
    inline: Mapping[int, bytes] = _EMPTY
    fills: Mapping[int, HostArray] = _EMPTY


class IntegerColumn(Sequence[int]):
    """Whole numbers of up to 64 bits. What iterates over it gets `int`; `numpy.asarray` gets int64 at once.

    Attributes:
        array: the numbers, of any integer dtype; not to be changed.
    """

    __slots__ = ("array",)

    def __init__(self, array: HostArray) -> None:
        """Hold an array of one axis."""
        self.array = array

    def __len__(self) -> int:
        """How many."""
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        """One of them, or a list of some."""
        found: int | list[int] = self.array[place].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        """All of them."""
        numbers: list[int] = self.array.tolist()
        return iter(numbers)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        """For NumPy, which calls it."""
        return np.array(self.array, dtype or np.int64, copy=copy)

    def __eq__(self, other: object) -> bool:
        """Whether another sequence has the same numbers."""
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"IntegerColumn({list(self)!r})"

    def __reduce__(self) -> tuple[type[IntegerColumn], tuple[HostArray]]:
        return IntegerColumn, (self.array,)


def list_of_column(found: object) -> list[int]:
    """A column as the list that JSON has for it: for the argument `default` of `json.dumps`.

    Raises:
        TypeError: it is none.
    """
    if isinstance(found, IntegerColumn):
        return list(found)
    raise TypeError(f"{type(found).__qualname__} is not JSON")


class ItemColumns(Sequence[WriteItem]):
    """Items of a plan, made where they are asked for.

    Attributes:
        leaves: by number, what the leaves of the tree are.
        leaf: of each item.
        counts: how many boxes each item has.
        bounds: of the boxes in turn, the starts then the stops along each axis of its array, in elements.
    """

    __slots__ = ("bounds", "counts", "leaf", "leaves")

    def __init__(self, leaves: Sequence[LeafRecord], leaf: HostArray, counts: HostArray, bounds: HostArray) -> None:
        """Hold columns, of integer dtypes and one axis each."""
        self.leaves = leaves
        self.leaf = leaf
        self.counts = counts
        self.bounds = bounds

    @classmethod
    def of(cls, leaves: Sequence[LeafRecord], items: Sequence[WriteItem]) -> ItemColumns:
        """Columns of items; themselves, if they are."""
        if isinstance(items, ItemColumns):
            return items
        bounds = [bound for item in items for box in item.boxes for bound in (*box.start, *box.stop)]
        return cls(
            leaves,
            np.array([item.leaf for item in items], np.int64),
            np.array([len(item.boxes) for item in items], np.int64),
            np.array(bounds, np.int64),
        )

    def __len__(self) -> int:
        """How many items."""
        return len(self.leaf)

    @overload
    def __getitem__(self, place: int) -> WriteItem: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[WriteItem]: ...
    def __getitem__(self, place: int | slice) -> WriteItem | Sequence[WriteItem]:
        """One of them, or some."""
        return tuple(self)[place]

    def __iter__(self) -> Iterator[WriteItem]:
        """All of them."""
        bounds: list[int] = self.bounds.tolist()
        position = 0
        for leaf, count in zip(self.leaf.tolist(), self.counts.tolist(), strict=True):
            spec = self._spec(leaf)
            axes = len(spec.shape)
            boxes = []
            for _ in range(count):
                start, stop = bounds[position : position + axes], bounds[position + axes : position + 2 * axes]
                boxes.append(Box(tuple(start), tuple(stop)))
                position += 2 * axes
            yield WriteItem(leaf, spec, tuple(boxes))

    def _spec(self, leaf: int) -> ArraySpec:
        record = self.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # plans have no other items
        return record.spec

    def __reduce__(self) -> tuple[Any, ...]:
        return ItemColumns, (self.leaves, self.leaf, self.counts, self.bounds)
