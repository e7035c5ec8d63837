"""Chunk index of zarr arrays, whose chunks are objects or values of an OCDBT database."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import (
    ArrayRecord,
    ArraySpec,
    Box,
    Chunk,
    ChunkPlaces,
    HostArray,
    Pending,
    ReadItem,
    TreeMetadata,
    format_path,
)
from ckptcore.protocols import ChunkIndex, ReadStore
from ckptcore_orbax.crc32c import CRC32C
from ckptcore_orbax.zarr.chunk_places import ChunkPlace, Databases, FoundChunks, expect_length, find_chunk, find_chunks
from ckptcore_orbax.zarr.chunking import chunks_of, expect_countable, flat_index, unflat_index
from ckptcore_orbax.zarr.codecs import is_blosc
from ckptcore_orbax.zarr.shard_index import MISSING, ShardIndex, decode_index, index_range
from ckptcore_orbax.zarr.state import ArraysState, StoredName
from ckptcore_orbax.zarr.version3 import inner_array

if TYPE_CHECKING:
    from ckptcore_orbax.zarr.decoding import ChunkDecoder

__all__ = ["ZarrIndex"]


class ZarrIndex(ChunkIndex):
    """Locates the read chunks of zarr arrays. Thread-safe.

    tensorstore reads encoded arrays of other software directly from storages that it supports: this
    is a `NativeReader`.
    """

    def __init__(self, tree: TreeMetadata, state: ArraysState, databases: Databases) -> None:
        """Create an index.

        Args:
            tree: the saved tree.
            state: storage of its arrays.
            databases: cache of open databases.
        """
        self._tree = tree
        self._state = state
        self._databases = databases
        self._prefix = state.prefix
        self._ends: dict[int, list[int]] = {}  # by leaf: cumulated number of write chunks per extent
        self._decoder: ChunkDecoder | None = None

    @cached_property
    def stored_specs(self) -> Mapping[int, ArraySpec]:
        """See `ChunkIndex.stored_specs`."""
        leaves = self._tree.leaves
        found = {}
        for leaf, stored in self._state.arrays.items():
            record, spec = leaves[leaf], stored.form.spec
            # Compared by parts, which is faster: there may be hundreds of thousands of arrays.
            if isinstance(record, ArrayRecord) and (record.spec.dtype != spec.dtype or record.spec.shape != spec.shape):
                found[leaf] = spec
        return found

    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """See `ChunkIndex.boxes`. Chunks at the end of an array may exceed it.

        Does not look up values of a database: chunks written by this layout are in C order if one
        process wrote an array, or several wrote its rows. Returns nothing for an array that is
        stored with an additional axis, such as text.
        """
        stored = self._stored(leaf)
        form = stored.form
        if len(box.start) != len(form.spec.shape):
            return ()
        shape = form.spec.shape
        if form.inner == shape and box.stop == shape and not any(box.start):
            # Fast path: the whole of one read chunk, common for small arrays.
            key, offset = self._hint(leaf, stored, (0,) * len(shape), 0)
            return (Chunk(key, offset, box, self._is_plain(stored), False, leaf, 0),)
        expect_countable(box, form.inner, stored.name)
        return self._chunks(leaf, stored, box)

    def _is_plain(self, stored: StoredName) -> bool:
        # The root has checksums of blocks written by this layout. Other software stores them after
        # each read chunk.
        return stored.form.direct and (self._state.source == "ckptcore" or not stored.form.checksum)

    def _chunks(self, leaf: int, stored: StoredName, box: Box) -> Iterator[Chunk]:
        form, is_plain = stored.form, self._is_plain(stored)
        step = form.inner_stored_bytes if form.direct else 1
        per_chunk = prod(form.inner_grid)
        for index, chunk in chunks_of(form.chunk, box):
            common = chunk.intersect(box)
            assert common is not None  # the chunk intersects the box
            first = tuple(map(int.__mul__, index, form.inner_grid))
            number = flat_index(index, form.grid)
            key, offset = self._hint(leaf, stored, index, number)
            for inner, inner_box in chunks_of(form.inner, common):
                within = flat_index(tuple(map(int.__sub__, inner, first)), form.inner_grid)
                yield Chunk(key, offset + within * step, inner_box, is_plain, False, leaf, number * per_chunk + within)

    def _hint(self, leaf: int, stored: StoredName, index: tuple[int, ...], number: int) -> tuple[str, int]:
        """Return the location of a write chunk, or a sort key if it is unknown."""
        state, form = self._state, stored.form
        if leaf in state.embedded:
            return "", number
        if state.storage == "objects":
            return f"{self._prefix}{stored.prefix}{form.chunk_key(index)}", 0
        if form.direct:
            extents, rows = state.extents, self._rows.get(leaf, ())
            if number == 0 and rows:
                return f"{self._prefix}{extents.files[extents.file[rows[0]]]}", extents.start[rows[0]]
            nbytes = max(1, form.chunk_bytes)
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

    def extents(self, leaf: int) -> Sequence[tuple[str, int, int]]:
        """See `ChunkIndex.extents`. Returns the extents of raw arrays.

        Raises:
            CorruptCheckpointError: an array is larger than its extents.
        """
        state = self._state
        stored = state.arrays.get(leaf)
        if stored is None:
            return ()
        form = stored.form
        found: list[tuple[str, int, int]] = []
        if state.storage == "objects":
            if state.source == "ckptcore" and form.direct and not form.sharded:
                whole = Box.whole(form.spec.shape)
                expect_countable(whole, form.chunk, stored.name)
                for index, _ in chunks_of(form.chunk, whole):
                    found.append((f"{self._prefix}{stored.prefix}{form.chunk_key(index)}", 0, form.chunk_bytes))
            return found
        columns, room = state.extents, 0
        for row in self._rows.get(leaf, ()):
            start, stop = columns.start[row], columns.stop[row]
            room += stop - start
            found.append((f"{self._prefix}{columns.files[columns.file[row]]}", start, stop))
        if state.source == "ckptcore" and form.direct and room < form.spec.nbytes:
            raise CorruptCheckpointError(
                f"{format_path(self._tree.paths[leaf])} is {form.spec} and needs {form.spec.nbytes} bytes, but the "
                f"root states {room}; its metadata is damaged: load another checkpoint"
            )
        return found

    def chunk_rows(self, leaf: int) -> int | None:
        """See `ChunkIndex.chunk_rows`. Each read chunk is decoded or verified as a whole."""
        stored = self._state.arrays.get(leaf)
        return stored.form.inner[0] if stored is not None and stored.form.inner else None

    def locate(self, chunks: Sequence[Chunk], store: ReadStore) -> ChunkPlaces:
        """See `ChunkIndex.locate`. Reads nodes of the database, and the index of each shard once."""
        leaf = chunks[0].leaf
        state, stored = self._state, self._state.arrays[leaf]
        form = stored.form
        if form.chunk == form.spec.shape and not form.sharded and form.direct:
            index = (0,) * len(form.chunk)
            place = find_chunk(state, leaf, index, store, self._databases)
            if place is not None and place.inline is None:
                expect_length(stored, index, place)
                return ChunkPlaces((place.key,), (place.offset,), checksums={0: CRC32C} if form.checksum else {})
        per_chunk = prod(form.inner_grid)
        rows: dict[int, list[int]] = {}
        for row, chunk in enumerate(chunks):
            rows.setdefault(chunk.number // per_chunk, []).append(row)
        indices = {number: unflat_index(number, form.grid) for number in rows}
        places = find_chunks(state, leaf, list(indices.values()), store, self._databases)
        found = FoundChunks(form, len(chunks))
        for number, of_chunk in rows.items():
            index = indices[number]
            place = places[index]
            if place is None:
                found.fill(of_chunk, self._fill(stored, index))
                continue
            if form.direct and (not form.sharded or state.source == "ckptcore"):
                expect_length(stored, index, place)
            if not form.sharded:
                found.add(of_chunk[0], place, place.offset, place.nbytes)
                continue
            shard = self._shard_index(stored, place, store)
            for row in of_chunk:
                inner = chunks[row].number % per_chunk
                # In a dense chunk read chunks are contiguous, so its index, which may be hostile,
                # is not needed.
                if shard is None:
                    nbytes = form.inner_stored_bytes
                    found.add(row, place, place.offset + inner * nbytes, nbytes)
                elif shard.offsets[inner] == MISSING:
                    found.fill([row], self._fill(stored, index))
                else:
                    found.add(row, place, place.offset + int(shard.offsets[inner]), int(shard.lengths[inner]))
        if found.encoded:
            from ckptcore_orbax.zarr.decoding import expect_reasonable  # delays the import of tensorstore

            expect_reasonable(stored)
        return found.places()

    def _shard_index(self, stored: StoredName, place: ChunkPlace, store: ReadStore) -> ShardIndex | None:
        """Return the index of a shard, or None if its read chunks are contiguous from the first byte on."""
        form = stored.form
        if self._state.source == "ckptcore" and form.direct:
            return None
        length = store.size(place.key) if place.nbytes is None else place.nbytes
        if form.direct and form.inner == form.chunk and length == form.chunk_bytes and form.index_at == "end":
            return None  # one read chunk, and no space for bytes before it
        key = place.key or stored.name
        start, stop = index_range(form, length, key)
        if place.inline is not None:
            data = place.inline[start:stop]
        else:
            data = store.get(place.key, place.offset + start, place.offset + stop)
        return decode_index(form, data, length, key)

    def _fill(self, stored: StoredName, index: tuple[int, ...]) -> HostArray:
        """Return the fill value for elements that are not stored.

        Raises:
            CorruptCheckpointError: the format has no fill value, or chunks must not be missing.
        """
        form = stored.form
        if self._state.missing == "error" or form.fill is None:
            raise CorruptCheckpointError(
                f"the chunk {list(index)} of {stored.name!r} is missing; the checkpoint is incomplete: restore it "
                "from a copy, or load another one"
            )
        return np.frombuffer(form.fill, form.spec.numpy_dtype)[:1].reshape(())

    def decode(self, chunk: Chunk, data: bytes) -> Pending[HostArray]:
        """See `ChunkIndex.decode`. Uses tensorstore in memory."""
        decoder = self._decoder
        if decoder is None or decoder.leaf != chunk.leaf:
            from ckptcore_orbax.zarr.decoding import ChunkDecoder  # delays the import of tensorstore

            decoder = self._decoder = ChunkDecoder(self._state, chunk.leaf)
        return decoder.decode(chunk, data)

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """See `NativeReader.reads`. Excludes blosc, whose chunks are validated first and decoded in memory."""
        state = self._state
        if state.source != "other" or state.missing != "error" or leaf not in state.arrays:
            return False
        form = state.arrays[leaf].form
        if form.direct or leaf in state.embedded or is_blosc(inner_array(form)):
            return False
        from ckptcore_orbax.zarr.decoding import is_native  # delays the import of tensorstore

        return is_native(state, store)

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`."""
        from ckptcore_orbax.zarr.decoding import read_natively  # delays the import of tensorstore

        return read_natively(self._state, items, buffers, store, self._databases)

    def _stored(self, leaf: int) -> StoredName:
        stored = self._state.arrays.get(leaf)
        if stored is None:
            raise CorruptCheckpointError(f"the checkpoint does not locate the array of leaf {leaf}")
        return stored
