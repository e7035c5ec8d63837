"""Chunk index of zarr arrays, whose chunks are objects or values of an OCDBT database, and their locations."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import (
    ArrayRecord,
    ArraySpec,
    Box,
    Checksum,
    Chunk,
    ChunkLocations,
    HostArray,
    Pending,
    ReadItem,
    TreeMetadata,
    format_path,
)
from ckptcore.protocols import ChunkIndex, ReadStore
from ckptcore_orbax.crc32c import CRC32C
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.node import ValueLocation
from ckptcore_orbax.zarr.array_files import inner_array
from ckptcore_orbax.zarr.chunk_sizes import expect_reasonable
from ckptcore_orbax.zarr.chunking import check_chunk_count, flatten_index, iter_chunks, unflatten_index
from ckptcore_orbax.zarr.codecs import is_blosc
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.shard_index import MISSING, ShardIndex, decode_index, index_range
from ckptcore_orbax.zarr.state import ArraysState, ZarrArray

if TYPE_CHECKING:
    from ckptcore_orbax.zarr.chunk_decoding import ChunkDecoder


DatabaseCache = WeakKeyDictionary[ReadStore, dict[str, Database]]
"""Open databases of a store, by directory, so that all loads from one store share their nodes."""


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Location of a chunk.

    Attributes:
        key: the object; empty if `inline`.
        offset: offset in the object, in bytes.
        nbytes: length in bytes; None for a whole object of unknown length.
        inline: the chunk itself, if the database stores it inline.
    """

    key: str
    offset: int
    nbytes: int | None
    inline: bytes | None = None


def locate_chunks(
    state: ArraysState, leaf: int, indices: Sequence[tuple[int, ...]], store: ReadStore, databases: DatabaseCache
) -> Mapping[tuple[int, ...], ChunkLocation | None]:
    """Return the locations of write chunks of an array by index, or None for chunks that are not stored.

    Requests the size of an object only if it may be missing.

    Raises:
        CorruptCheckpointError: the database is missing or damaged.
    """
    stored = state.arrays[leaf]
    format = stored.format
    is_listed = state.storage == "ocdbt" and leaf not in state.embedded and len(indices) > 4
    if is_listed and len(indices) * 4 > prod(format.grid):  # look up few keys, list many
        first = stored.prefix.encode()
        stop = first[:-1] + b"0" if first else None  # 0 follows / in ASCII
        listed = dict(open_database(state.directory, store, databases).range(first, stop))
        return {index: _location_of_value(listed.get(first + format.chunk_key(index).encode())) for index in indices}
    return {index: locate_chunk(state, leaf, index, store, databases) for index in indices}


def locate_chunk(
    state: ArraysState, leaf: int, index: tuple[int, ...], store: ReadStore, databases: DatabaseCache
) -> ChunkLocation | None:
    """Return the location of one write chunk. See `locate_chunks`."""
    stored = state.arrays[leaf]
    match state.embedded.get(leaf):
        case bytes() as embedded:
            return ChunkLocation("", 0, len(embedded), embedded)
        case (key, start, stop):
            return ChunkLocation(key, start, stop - start)
    key = f"{stored.prefix}{stored.format.chunk_key(index)}"
    if state.storage == "ocdbt":
        return _location_of_value(open_database(state.directory, store, databases).get(key.encode()))
    if state.missing == "error":
        return ChunkLocation(f"{state.prefix}{key}", 0, None)
    return _location_if_stored(f"{state.prefix}{key}", store)


def _location_of_value(value: ValueLocation | None) -> ChunkLocation | None:
    return None if value is None else ChunkLocation(value.file, value.offset, value.length, value.inline)


def _location_if_stored(key: str, store: ReadStore) -> ChunkLocation | None:
    try:
        return ChunkLocation(key, 0, store.size(key))
    except ObjectNotFoundError:
        return None


class LocatedChunks:
    """Collects the locations of a batch of read chunks.

    Attributes:
        encoded: rows of encoded chunks. The row of a chunk is its position in the batch.
    """

    def __init__(self, format: ArrayFormat, count: int) -> None:
        """Create an empty collection for `count` chunks of an array."""
        self.encoded: set[int] = set()
        self._is_raw = format.direct
        self._checksum = CRC32C if format.checksum else None
        self._keys = [""] * count
        self._starts = [0] * count
        self._stops: dict[int, int | None] = {}
        self._checksums: dict[int, Checksum] = {}
        self._inline: dict[int, bytes] = {}
        self._fills: dict[int, HostArray] = {}

    def add(self, row: int, location: ChunkLocation, start: int, nbytes: int | None) -> None:
        """Add a read chunk that begins at byte `start` of the object or inline value of its write chunk.

        If `nbytes` is None, the read chunk extends to the end.
        """
        self._keys[row] = location.key
        self._starts[row] = start
        if location.inline is not None:
            self._inline[row] = location.inline
        if not self._is_raw:
            self.encoded.add(row)
            self._stops[row] = None if nbytes is None else start + nbytes
        elif self._checksum is not None:
            self._checksums[row] = self._checksum

    def fill(self, rows: Iterable[int], value: HostArray) -> None:
        """Add read chunks that are not stored, and whose elements all equal `value`."""
        self._fills.update(dict.fromkeys(rows, value))

    def places(self) -> ChunkLocations:
        """Return the locations of all chunks."""
        return ChunkLocations(
            self._keys, self._starts, self._stops, self.encoded, self._checksums, self._inline, self._fills
        )


def open_database(directory: str, store: ReadStore, databases: DatabaseCache) -> Database:
    """Return the database in a directory.

    Raises:
        CorruptCheckpointError: it is missing or cannot be read.
    """
    opened = databases.setdefault(store, {})
    database = opened.get(directory)
    if database is None:
        try:
            database = opened[directory] = Database.open(store, directory)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(
                f"the database of the arrays is missing: {error}. Restore it from a copy, or load another checkpoint"
            ) from error
    return database


def expect_length(stored: ZarrArray, index: tuple[int, ...], location: ChunkLocation) -> None:
    """Reject a chunk whose length differs from its format.

    Raises:
        CorruptCheckpointError: the length is known and differs.
    """
    expected = stored.format.chunk_bytes
    if location.nbytes is not None and location.nbytes != expected:
        raise CorruptCheckpointError(
            f"the chunk {list(index)} of {stored.name!r} has {location.nbytes} bytes; expected {expected}; it "
            "was cut off or its metadata is damaged: restore it from a copy, or load another checkpoint",
            key=location.key or None,
            start=location.offset,
            stop=location.offset + location.nbytes,
        )


_NATIVE_BYTES: Final = 128 << 20
"""Limit of the read chunks, and of the indexes of shards, that tensorstore reads from a storage by itself, in bytes.

It allocates both before it knows how many bytes are stored.
"""


class ZarrIndex(ChunkIndex):
    """Locates the read chunks of zarr arrays. Thread-safe.

    tensorstore reads encoded arrays of other software directly from storages that it supports: this
    is a `NativeReader`.
    """

    def __init__(self, tree: TreeMetadata, state: ArraysState, databases: DatabaseCache) -> None:
        """Create an index.

        Args:
            tree: the saved tree.
            state: formats and locations of the arrays of the tree.
            databases: cache of open databases.
        """
        self._tree = tree
        self._state = state
        self._databases = databases
        self._prefix = state.prefix
        self._ends: dict[int, list[int]] = {}  # by leaf: cumulative number of write chunks per extent
        self._decoder: ChunkDecoder | None = None

    @cached_property
    def stored_specs(self) -> Mapping[int, ArraySpec]:
        """See `ChunkIndex.stored_specs`."""
        leaves = self._tree.leaves
        specs = {}
        for leaf, stored in self._state.arrays.items():
            record, spec = leaves[leaf], stored.format.spec
            # Compared by parts, which is faster: there may be hundreds of thousands of arrays.
            if isinstance(record, ArrayRecord) and (record.spec.dtype != spec.dtype or record.spec.shape != spec.shape):
                specs[leaf] = spec
        return specs

    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """See `ChunkIndex.boxes`. Chunks at the end of an array may exceed it.

        Does not look up chunks in a database, but estimates their positions from the extents of the
        array. The positions are exact for uncompressed arrays of this layout whose chunks are in C
        order: if one process wrote the array, or each process wrote a range of rows. Returns
        nothing for an array that is stored with an additional axis, such as text.
        """
        stored = self._stored(leaf)
        format = stored.format
        if len(box.start) != len(format.spec.shape):
            return ()
        shape = format.spec.shape
        if format.inner == shape and box.stop == shape and not any(box.start):
            # Fast path: the whole of one read chunk, common for small arrays.
            key, offset = self._hint(leaf, stored, (0,) * len(shape), 0)
            return (Chunk(key, offset, box, self._is_plain(stored), False, leaf, 0),)
        check_chunk_count(box, format.inner, stored.name)
        return self._chunks(leaf, stored, box)

    def _is_plain(self, stored: ZarrArray) -> bool:
        # The root has checksums of all blocks that this layout wrote. Other software can only store a
        # checksum after each read chunk, which must then be read as a whole.
        return stored.format.direct and (self._state.source == "ckptcore" or not stored.format.checksum)

    def _chunks(self, leaf: int, stored: ZarrArray, box: Box) -> Iterator[Chunk]:
        format, is_plain = stored.format, self._is_plain(stored)
        step = format.inner_stored_bytes if format.direct else 1
        per_chunk = prod(format.inner_grid)
        for index, chunk in iter_chunks(format.chunk, box):
            common = chunk.intersect(box)
            assert common is not None  # the chunk intersects the box
            first = tuple(map(int.__mul__, index, format.inner_grid))
            number = flatten_index(index, format.grid)
            key, offset = self._hint(leaf, stored, index, number)
            for inner, inner_box in iter_chunks(format.inner, common):
                within = flatten_index(tuple(map(int.__sub__, inner, first)), format.inner_grid)
                yield Chunk(key, offset + within * step, inner_box, is_plain, False, leaf, number * per_chunk + within)

    def _hint(self, leaf: int, stored: ZarrArray, index: tuple[int, ...], number: int) -> tuple[str, int]:
        """Return the location of a write chunk, or a sort key if it is unknown."""
        state, format = self._state, stored.format
        if (embedded := state.embedded.get(leaf)) is not None:
            return ("", number) if isinstance(embedded, bytes) else embedded[:2]
        if state.storage == "objects":
            return f"{self._prefix}{stored.prefix}{format.chunk_key(index)}", 0
        if format.direct:
            extents, rows = state.extents, self._rows.get(leaf, ())
            if number == 0 and rows:
                return f"{self._prefix}{extents.files[extents.file[rows[0]]]}", extents.start[rows[0]]
            nbytes = max(1, format.chunk_bytes)
            ends = self._ends.get(leaf)
            if ends is None:
                counts = [-(-(extents.stop[row] - extents.start[row]) // nbytes) for row in rows]
                ends = self._ends[leaf] = list(itertools.accumulate(counts))
            position = bisect.bisect_right(ends, number)
            if position < len(ends):
                row, skipped = rows[position], number - (ends[position - 1] if position else 0)
                return f"{self._prefix}{extents.files[extents.file[row]]}", extents.start[row] + skipped * nbytes
        return self._prefix, number

    @cached_property
    def _rows(self) -> Mapping[int, Sequence[int]]:
        """Row numbers of each leaf's extents."""
        rows: dict[int, list[int]] = {}
        for row, leaf in enumerate(self._state.extents.leaf):
            rows.setdefault(leaf, []).append(row)
        return rows

    def extents(self, leaf: int) -> Iterable[tuple[str, int, int]]:
        """See `ChunkIndex.extents`. Returns the extents of raw arrays, those in objects one at a time.

        Raises:
            CorruptCheckpointError: an array is larger than its extents.
        """
        state = self._state
        stored = state.arrays.get(leaf)
        if stored is None:
            return ()
        format = stored.format
        if state.storage == "objects":
            if state.source == "ckptcore" and format.direct and not format.sharded:
                whole = Box.whole(format.spec.shape)
                check_chunk_count(whole, format.chunk, stored.name)
                prefix = f"{self._prefix}{stored.prefix}"
                return (
                    (f"{prefix}{format.chunk_key(index)}", 0, format.chunk_bytes)
                    for index, _ in iter_chunks(format.chunk, whole)
                )
            return ()
        extents: list[tuple[str, int, int]] = []
        columns, room = state.extents, 0
        for row in self._rows.get(leaf, ()):
            start, stop = columns.start[row], columns.stop[row]
            room += stop - start
            extents.append((f"{self._prefix}{columns.files[columns.file[row]]}", start, stop))
        if state.source == "ckptcore" and format.direct and room < format.spec.nbytes:
            raise CorruptCheckpointError(
                f"{format_path(self._tree.paths[leaf])} is {format.spec} and needs {format.spec.nbytes} bytes, but the "
                f"root states {room}; its metadata is damaged: load another checkpoint"
            )
        return extents

    def chunk_rows(self, leaf: int) -> int | None:
        """See `ChunkIndex.chunk_rows`. Each read chunk is decoded or verified as a whole."""
        stored = self._state.arrays.get(leaf)
        return stored.format.inner[0] if stored is not None and stored.format.inner else None

    def locate(self, chunks: Sequence[Chunk], store: ReadStore) -> ChunkLocations:
        """See `ChunkIndex.locate`. Reads nodes of the database, and the index of each shard once."""
        leaf = chunks[0].leaf
        state, stored = self._state, self._state.arrays[leaf]
        format = stored.format
        if format.chunk == format.spec.shape and not format.sharded and format.direct:
            index = (0,) * len(format.chunk)
            location = locate_chunk(state, leaf, index, store, self._databases)
            if location is not None and location.inline is None:
                expect_length(stored, index, location)
                return ChunkLocations(
                    (location.key,), (location.offset,), checksums={0: CRC32C} if format.checksum else {}
                )
        per_chunk = prod(format.inner_grid)
        rows: dict[int, list[int]] = {}
        for row, chunk in enumerate(chunks):
            rows.setdefault(chunk.number // per_chunk, []).append(row)
        indices = {number: unflatten_index(number, format.grid) for number in rows}
        locations = locate_chunks(state, leaf, list(indices.values()), store, self._databases)
        located = LocatedChunks(format, len(chunks))
        for number, chunk_rows_of in rows.items():
            index = indices[number]
            location = locations[index]
            if location is None:
                located.fill(chunk_rows_of, self._fill(stored, index))
                continue
            if format.direct and (not format.sharded or state.source == "ckptcore"):
                expect_length(stored, index, location)
            if not format.sharded:
                located.add(chunk_rows_of[0], location, location.offset, location.nbytes)
                continue
            shard = self._shard_index(stored, location, store)
            for row in chunk_rows_of:
                inner = chunks[row].number % per_chunk
                # In a dense chunk read chunks are contiguous, so its index, which may be hostile,
                # is not needed.
                if shard is None:
                    nbytes = format.inner_stored_bytes
                    located.add(row, location, location.offset + inner * nbytes, nbytes)
                elif shard.offsets[inner] == MISSING:
                    located.fill([row], self._fill(stored, index))
                else:
                    located.add(row, location, location.offset + int(shard.offsets[inner]), int(shard.lengths[inner]))
        if located.encoded:
            expect_reasonable(stored)
        return located.places()

    def _shard_index(self, stored: ZarrArray, location: ChunkLocation, store: ReadStore) -> ShardIndex | None:
        """Return the index of a shard, or None if its read chunks are contiguous from the first byte on."""
        format = stored.format
        if self._state.source == "ckptcore" and format.direct:
            return None
        length = store.size(location.key) if location.nbytes is None else location.nbytes
        if format.direct and format.inner == format.chunk and length == format.chunk_bytes and format.index_at == "end":
            return None  # one read chunk, and no space for bytes before it
        key = location.key or stored.name
        start, stop = index_range(format, length, key)
        if location.inline is not None:
            data = location.inline[start:stop]
        else:
            data = store.get(location.key, location.offset + start, location.offset + stop)
        return decode_index(format, data, length, key)

    def _fill(self, stored: ZarrArray, index: tuple[int, ...]) -> HostArray:
        """Return the fill value for elements that are not stored.

        Raises:
            CorruptCheckpointError: the format has no fill value, or chunks must not be missing.
        """
        format = stored.format
        if self._state.missing == "error" or format.fill is None:
            raise CorruptCheckpointError(
                f"the chunk {list(index)} of {stored.name!r} is missing; the checkpoint is incomplete: restore it "
                "from a copy, or load another one"
            )
        return np.frombuffer(format.fill, format.spec.numpy_dtype)[:1].reshape(())

    def decode(self, chunk: Chunk, data: bytes) -> Pending[HostArray]:
        """See `ChunkIndex.decode`. Uses tensorstore in memory."""
        decoder = self._decoder
        if decoder is None or decoder.leaf != chunk.leaf:
            from ckptcore_orbax.zarr.chunk_decoding import ChunkDecoder  # delays the import of tensorstore

            decoder = self._decoder = ChunkDecoder(self._state, chunk.leaf)
        return decoder.decode(chunk, data)

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """See `NativeReader.reads`. Excludes large chunks and blosc, which are validated before they are decoded."""
        state = self._state
        if state.source != "other" or state.missing != "error" or leaf not in state.arrays:
            return False
        format = state.arrays[leaf].format
        if format.direct or leaf in state.embedded or max(format.inner_bytes, format.index_bytes) > _NATIVE_BYTES:
            return False
        if is_blosc(inner_array(format)):
            return False
        from ckptcore_orbax.zarr.chunk_decoding import is_native  # delays the import of tensorstore

        return is_native(state, store)

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`."""
        from ckptcore_orbax.zarr.chunk_decoding import read_natively  # delays the import of tensorstore

        return read_natively(self._state, items, buffers, store, self._databases)

    def _stored(self, leaf: int) -> ZarrArray:
        stored = self._state.arrays.get(leaf)
        if stored is None:
            raise CorruptCheckpointError(f"the checkpoint does not locate the array of leaf {leaf}")
        return stored
