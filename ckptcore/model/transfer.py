"""Data that stages pass to each other: plans, receipts, segments, chunks, and columns of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, overload

import numpy as np

from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord, ObjectRecord, TreeMetadata
from ckptcore.model.tree import JSON

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Pending(Protocol[T_co]):
    """A result that may not be available yet, such as a `concurrent.futures.Future` or a `Ready`."""

    def result(self) -> T_co:
        """Wait for the result, and return it or raise its error."""


class Ready(NamedTuple, Generic[T]):
    """A result that is available."""

    value: T

    def result(self) -> T:
        """Return the value."""
        return self.value


class WriteItem(NamedTuple):
    """An array, and its boxes that this process writes.

    Attributes:
        leaf: the number of the leaf in the tree.
        spec: the whole array.
        boxes: the boxes, without overlap, in the order in which `Snapshot.take` returns their elements.
    """

    leaf: int
    spec: ArraySpec
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes in host memory."""
        return sum([box.size for box in self.boxes]) * self.spec.numpy_dtype.itemsize


class WritePlan(NamedTuple):
    """The boxes of a tree that this process writes.

    Attributes:
        tree: the tree of the whole job.
        items: the arrays with boxes that this process writes. Tied arrays are listed once, under their first leaf.
        rank, size: the rank of this process, and the number of processes.
        save_id: the id of the save. It is part of the names of objects, unless the format fixes the names.
        name: the name of the checkpointable; empty if the tree is the whole checkpoint.
        session: in a checkpoint with several sessions, the rank of the session's first process among the processes of
            all sessions; else None. The tree is then the tree of the session, and `rank` is the rank of this process
            among the processes of all sessions. See `ckptcore.protocols.LayoutCapabilities.sessions`.
    """

    tree: TreeMetadata
    items: tuple[WriteItem, ...]
    rank: int
    size: int
    save_id: str
    name: str = ""
    session: int | None = None


class Receipt(NamedTuple):
    """The report of one process about its writes.

    Attributes:
        rank: the rank of the process.
        items: the written boxes, as planned. If the receipt comes from another process, they may be an `ItemColumns`.
        state: JSON of the layout, such as the positions of chunks. If it comes from another process, a list of integers
            may be an `IntegerColumn`, which can be iterated like a list and passed to NumPy.
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
        box: its position in the array.
    """

    leaf: int
    box: Box


class ReadPlan(NamedTuple):
    """The boxes that this process reads from a checkpoint.

    Attributes:
        tree: the saved tree.
        items: the boxes, in any order.
    """

    tree: TreeMetadata
    items: tuple[ReadItem, ...]


class BytesSegment(NamedTuple):
    """Known bytes of an object: a header, a footer, padding."""

    data: bytes | memoryview

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return len(self.data)


class ArraySegment(NamedTuple):
    """The elements of a box in an object, in C order, little endian.

    Attributes:
        box: the box.
        itemsize: bytes per element.
        open: returns boxes and arrays that together cover `box`; may block until they are available. Their bytes are
            converted to little endian and gathered while they are written.
        close: called once to release the memory, when all bytes are in the storage or the write has failed.
    """

    box: Box
    itemsize: int
    open: Callable[[], Sequence[tuple[Box, HostArray]]]
    close: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.box.size * self.itemsize


class Checksum(Protocol):
    """A checksum that a format stores in an object, right after the bytes that it covers ("inline"). Thread-safe."""

    @property
    def name(self) -> str:
        """The name of the algorithm, for errors."""

    @property
    def nbytes(self) -> int:
        """Bytes of a checksum in an object: at least one, and equal for every value."""

    @property
    def is_enough(self) -> bool:
        """True if no object of another save can be mistaken for the object, because its name has the save id.

        Chunks are then verified by their inline checksums whenever whole blocks have clearly more bytes.
        """

    def of(self, data: memoryview) -> int:
        """Return the checksum of a view with format ``B``, which may be empty. Releases the GIL for large views."""

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """Return the checksum of two adjacent runs of bytes.

        Args:
            first: the checksum of the first run.
            second: the checksum of the second run.
            second_bytes: the bytes of the second run; may be zero.
        """

    def encode(self, value: int) -> bytes:
        """Encode a checksum for an object, as `nbytes` bytes."""


class ChecksumSegment(NamedTuple):
    """A checksum of the segments right before it in an object. The writer of the object computes it.

    Attributes:
        checksum: the algorithm.
        segments: the number of preceding segments that it covers, at least one. None of them may be a
            `ChecksumSegment`, for which a writer would have to wait.
    """

    checksum: Checksum
    segments: int = 1

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.checksum.nbytes


Segment: TypeAlias = BytesSegment | ArraySegment | ChecksumSegment
"""A run of bytes of an object that is being written."""


class ChunkRead(NamedTuple):
    """Read of a raw chunk, in C order and little endian, into the arrays that need elements of it.

    Attributes:
        key: the object of the chunk.
        offset: the position of its first element in the object, in bytes.
        box: its box in the array.
        itemsize: bytes per element.
        targets: for each array to fill: its number, its box and the array (C-contiguous and writable, of the box's
            shape). A target may need only part of the chunk, and the chunk may be only part of a target.
        checksum: the inline checksum of all bytes of the chunk; None if there is none.
    """

    key: str
    offset: int
    box: Box
    itemsize: int
    targets: Sequence[tuple[int, Box, HostArray]]
    checksum: Checksum | None = None


class Chunk(NamedTuple):
    """A separately stored box of an array, as the metadata describes it.

    Attributes:
        key: the object that contains it.
        offset: its first byte in the object. If the metadata does not state it, any number that grows in the order in
            which chunks are stored.
        box: its box in the array. It may reach beyond the end of the array if the format stores whole chunks there.
        is_plain: True if any of its elements can be read, and verified, without the rest of the chunk.
        is_exact: True if its elements are known to be at this offset of this object, in C order, little endian,
            uncompressed, without an inline checksum. Such chunks are read without `ChunkIndex.locate`.
        leaf: the number of the array in the tree.
        number: the number of the chunk in the index, unique within the array.
    """

    key: str
    offset: int
    box: Box
    is_plain: bool
    is_exact: bool = False
    leaf: int = 0
    number: int = 0


_EMPTY: Final[Mapping[int, Any]] = {}


class ChunkLocations(NamedTuple):
    """The positions of a batch of chunks. Columns and mappings have a row for each chunk, in the order of the batch.

    Attributes:
        keys: the object of each chunk; empty for chunks that are `inline` or have a fill value.
        starts: the first byte of each chunk in its object, or in its `inline` bytes.
        stops: by row, the end of an encoded chunk in its object or `inline` bytes. If it is None or missing, the chunk
            extends to the end of the object or bytes.
        encoded: rows of chunks that are passed to `ChunkIndex.decode`; all others are elements in C order, little
            endian, uncompressed.
        checksums: by row, the inline checksum of a raw chunk.
        inline: by row, bytes that contain the chunk, which `ChunkIndex.locate` has read already: a key-value format
            may store a small chunk next to its key.
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
    """Integers of up to 64 bits. Iteration yields `int`; `numpy.asarray` returns int64 without a loop.

    Attributes:
        array: the numbers, of any integer dtype; must not be changed.
    """

    __slots__ = ("array",)

    def __init__(self, array: HostArray) -> None:
        """Use an array of one axis."""
        self.array = array

    def __len__(self) -> int:
        """Return the number of integers."""
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        """Return an integer, or a list of integers."""
        numbers: int | list[int] = self.array[index].tolist()
        return numbers

    def __iter__(self) -> Iterator[int]:
        """Iterate over all integers."""
        numbers: list[int] = self.array.tolist()
        return iter(numbers)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        """Return the integers as a NumPy array: int64, unless NumPy requests another dtype."""
        dtype = np.dtype(dtype or np.int64)
        if copy is None:  # NumPy 1 refuses it as an argument
            return np.asarray(self.array, dtype)
        return np.array(self.array, dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        """Return True if another sequence has the same integers."""
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __reduce__(self) -> tuple[type[IntegerColumn], tuple[HostArray]]:
        return IntegerColumn, (self.array,)


def list_of_column(column: object) -> list[int]:
    """Return a column as a list. Can be passed to `json.dumps` as `default`.

    Raises:
        TypeError: the object is not a column.
    """
    if isinstance(column, IntegerColumn):
        return list(column)
    raise TypeError(f"{type(column).__qualname__} is not JSON")


class ItemColumns(Sequence[WriteItem]):
    """Items of a plan as columns. Each item is built when it is used.

    Attributes:
        leaves: the records of the tree, by leaf.
        leaf: the leaf of each item.
        counts: the number of boxes of each item.
        bounds: for each box in order, its starts along all axes, then its stops, in elements.
    """

    __slots__ = ("bounds", "counts", "leaf", "leaves")

    def __init__(self, leaves: Sequence[LeafRecord], leaf: HostArray, counts: HostArray, bounds: HostArray) -> None:
        """Use columns of integer dtypes with one axis each."""
        self.leaves = leaves
        self.leaf = leaf
        self.counts = counts
        self.bounds = bounds

    @classmethod
    def of(cls, leaves: Sequence[LeafRecord], items: Sequence[WriteItem]) -> ItemColumns:
        """Return items as columns."""
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
        """Return the number of items."""
        return len(self.leaf)

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | Sequence[WriteItem]:
        """Return an item, or several."""
        return tuple(self)[index]

    def __iter__(self) -> Iterator[WriteItem]:
        """Iterate over all items."""
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
