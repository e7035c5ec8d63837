"""The table of the chunks of a delta: which boxes of arrays changed, and where their encoded bytes are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from ckptcore.commit.root import pruned
from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning import ChunkColumns, natural_column, uncovered
from ckptcore_versions.deltas.checksums import CRC32
from ckptcore_versions.deltas.encoding import HEAD_BYTES

MAX_CHUNK_BYTES: Final = 1 << 20
"""Maximum bytes of the elements of a chunk that is read. A chunk of one element may have more."""

_CHUNK_BYTES: Final = 256 << 10
"""Bytes of the elements of a chunk that is written, at most."""

_LEAST_BYTES: Final = 16 << 10
"""An array is not divided into smaller chunks for the sake of shards: each chunk needs about 30 bytes."""

_LARGE_BYTES: Final = 16 << 20
"""Arrays of this size are also divided along other axes than the main one. To gather such chunks costs about as much as
to encode them, and smaller arrays are rarely divided along several axes."""

_RUN_BYTES: Final = 1024
"""Elements of such a chunk that are contiguous in the array, in bytes, at least. Shorter runs are slow to copy."""

_LEAST_RUN_BYTES: Final = 64
"""The same along the main axis: a cache line."""

_SHARDS: Final = (24, 12, 8, 6, 4, 3, 2)
"""Numbers of parts, one of which divides each usual number of shards."""

_STRIPES: Final = 24
"""Number of stripes of a box: see `stripes_of`."""

_COLUMNS: Final = ("leaf", "file", "axis", "axes", "box", "chunk", "bytes")

_MAX_AXES: Final = 64
"""NumPy's limit."""

_MAX_OFFSET: Final = 1 << 61


def main_axis(spec: ArraySpec, box: Box) -> int:
    """Return the axis along which shards divide an array, as far as a box of a process shows it; else 0."""
    return next((axis for axis, extent in enumerate(spec.shape) if box.shape[axis] != extent), 0)


def chunk_shape(spec: ArraySpec, main: int = 0) -> tuple[int, ...]:
    """Return the shape of the chunks of an array. Their grid begins at the first element.

    If the extents allow it, shards of usual numbers of processes consist of whole chunks: along the main axis, and for
    large arrays along other axes. So a process reads little beyond its shard. Chunks have at most 256 KiB, unless a
    single element has more.

    Args:
        spec: the array.
        main: its `main_axis`.
    """
    itemsize, nbytes, cell = spec.numpy_dtype.itemsize, spec.nbytes, list(spec.shape)
    axes = sorted(range(len(cell)), key=lambda axis: axis != main)
    for axis in axes:
        if axis == main or (nbytes > _CHUNK_BYTES and spec.nbytes >= _LARGE_BYTES):
            run_bytes = prod(spec.shape[axis:]) * itemsize if axis else nbytes
            least_run = 0 if not axis else _LEAST_RUN_BYTES if axis == main else _RUN_BYTES
            fitting = [
                parts
                for parts in _SHARDS
                if cell[axis] % parts == 0
                and run_bytes // parts >= least_run
                and (axis != main or nbytes // parts >= _LEAST_BYTES)
            ]
            parts = fitting[0] if fitting and nbytes else 1
            cell[axis] //= parts
            nbytes //= parts
    for axis in sorted(axes):
        if nbytes > _CHUNK_BYTES:
            least = min(cell[axis], -(-nbytes // _CHUNK_BYTES))
            # Equal parts, if possible, so that the larger ones that were chosen above still begin at a chunk.
            cell[axis] = -(-cell[axis] // next((n for n in range(least, 2 * least) if cell[axis] % n == 0), least))
            nbytes = prod(cell) * itemsize
    return tuple(cell)


def grid_of(box: Box, cell: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks of a box along each axis. The grid of chunks begins at the first element."""
    return tuple(
        [-(-stop // extent) - start // extent for start, stop, extent in zip(box.start, box.stop, cell, strict=True)]
    )


def chunks_of(box: Box, cell: Sequence[int]) -> list[Box]:
    """Divide a box at the grid of chunks. The chunks are in C order."""
    bounds = [
        [
            (max(start, low), min(stop, low + extent))
            for low in range(start // extent * extent, stop, extent)
        ]
        for start, stop, extent in zip(box.start, box.stop, cell, strict=True)
    ]  # fmt: skip
    return [
        Box(tuple([low for low, _ in chunk]), tuple([high for _, high in chunk]))
        for chunk in itertools.product(*bounds)
    ]


def stripes_of(box: Box, cell: Sequence[int], axis: int) -> HostArray:
    """Return the stripe of each chunk of a box, in C order: a number below 24 that grows along an axis.

    An object has the chunks of all boxes stripe by stripe. So shards that divide arrays along their main axes are
    ranges of an object, although it has many arrays.
    """
    if not box.start:
        return np.zeros(1, np.int64)
    first, stop, extent = box.start[axis], box.stop[axis], cell[axis]
    starts = np.arange(first // extent, -(-stop // extent)) * extent - first
    stripes: HostArray = np.maximum(starts, 0) * _STRIPES // (stop - first)
    grid = grid_of(box, cell)
    return np.tile(np.repeat(stripes, prod(grid[axis + 1 :])), prod(grid[:axis]))


def part_of(array: HostArray, box: Box, outer: Box) -> HostArray:
    """Return the elements of a box as a view of an array that has the elements of `outer`."""
    index: tuple[Any, ...] = (*box.within(outer), ...)  # the ellipsis keeps arrays without axes from becoming scalars
    view: HostArray = array[index]
    return view


class ChunkSizes:
    """The chunks of boxes as a layout writes them, one column for each property."""

    def __init__(self) -> None:
        """Start without boxes."""
        self._files: dict[str, int] = {}
        self._columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}

    def add(self, leaf: int, key: str, box: Box, cell: Sequence[int], axis: int, sizes: Sequence[int]) -> None:
        """Add a box of an array.

        Args:
            leaf: the number of the array.
            key: the object with its encoded chunks: see `stripes_of`. A checksum follows each chunk.
            box: the box.
            cell: the shape of its chunks.
            axis: the axis of its stripes.
            sizes: the bytes of each encoded chunk in C order, without checksums; 0 if it is equal to the base.
        """
        columns = self._columns
        columns["leaf"].append(leaf)
        columns["file"].append(self._files.setdefault(key, len(self._files)))
        columns["axis"].append(axis)
        columns["axes"].append(len(cell))
        columns["box"] += (*box.start, *box.stop)
        columns["chunk"] += cell
        columns["bytes"] += sizes

    def extend(self, state: JSON) -> None:
        """Add the boxes that another process of this save wrote."""
        columns: Any = state
        numbers = [self._files.setdefault(key, len(self._files)) for key in columns["files"]]
        for name, column in self._columns.items():
            column += [numbers[file] for file in columns[name]] if name == "file" else columns[name]

    def to_json(self) -> dict[str, JSON]:
        """Return the state that `DeltaTable` reads."""
        return {"files": list(self._files), **self._columns}


class EncodedChunk(NamedTuple):
    """A chunk that differs from the base.

    Attributes:
        box: its box in the array.
        start, stop: its position among the encoded bytes of the array.
        key: the object with its encoded bytes.
        offset: their position in the object.
    """

    box: Box
    start: int
    stop: int
    key: str
    offset: int


class StoredBox(NamedTuple):
    """A box of an array, divided into chunks.

    Attributes:
        leaf: the number of the array.
        box: the box.
        cell: the shape of its chunks.
        key: the object with its encoded chunks.
        sizes: the bytes of each encoded chunk in C order; 0 if it is equal to the base.
        offsets: the position of each encoded chunk in the object.
        begin: the position of its first encoded chunk among the encoded bytes of the array.
    """

    leaf: int
    box: Box
    cell: tuple[int, ...]
    key: str
    sizes: HostArray
    offsets: HostArray
    begin: int


class ArrayChunks:
    """The chunks of one array of a delta.

    Attributes:
        spec: the array.
        nbytes: the number of its encoded bytes.
    """

    def __init__(self, spec: ArraySpec, boxes: Sequence[StoredBox]) -> None:
        """Check boxes, which may be hostile.

        Raises:
            CorruptCheckpointError: they do not cover the array exactly, or have chunks of impossible sizes.
        """
        self.spec = spec
        self.nbytes = sum([int(stored.sizes.sum()) for stored in boxes])
        self._boxes = boxes
        for stored in boxes:
            if len(stored.cell) != len(spec.shape):
                raise _damaged(f"expected boxes with {len(spec.shape)} axes, found {len(stored.cell)}")
            elements = prod(map(min, stored.cell, stored.box.shape))
            nbytes = elements * spec.numpy_dtype.itemsize
            if nbytes > MAX_CHUNK_BYTES and elements > 1:
                raise _damaged(f"expected chunks of at most {MAX_CHUNK_BYTES} bytes, found {nbytes}")
            if int(stored.sizes.max()) > nbytes + HEAD_BYTES:
                raise _damaged(f"expected at most {nbytes + HEAD_BYTES} bytes for a chunk, found {stored.sizes.max()}")
        if spec.size and (reason := uncovered(spec, [stored.box for stored in boxes])) is not None:
            raise _damaged(f"the stored boxes do not cover it exactly: {reason}")

    @property
    def is_complete(self) -> bool:
        """True if every chunk is stored, so that the array may be missing in the base."""
        return all(bool(stored.sizes.all()) for stored in self._boxes)

    def within(self, box: Box) -> list[EncodedChunk]:
        """Return the stored chunks with elements of a box, in the order of their encoded bytes."""
        chunks: list[EncodedChunk] = []
        for stored in self._boxes:
            if (common := stored.box.intersect(box)) is None or not stored.sizes.any():
                continue
            grid = grid_of(stored.box, stored.cell)
            first = [start // extent for start, extent in zip(stored.box.start, stored.cell, strict=True)]
            numbers = np.zeros(1, np.int64)
            for start, stop, extent, origin, count in zip(*common, stored.cell, first, grid, strict=True):
                along = np.arange(start // extent, -(-stop // extent)) - origin
                numbers = (numbers[:, None] * count + along).reshape(-1)
            numbers = numbers[stored.sizes[numbers] > 0]
            index = np.array(np.unravel_index(numbers, grid), np.int64).reshape(len(grid), -1).T if grid else None
            lows = (index + first) * stored.cell if index is not None else np.zeros((len(numbers), 0), np.int64)
            starts = np.maximum(lows, stored.box.start).tolist()
            stops = np.minimum(lows + stored.cell, stored.box.stop).tolist()
            ends = (np.cumsum(stored.sizes) + stored.begin)[numbers]
            begins = ends - stored.sizes[numbers]
            offsets = stored.offsets[numbers].tolist()
            chunks += [
                EncodedChunk(Box(tuple(low), tuple(high)), begin, end, stored.key, offset)
                for low, high, begin, end, offset in zip(
                    starts, stops, begins.tolist(), ends.tolist(), offsets, strict=True
                )
            ]
        return chunks


class DeltaTable:
    """The chunks of all arrays of a delta, without the tree.

    Attributes:
        boxes: the boxes of each leaf, in the order of their encoded bytes.
        encoded: the leaves that have encoded bytes, in order.
    """

    def __init__(self, state: JSON) -> None:
        """Parse a state. It may be hostile.

        Args:
            state: JSON of `ChunkSizes`.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        self.boxes: dict[int, list[StoredBox]] = {}
        try:
            for stored in _parsed(state):
                self.boxes.setdefault(stored.leaf, []).append(stored)
        except (TypeError, KeyError, IndexError, ValueError, OverflowError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"the table of chunks is damaged: {error!r}; restore the checkpoint from a copy, or load another one"
            ) from error
        self.encoded = sorted(leaf for leaf, boxes in self.boxes.items() if any(stored.sizes.any() for stored in boxes))

    def arrays(self, tree: TreeMetadata) -> Mapping[int, ArrayChunks]:
        """Return the chunks of each array that is not an alias, by leaf.

        Raises:
            CorruptCheckpointError: the table does not fit the tree.
        """
        arrays = {}
        for leaf, record in enumerate(tree.leaves):
            if isinstance(record, ArrayRecord) and leaf not in tree.aliases:
                try:
                    arrays[leaf] = ArrayChunks(record.spec, self.boxes.get(leaf, ()))
                except CorruptCheckpointError as error:
                    raise CorruptCheckpointError(f"{format_path(tree.paths[leaf])} ({record.spec}): {error}") from error
        if not arrays.keys() >= self.boxes.keys():
            raise _damaged("it has chunks of leaves that are not arrays")
        return arrays

    def encoded_tree(self, tree: TreeMetadata) -> TreeMetadata:
        """Return the tree of the encoded bytes: an array of bytes in place of each array that changed."""
        records = [
            ArrayRecord(ArraySpec((sum([int(stored.sizes.sum()) for stored in self.boxes[leaf]]),), "uint8"))
            for leaf in self.encoded
        ]
        return TreeMetadata(pruned(tree.skeleton, set(self.encoded)), tuple(records))

    def columns(self) -> JSON:
        """Return the state of a table of raw chunks for `encoded_tree`."""
        columns = ChunkColumns()
        for number, leaf in enumerate(self.encoded):
            start = 0
            for stored in self.boxes[leaf]:
                is_stored = stored.sizes > 0
                for size, offset in zip(
                    stored.sizes[is_stored].tolist(), stored.offsets[is_stored].tolist(), strict=True
                ):
                    columns.add(number, stored.key, offset, Box((start,), (start + size,)))
                    start += size
        return columns.to_json()


def _parsed(state: Any) -> Iterator[StoredBox]:
    """Yield the boxes of a table.

    Raises:
        TypeError, KeyError, IndexError, ValueError, OverflowError, AttributeError: the state is damaged or hostile.
    """
    files = state["files"]
    if not isinstance(files, list | tuple) or {*map(type, files)} - {str}:
        raise TypeError("expected file names")
    leaves = natural_column(state["leaf"], _MAX_OFFSET).tolist()
    columns = [
        natural_column(state[name], below, len(leaves)).tolist()
        for name, below in (("file", len(files)), ("axis", _MAX_AXES), ("axes", _MAX_AXES + 1))
    ]
    count = sum(columns[2])
    bounds = natural_column(state["box"], _MAX_OFFSET, 2 * count).tolist()
    cells = natural_column(state["chunk"], _MAX_OFFSET, count).tolist()
    sizes = natural_column(state["bytes"], _MAX_OFFSET)
    if ((sizes > 0) & (sizes <= HEAD_BYTES)).any():
        raise ValueError(f"an encoded chunk has less than {HEAD_BYTES + 1} bytes")
    rows: list[tuple[int, int, int, Box, tuple[int, ...]]] = []
    begin = stop = 0
    for leaf, file, axis, axes in zip(leaves, *columns, strict=True):
        half, end = 2 * begin + axes, begin + axes
        box, cell = Box(tuple(bounds[2 * begin : half]), tuple(bounds[half : half + axes])), tuple(cells[begin:end])
        begin = end
        if min((*box.shape, *cell), default=1) < 1 or axis >= max(axes, 1):
            raise ValueError(f"a box from {list(box.start)} to {list(box.stop)} in chunks {list(cell)}, axis {axis}")
        stop += prod(grid_of(box, cell))
        if stop > len(sizes):
            raise ValueError(f"expected {stop} chunks or more, found {len(sizes)}")
        rows.append((leaf, file, axis, box, cell))
    if stop != len(sizes):
        raise ValueError(f"expected {stop} chunks, found {len(sizes)}")
    offsets = _offsets([(file, stripes_of(box, cell, axis)) for _, file, axis, box, cell in rows], sizes)
    begins: dict[int, int] = {}
    row = 0
    for leaf, file, _, box, cell in rows:
        stop = row + prod(grid_of(box, cell))
        yield StoredBox(leaf, box, cell, files[file], sizes[row:stop], offsets[row:stop], begins.get(leaf, 0))
        begins[leaf] = begins.get(leaf, 0) + int(sizes[row:stop].sum())
        row = stop


def _offsets(boxes: Sequence[tuple[int, HostArray]], sizes: HostArray) -> HostArray:
    """Return the position of each encoded chunk in its object.

    Args:
        boxes: for each box, the number of its object, and the stripe of each chunk.
        sizes: the bytes of the chunks of all boxes.
    """
    if not boxes:
        return np.zeros(0, np.int64)
    files = np.repeat([file for file, _ in boxes], [len(stripes) for _, stripes in boxes])
    order = np.lexsort((np.concatenate([stripes for _, stripes in boxes]), files))  # a stable sort
    nbytes = np.where(sizes > 0, sizes + CRC32.nbytes, 0)[order]
    ends = np.cumsum(nbytes)
    # Positions begin at 0 in each object.
    first = np.searchsorted(files[order], files[order])
    offsets = np.empty(len(sizes), np.int64)
    offsets[order] = ends - nbytes - (ends - nbytes)[first]
    return offsets


def _damaged(reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the table of chunks is damaged: {reason}. Restore the checkpoint from a copy, or load another one"
    )
