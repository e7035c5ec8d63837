"""Reading boxes of arrays: elements that are stored as they are straight into place, all others through tensorstore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from ckptcore.errors import ChecksumError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import ArrayRecord, Box, HostArray, ReadPlan, TileRead
from ckptcore.protocols import ReadStore
from ckptcore_orbax.crc32c import CRC32C
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.zarr.chunk_places import (
    ChunkPlace,
    ChunkPlaces,
    DatabasePlaces,
    EmbeddedPlaces,
    ObjectPlaces,
    SparseObjectPlaces,
    expect_length,
)
from ckptcore_orbax.zarr.chunking import chunks_of
from ckptcore_orbax.zarr.grids import cell_box, expect_countable, flat_index
from ckptcore_orbax.zarr.shard_index import MISSING, ShardIndex, decode_index, index_range
from ckptcore_orbax.zarr.state import ArraysState, StoredName
from ckptcore_orbax.zarr.stored_arrays import stored_box, stored_target
from ckptcore_orbax.zarr.using import using_tensorstore

__all__ = ["Databases", "Target", "fill_missing", "inner_places", "open_database", "open_places", "read_arrays"]

Databases = WeakKeyDictionary[ReadStore, dict[str, Database]]
"""The databases that were opened in a store, by directory: their nodes are read once for all loads from one store."""


@dataclass(frozen=True, slots=True)
class Target:
    """A box of an array and the memory to fill.

    Attributes:
        number: of the item in the plan.
        box: in elements as they are stored.
        buffer: C-contiguous, of the stored dtype and the box's shape.
    """

    number: int
    box: Box
    buffer: HostArray


def read_arrays(
    plan: ReadPlan, state: ArraysState, buffers: Sequence[HostArray], store: ReadStore, databases: Databases
) -> Iterator[int]:
    """Fill buffers; yields the number of each once it is there and verified. `state` is that of the plan.

    Raises:
        CorruptCheckpointError: where bytes are missing or wrong.
    """
    wanted: dict[int, list[Target]] = {}
    for number, (item, buffer) in enumerate(zip(plan.items, buffers, strict=True)):
        stored = state.arrays.get(item.leaf)
        if stored is None:
            raise CorruptCheckpointError(f"the checkpoint does not say where leaf {item.leaf} is stored")
        record = plan.tree.leaves[item.leaf]
        assert isinstance(record, ArrayRecord)  # a plan has no other items
        if not item.box.size:
            yield number
            continue
        spec = stored.form.spec
        target = Target(number, stored_box(item.box, spec), stored_target(buffer, spec))
        wanted.setdefault(item.leaf, []).append(target)
    if not wanted:
        return
    places = open_places(state, store, databases)
    direct = {leaf: targets for leaf, targets in wanted.items() if state.arrays[leaf].form.direct}
    yield from _read_direct(state, direct, places, store)
    decoded = {leaf: targets for leaf, targets in wanted.items() if leaf not in direct}
    if decoded:
        with using_tensorstore():
            from ckptcore_orbax.zarr.decoding import decode_arrays  # tensorstore is imported where it is needed

            yield from decode_arrays(state, decoded, places, store)


def open_places(state: ArraysState, store: ReadStore, databases: Databases) -> ChunkPlaces:
    """What finds the chunks of a checkpoint.

    Raises:
        CorruptCheckpointError: if its database is not there or cannot be read.
    """
    if state.storage == "objects":
        return (ObjectPlaces if state.missing == "error" else SparseObjectPlaces)(store, state.prefix)
    return DatabasePlaces(open_database(state.directory, store, databases))


def open_database(directory: str, store: ReadStore, databases: Databases) -> Database:
    """The database in a directory.

    Raises:
        CorruptCheckpointError: if it is not there or cannot be read.
    """
    opened = databases.setdefault(store, {})
    database = opened.get(directory)
    if database is None:
        try:
            database = opened[directory] = Database.open(store, directory)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(f"the database of the arrays is missing: {error}") from error
    return database


def _read_direct(
    state: ArraysState, wanted: Mapping[int, Sequence[Target]], places: ChunkPlaces, store: ReadStore
) -> Iterator[int]:
    tiles: list[TileRead] = []
    of_tiles: set[int] = set()
    for leaf, targets in wanted.items():
        embedded = state.embedded.get(leaf)
        of_leaf = places if embedded is None else EmbeddedPlaces(embedded)
        found = list(_tiles_of(state, state.arrays[leaf], targets, of_leaf, store))
        tiles.extend(found)
        of_tiles.update([number for tile in found for number, _, _ in tile.targets])
    for targets in wanted.values():
        yield from (target.number for target in targets if target.number not in of_tiles)
    yield from store.read_tiles(tiles)


def _tiles_of(
    state: ArraysState, stored: StoredName, targets: Sequence[Target], places: ChunkPlaces, store: ReadStore
) -> Iterator[TileRead]:
    """The reads that fill targets with elements of one array; what needs no read is filled at once."""
    form = stored.form
    itemsize = form.spec.numpy_dtype.itemsize
    checksum = CRC32C if form.checksum else None
    if not form.sharded and form.chunk == form.spec.shape:
        # One chunk, as small arrays have: found and read without looking for more.
        place = places.first(stored)
        if place is not None and place.inline is None:
            expect_length(stored, (0,) * len(form.chunk), place)
            wanted = tuple([(target.number, target.box, target.buffer) for target in targets])
            yield TileRead(place.key, place.offset, Box.whole(form.chunk), itemsize, wanted, checksum)
            return
    tiles: dict[tuple[str, int], tuple[Box, list[tuple[int, Box, HostArray]]]] = {}
    for target in targets:
        for index, place in places.find(stored, target.box).items():
            for _, tile, extent in inner_places(state, stored, index, place, target.box, store):
                if extent is None or place is None:
                    fill_missing(state, stored, index, tile, [target])
                    continue
                offset, _ = extent
                if place.inline is not None:
                    _take_inline(stored, place.inline, offset, tile, target)
                    continue
                entry = tiles.setdefault((place.key, offset), (tile, []))
                if entry[0] != tile:
                    raise CorruptCheckpointError(
                        f"{stored.name!r} has two chunks at byte {offset} of {place.key}; what describes the arrays is damaged: "
                        "restore it from a copy, or load another checkpoint",
                        key=place.key,
                    )
                entry[1].append((target.number, target.box, target.buffer))
    for (key, offset), (tile, takers) in tiles.items():
        yield TileRead(key, offset, tile, itemsize, tuple(takers), checksum)


def inner_places(
    state: ArraysState,
    stored: StoredName,
    index: tuple[int, ...],
    place: ChunkPlace | None,
    box: Box,
    store: ReadStore,
) -> Iterator[tuple[int, Box, tuple[int, int | None] | None]]:
    """The read chunks of a chunk that a box touches.

    Yields:
        The number of each in its chunk, its box, and where it is in its object: at which byte it begins and how many it has
        (None: up to the end); None where it is missing.
    """
    form = stored.form
    chunk = cell_box(form.chunk, index)
    if place is None:
        yield 0, chunk, None
        return
    if not form.sharded:
        if form.direct:
            expect_length(stored, index, place)
        yield 0, chunk, (place.offset, place.nbytes)
        return
    read = _index_of(state, stored, index, place, store)
    counts = form.inner_grid
    common = box.intersect(chunk)
    assert common is not None  # the box touches the chunk
    first = tuple(map(int.__mul__, index, counts))
    expect_countable(common, form.inner, stored.name)
    for inner, tile in chunks_of(form.inner, common):
        number = flat_index(tuple(map(int.__sub__, inner, first)), counts)
        # In a dense chunk read chunks follow each other, and a table of them, which may be hostile, is not needed.
        if read is None:
            yield number, tile, (place.offset + number * form.inner_stored_bytes, form.inner_stored_bytes)
        elif read.offsets[number] == MISSING:
            yield number, tile, None
        else:
            yield number, tile, (place.offset + int(read.offsets[number]), int(read.lengths[number]))


def _index_of(
    state: ArraysState, stored: StoredName, index: tuple[int, ...], place: ChunkPlace, store: ReadStore
) -> ShardIndex | None:
    """The index of a chunk; None where its read chunks follow each other from its first byte on."""
    form = stored.form
    if state.source == "ckptcore" and form.direct:
        expect_length(stored, index, place)
        return None
    length = store.size(place.key) if place.nbytes is None else place.nbytes
    if form.direct and form.inner == form.chunk and length == form.chunk_bytes and form.index_at == "end":
        return None  # one read chunk, and no byte that could be before it
    key = place.key or stored.name
    start, stop = index_range(form, length, key)
    if place.inline is not None:
        data = place.inline[start:stop]
    else:
        data = store.get(place.key, place.offset + start, place.offset + stop)
    return decode_index(form, data, length, key)


def fill_missing(
    state: ArraysState, stored: StoredName, index: tuple[int, ...], missing: Box, targets: Sequence[Target]
) -> None:
    """Give elements that are not stored the fill value, where the format means that.

    Raises:
        CorruptCheckpointError: where it does not.
    """
    form = stored.form
    if state.missing == "error" or form.fill is None:
        raise CorruptCheckpointError(
            f"the chunk {list(index)} of {stored.name!r} is missing; the checkpoint is not whole: restore it from a copy, or load "
            "another one"
        )
    value = np.frombuffer(form.fill, form.spec.numpy_dtype)[0]
    for target in targets:
        if (common := target.box.intersect(missing)) is not None:
            target.buffer[common.within(target.box)] = value


def _take_inline(stored: StoredName, data: bytes, offset: int, tile: Box, target: Target) -> None:
    """Copy elements of a chunk that stands with the keys.

    Raises:
        ChecksumError
    """
    form = stored.form
    nbytes = form.inner_bytes
    elements = memoryview(data)[offset : offset + nbytes]
    if form.checksum and CRC32C.encode(CRC32C.of(elements)) != data[offset + nbytes : offset + nbytes + CRC32C.nbytes]:
        raise ChecksumError(
            f"a chunk of {stored.name!r} is not what was written: its CRC32C differs; restore the checkpoint from a copy, or load "
            "another one"
        )
    array = np.frombuffer(elements, form.spec.numpy_dtype.newbyteorder("<")).reshape(tile.shape)
    if (common := target.box.intersect(tile)) is not None:
        target.buffer[common.within(target.box)] = array[common.within(tile)]
