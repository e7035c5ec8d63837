"""Reading boxes of arrays: elements that are stored as they are straight into place, all others through tensorstore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore.model import ArrayRecord, Box, HostArray, ReadPlan, TileRead
from ckptcore.protocols import ReadStore
from ckptcore_orbax.crc32c import CRC32C
from ckptcore_orbax.zarr.chunk_places import ChunkPlaces, Databases, EmbeddedPlaces, expect_length, open_places
from ckptcore_orbax.zarr.read_chunks import Target, fill_missing, inner_places
from ckptcore_orbax.zarr.state import ArraysState, StoredName
from ckptcore_orbax.zarr.stored_arrays import stored_box, stored_target
from ckptcore_orbax.zarr.tensorstore_guard import using_tensorstore

__all__ = ["read_arrays"]


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
