"""Entries of ``.metadata``: tensors with their chunks, which are rows of columns, and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple, TypeAlias, overload

import numpy as np

from ckptcore.model import HostArray, ValueRecord
from ckptcore_dcp.pickles import Global

DcpPath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry: str for a key of a mapping, int for an index of a list."""
ItemRange: TypeAlias = tuple[str, int, int, tuple[str, ...]]
"""The relative path, offset, length and transforms of a `DcpChunk` or `DcpValue`."""
Sizes: TypeAlias = tuple[HostArray, HostArray]
"""The number of axes of each row, and its extents, padded with zeros."""


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor, and the item with its elements.

    Attributes:
        offsets: start of the box, in elements along each axis.
        sizes: shape of the box.
        relative_path: the file.
        offset: offset of the item in the file, in bytes.
        length: length of the item in the file, in bytes.
        transforms: transforms of the item, in the order in which a reader reverses them
            (``stream.zstd/1``).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class DcpTensor(NamedTuple):
    """A tensor.

    Attributes:
        dtype: torch dtype, as named by `ckptcore_dcp.stored_tensors.known_dtype`.
        shape: elements along each axis.
        chunks: its chunks, without duplicates.
        requires_grad: torch's ``requires_grad``.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[DcpChunk]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class DcpValue:
    """A value that is not a tensor, stored as an item of ``torch.save``. Attributes as in `DcpChunk`."""

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The contents of ``.metadata``.

    Attributes:
        tensors, values: by name; no name is in both.
        paths: path of each name. None if the file has no paths. Some names may have no path.
        save_id: id of the save that wrote it, or None.
        checkpoint_id: location it was written to, or None.
        unreadable: the records of entries that cannot be loaded, by name. They are not in `tensors` or `values`.
        files: the files that ``.metadata`` lists.
        unlisted: by file, the names of items that have a location but no description. They are not loaded.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpValue]
    paths: Mapping[str, DcpPath] | None = None
    save_id: str | None = None
    checkpoint_id: str | None = None
    unreadable: Mapping[str, ValueRecord] = field(default_factory=dict)
    files: frozenset[str] = field(default=frozenset(), compare=False)
    unlisted: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    @property
    def names(self) -> Sequence[str]:
        """All names, in the order of `paths`, followed by names without a path."""
        entries = dict.fromkeys(chain(self.tensors, self.values, self.unreadable))
        known = list(filter(entries.__contains__, self.paths or ()))
        if len(known) == len(entries):
            return known
        listed = set(known)
        return [*known, *[name for name in entries if name not in listed]]


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_CLASS_MODULES: Final[Mapping[str, Collection[str]]] = {
    **dict.fromkeys(
        ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex", "StorageMeta"),
        (_METADATA, "torch.distributed._shard.checkpoint.metadata"),
    ),
    **dict.fromkeys(
        ("ChunkStorageMetadata", "TensorProperties"),
        (
            _METADATA,
            "torch.distributed._shard.checkpoint.metadata",
            "torch.distributed._shard.sharded_tensor.metadata",
            "torch.distributed._shard.metadata",
        ),
    ),
    "_StorageInfo": (_FILES, "torch.distributed._shard.checkpoint.filesystem"),
}
"""Modules that contained each class, since torch 1.13."""


def torch_class_name(function: Global) -> str:
    """Return the name of the ``.metadata`` class that a global refers to, or "" for other globals."""
    return function.name if function.module in _CLASS_MODULES.get(function.name, ()) else ""


@dataclass(frozen=True, slots=True, eq=False)
class DcpChunkColumns:
    """Chunks as int64 columns, without an object per chunk.

    Attributes:
        axes: number of axes of each chunk.
        offsets, sizes: one row per chunk, in elements along each axis, padded with zeros.
        file: index of the chunk's file in `files`.
        offset, length: byte range of the chunk's item in its file.
        files: the file names.
        transforms: by row, the transforms of its item, as in `DcpChunk`. Rows without transforms are omitted.
    """

    axes: HostArray
    offsets: HostArray
    sizes: HostArray
    file: HostArray
    offset: HostArray
    length: HostArray
    files: Sequence[str]
    transforms: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, chunks: Sequence[DcpChunk]) -> DcpChunkColumns:
        """Return the columns of chunks."""
        count = len(chunks)
        files: dict[str, int] = {}
        axes, offsets = padded_sizes([chunk.offsets for chunk in chunks])
        return cls(
            axes,
            offsets,
            padded_sizes([chunk.sizes for chunk in chunks])[1],
            np.fromiter([files.setdefault(chunk.relative_path, len(files)) for chunk in chunks], np.int64, count),
            np.fromiter([chunk.offset for chunk in chunks], np.int64, count),
            np.fromiter([chunk.length for chunk in chunks], np.int64, count),
            list(files),
            {row: chunk.transforms for row, chunk in enumerate(chunks) if chunk.transforms},
        )

    def take(self, rows: HostArray) -> DcpChunkColumns:
        """Return selected rows in the given order. A row may occur several times."""
        transforms: dict[int, tuple[str, ...]] = {}
        if self.transforms:
            for position, row in enumerate(rows.tolist()):
                if row in self.transforms:
                    transforms[position] = self.transforms[row]
        return DcpChunkColumns(
            self.axes[rows],
            self.offsets[rows],
            self.sizes[rows],
            self.file[rows],
            self.offset[rows],
            self.length[rows],
            self.files,
            transforms,
        )

    def chunk(self, row: int) -> DcpChunk:
        """Return one row as an object."""
        axes = int(self.axes[row])
        return DcpChunk(
            tuple(self.offsets[row, :axes].tolist()),
            tuple(self.sizes[row, :axes].tolist()),
            self.files[self.file[row]],
            int(self.offset[row]),
            int(self.length[row]),
            self.transforms.get(row, ()),
        )


class ChunkRows(Sequence[DcpChunk]):
    """A range of rows as a sequence of chunks. Chunk objects are created on access.

    Attributes:
        columns: the chunks of all tensors.
        start, stop: the range of rows, half-open.
    """

    __slots__ = ("columns", "start", "stop")

    def __init__(self, columns: DcpChunkColumns, start: int, stop: int) -> None:
        """Create a view of the rows from `start` up to, but not including, `stop`."""
        self.columns = columns
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: int) -> DcpChunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[DcpChunk]: ...

    def __getitem__(self, index: int | slice) -> DcpChunk | Sequence[DcpChunk]:
        rows = range(self.start, self.stop)[index]
        return self.columns.chunk(rows) if isinstance(rows, int) else [self.columns.chunk(row) for row in rows]

    def __iter__(self) -> Iterator[DcpChunk]:
        return map(self.columns.chunk, range(self.start, self.stop))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


TensorHead: TypeAlias = tuple[str, tuple[int, ...], bool]
"""The dtype, shape and requires_grad of a `DcpTensor`."""


@dataclass(frozen=True, slots=True, eq=False)
class DcpTensors(Mapping[str, DcpTensor]):
    """Tensors by name, with their chunks as columns. `DcpTensor` objects are created on access.

    Attributes:
        heads: the other attributes of each tensor, by name. Many tensors share one object.
        columns: the chunks of all tensors, in the order of `heads`.
        bounds: the first chunk of each tensor, and the number of all chunks.
        numbers: the number of each tensor, in the order of `heads`.
    """

    heads: Mapping[str, TensorHead]
    columns: DcpChunkColumns
    bounds: HostArray
    numbers: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, DcpTensor]) -> DcpTensors:
        """Return tensors in this form."""
        if isinstance(tensors, DcpTensors):
            return tensors
        heads = {name: (tensor.dtype, tensor.shape, tensor.requires_grad) for name, tensor in tensors.items()}
        chunks = [tensor.chunks for tensor in tensors.values()]
        return cls.of_columns(heads, join_chunks(list(filter(None, chunks))), [*map(len, chunks)])

    @classmethod
    def of_columns(
        cls, heads: Mapping[str, TensorHead], columns: DcpChunkColumns, counts: HostArray | Sequence[int]
    ) -> DcpTensors:
        """Return tensors with these numbers of chunks."""
        bounds = np.cumsum(np.concatenate([np.zeros(1, np.int64), np.array(counts, np.int64)]))
        return cls(heads, columns, bounds, dict(zip(heads, range(len(heads)), strict=True)))

    def __getitem__(self, name: str) -> DcpTensor:
        dtype, shape, requires_grad = self.heads[name]
        first, last = self.bounds[self.numbers[name] :][:2].tolist()
        return DcpTensor(dtype, shape, ChunkRows(self.columns, first, last), requires_grad)

    def __iter__(self) -> Iterator[str]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __contains__(self, name: object) -> bool:
        return name in self.heads


def join_chunks(lists: Sequence[Sequence[DcpChunk]]) -> DcpChunkColumns:
    """Return the columns of several lists of chunks, concatenated."""
    ranges = [chunks for chunks in lists if isinstance(chunks, ChunkRows)]
    shared = {id(chunks.columns): chunks.columns for chunks in ranges}
    if len(shared) != 1 or len(ranges) != len(lists):
        return DcpChunkColumns.of([chunk for chunks in lists for chunk in chunks])
    starts = np.array([rows.start for rows in ranges], np.int64)
    counts = np.array([rows.stop - rows.start for rows in ranges], np.int64)
    return next(iter(shared.values())).take(ranges_of(starts, counts))


def ranges_of(starts: HostArray, counts: HostArray) -> HostArray:
    """Return the numbers of ranges, one range after the other."""
    numbers: HostArray = np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
    return numbers


def padded_sizes(sizes: Sequence[tuple[int, ...]]) -> Sizes:
    """Return sizes as columns."""
    axes: HostArray = np.fromiter(map(len, sizes), np.int64, len(sizes))
    extents: HostArray = np.zeros((len(sizes), int(axes.max(initial=0))), np.int64)
    within = np.arange(extents.shape[1]) < axes[:, None]
    extents[within] = np.fromiter(chain.from_iterable(sizes), np.int64, int(axes.sum()))
    return axes, extents
