"""Read chunks: the location of each within its chunk, and the memory that its elements fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import Box, HostArray
from ckptcore.protocols import ReadStore
from ckptcore_orbax.zarr.chunk_places import ChunkPlace, expect_length
from ckptcore_orbax.zarr.chunking import cell_box, chunks_of, expect_countable, flat_index
from ckptcore_orbax.zarr.shard_index import MISSING, ShardIndex, decode_index, index_range
from ckptcore_orbax.zarr.state import ArraysState, StoredName

__all__ = ["Target", "fill_missing", "inner_places"]


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
