"""Chunk index of zarr arrays, whose chunks are objects or values of an OCDBT database."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import (
    ArrayRecord,
    ArraySpec,
    Box,
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
from ckptcore_orbax.zarr.array_files import inner_array
from ckptcore_orbax.zarr.chunk_locations import (
    ChunkLocation,
    DatabaseCache,
    LocatedChunks,
    expect_length,
    locate_chunk,
    locate_chunks,
)
from ckptcore_orbax.zarr.chunk_sizes import expect_reasonable
from ckptcore_orbax.zarr.chunking import check_chunk_count, flatten_index, iter_chunks, unflatten_index
from ckptcore_orbax.zarr.codecs import is_blosc, is_framed
from ckptcore_orbax.zarr.shard_index import MISSING, ShardIndex, decode_index, index_range
from ckptcore_orbax.zarr.state import ArraysState, BoxRead, ZarrArray

if TYPE_CHECKING:
    from ckptcore_orbax.zarr.chunk_decoding import ChunkDecoder


_NATIVE_BYTES: Final = 128 << 20
"""Maximum size of read chunks and of shard indexes that tensorstore reads directly from a storage, in bytes.

tensorstore allocates memory for them before it knows how many bytes are stored.
"""


class ZarrIndex(ChunkIndex):
    """Locates the read chunks of zarr arrays. Thread-safe.

    It is also a `NativeReader` of encoded arrays of other software: `read_frames` reads zstd frames in local files, and
    tensorstore reads others directly from storages that it supports.
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
        self._framed: dict[int, bool] = {}  # by leaf

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
        array. The positions are exact for uncompressed arrays of this layout whose chunks are in C order, which is the
        case if one process wrote the array, or if each process wrote a range of rows. Returns nothing for an array that
        is stored with an additional axis, such as text.
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
        """See `ChunkIndex.extents`. Of chunks in objects, yields only raw chunks of this layout without shards.

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
        """See `NativeReader.reads`.

        Includes zstd frames of any size in local files, because `read_frames` limits the memory. Of other chunks,
        excludes large ones and blosc, which are validated before they are decoded.
        """
        state = self._state
        if state.source != "other" or state.missing != "error" or leaf not in state.arrays:
            return False
        format = state.arrays[leaf].format
        if format.direct or leaf in state.embedded:
            return False
        if self._is_framed(leaf, store):
            return True
        if max(format.inner_bytes, format.index_bytes) > _NATIVE_BYTES or is_blosc(inner_array(format)):
            return False
        from ckptcore_orbax.zarr.chunk_decoding import is_native  # delays the import of tensorstore

        return is_native(state, store)

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`."""
        frames: dict[int, list[BoxRead]] = {}
        others: dict[int, list[BoxRead]] = {}
        for number, (item, buffer) in enumerate(zip(items, buffers, strict=True)):
            into = frames if self._is_framed(item.leaf, store) else others
            into.setdefault(item.leaf, []).append(BoxRead(number, item.box, buffer))
        if frames:
            from ckptcore_orbax.zarr.frame_reading import read_frames  # needs zstandard

            yield from read_frames(self._state, frames, self, store)
        if others:
            from ckptcore_orbax.zarr.chunk_decoding import read_natively  # delays the import of tensorstore

            yield from read_natively(self._state, others, store, self._databases)

    def _is_framed(self, leaf: int, store: ReadStore) -> bool:
        """Return True if chunks are zstd frames in local files. tensorstore has more requests to a remote storage."""
        if store.address is None or not store.address.url.startswith("file:"):
            return False
        framed = self._framed.get(leaf)
        if framed is None:  # 40 us, and there may be many boxes of an array
            framed = self._framed[leaf] = is_framed(inner_array(self._state.arrays[leaf].format))
        return framed

    def _stored(self, leaf: int) -> ZarrArray:
        stored = self._state.arrays.get(leaf)
        if stored is None:
            raise CorruptCheckpointError(f"the checkpoint does not locate the array of leaf {leaf}")
        return stored
