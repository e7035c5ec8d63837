"""Decoding arrays that are not stored as they are: from the storage itself, or read chunk by read chunk in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import xxhash

from ckptcore.errors import ChecksumError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import Box, HostArray
from ckptcore.protocols import ReadStore
from ckptcore_orbax.zarr.chunk_codec import ChunkCodec, DecodingChunk
from ckptcore_orbax.zarr.chunk_places import ChunkPlaces
from ckptcore_orbax.zarr.chunking import flat_index
from ckptcore_orbax.zarr.codecs import is_blosc
from ckptcore_orbax.zarr.native_reading import expect_own_files, native_store, read_native
from ckptcore_orbax.zarr.read_chunks import Target, fill_missing, inner_places
from ckptcore_orbax.zarr.state import DIGEST_BYTES, ArraysState, StoredName
from ckptcore_orbax.zarr.version3 import inner_array

__all__ = ["decode_arrays"]

_DECODED_BYTES: Final = 128 << 20
"""Elements that are decoded at a time, in bytes."""

_LEAST_STARTED: Final = 2
"""Read chunks that are decoded at a time, however large they are."""

_FETCHED_BYTES: Final = 32 << 20
"""The most bytes that are fetched at once, of read chunks that lie close to each other."""

_GAP_BYTES: Final = 64 << 10
"""How close that is."""

_MOST_CHUNK_BYTES: Final = 1 << 30
"""A read chunk above is decoded only if its array is not much smaller: a hostile one may state any size."""


@dataclass(frozen=True, slots=True)
class _ReadChunk:
    """A read chunk that is wanted.

    Attributes:
        number: of it in the array: that of its chunk, times the read chunks of a chunk, and its own.
        box: where in the array; may reach beyond it.
        key, start, stop: where its bytes are.
        inline: the bytes of the object, where they stand with the keys.
        targets: that want some of its elements.
    """

    number: int
    box: Box
    key: str
    start: int
    stop: int | None
    inline: bytes | None
    targets: list[Target]


@dataclass(frozen=True, slots=True)
class _Started:
    """A read chunk that is being decoded into `elements`, which are those of `valid`; tensorstore takes `nbytes` for it.

    That is all of the chunk, of which a hostile array may have next to nothing.
    """

    leaf: int
    nbytes: int
    chunk: _ReadChunk
    valid: Box
    elements: HostArray
    decoding: DecodingChunk


def decode_arrays(
    state: ArraysState, wanted: Mapping[int, Sequence[Target]], places: ChunkPlaces, store: ReadStore
) -> Iterator[int]:
    """Fill targets; yields the number of each once it is there and verified.

    What this layout wrote is fetched through the store, which verifies it, and decoded in memory; so is everything on a
    storage that tensorstore cannot read, and what blosc compressed, which is looked at first. What other software wrote else is
    read by tensorstore from the storage.

    Raises:
        CorruptCheckpointError: where bytes are missing or wrong.
    """
    for leaf in wanted:
        _expect_reasonable(state.arrays[leaf])
    native = native_store(state, store.address) if state.source == "other" and state.missing == "error" else None
    if native is not None:
        natively = {leaf: wanted[leaf] for leaf in wanted if not is_blosc(inner_array(state.arrays[leaf].form))}
        expect_own_files(natively, state, places, store)
        yield from read_native(state, natively, native)
        wanted = {leaf: wanted[leaf] for leaf in wanted if leaf not in natively}
    yield from _decode(state, wanted, places, store)


def _expect_reasonable(stored: StoredName) -> None:
    form = stored.form
    if form.inner_bytes > max(_MOST_CHUNK_BYTES, 4 * form.spec.nbytes):
        raise CorruptCheckpointError(
            f"{stored.name!r} is {form.spec} and states read chunks of {list(form.inner)} elements, {form.inner_bytes} bytes; what "
            "describes it is damaged: restore it from a copy, or load another checkpoint"
        )


def _decode(
    state: ArraysState, wanted: Mapping[int, Sequence[Target]], places: ChunkPlaces, store: ReadStore
) -> Iterator[int]:
    """Decode the read chunks that targets touch, each once and whole, and copy what is wanted of them."""
    started: deque[_Started] = deque()
    waiting: dict[int, int] = {}
    held = 0

    def finish() -> Iterator[int]:
        nonlocal held
        oldest = started[0]
        _take(state, oldest)
        started.popleft()  # now that nothing writes to its elements any more, also if it is interrupted
        held -= oldest.nbytes
        waiting[oldest.leaf] -= 1
        if not waiting[oldest.leaf]:
            yield from (target.number for target in wanted[oldest.leaf])

    try:
        for leaf, targets in wanted.items():
            stored = state.arrays[leaf]
            form = stored.form
            chunks = _read_chunks(state, stored, targets, places, store)
            waiting[leaf] = len(chunks)
            codec = ChunkCodec(stored.name, form, state.missing)
            whole = Box.whole(form.spec.shape)
            for chunk, data in _fetched(chunks, store):
                valid = chunk.box.intersect(whole)
                assert valid is not None  # a box of the array touches it
                elements = np.empty(valid.shape, form.spec.numpy_dtype)
                decoding = codec.decode(data, _within(valid, chunk.box), elements)
                started.append(_Started(leaf, form.inner_bytes, chunk, valid, elements, decoding))
                held += started[-1].nbytes
                while held > _DECODED_BYTES and len(started) > _LEAST_STARTED:
                    yield from finish()
            if not chunks:
                yield from (target.number for target in targets)
        while started:
            yield from finish()
    finally:
        # After an error, or where nobody asks for more, tensorstore still writes to memory that is about to be freed.
        for left in started:
            left.decoding.settle()


def _read_chunks(
    state: ArraysState, stored: StoredName, targets: Sequence[Target], places: ChunkPlaces, store: ReadStore
) -> Sequence[_ReadChunk]:
    """The read chunks that targets touch, in the order in which they lie; what is missing is filled at once."""
    form = stored.form
    found: dict[int, _ReadChunk] = {}
    per_chunk = prod(form.inner_grid)
    for target in targets:
        for index, place in places.find(stored, target.box).items():
            first = flat_index(index, form.grid) * per_chunk
            for inner, box, extent in inner_places(state, stored, index, place, target.box, store):
                if extent is None:
                    fill_missing(state, stored, index, box, [target])
                    continue
                chunk = found.get(first + inner)
                if chunk is None:
                    assert place is not None  # what is not there has no extent
                    start, nbytes = extent
                    stop = None if nbytes is None else start + nbytes
                    chunk = _ReadChunk(first + inner, box, place.key, start, stop, place.inline, [])
                    found[first + inner] = chunk
                chunk.targets.append(target)
    return sorted(found.values(), key=lambda chunk: (chunk.key, chunk.start))


def _fetched(chunks: Sequence[_ReadChunk], store: ReadStore) -> Iterator[tuple[_ReadChunk, bytes]]:
    """Read chunks with their bytes; of those that lie close to each other, several are fetched at once."""
    group: list[_ReadChunk] = []
    for chunk in chunks:
        if group and not _follows(group, chunk):
            yield from _fetched_together(group, store)
            group = []
        group.append(chunk)
    if group:
        yield from _fetched_together(group, store)


def _follows(group: Sequence[_ReadChunk], chunk: _ReadChunk) -> bool:
    last = group[-1]
    if chunk.inline is not None or last.key != chunk.key or last.stop is None or chunk.stop is None:
        return False
    return chunk.start - last.stop <= _GAP_BYTES and chunk.stop - group[0].start <= _FETCHED_BYTES


def _fetched_together(group: Sequence[_ReadChunk], store: ReadStore) -> Iterator[tuple[_ReadChunk, bytes]]:
    first = group[0]
    if first.inline is not None:
        yield first, first.inline[first.start : first.stop]
        return
    stop = None if first.stop is None else max(chunk.stop or 0 for chunk in group)
    try:
        data = store.get(first.key, first.start, stop)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(f"a chunk is missing: {error}", key=first.key) from error
    if stop is not None and len(data) != stop - first.start:
        raise CorruptCheckpointError(
            f"{first.key} ends at byte {first.start + len(data)}, where {stop} are expected; it was cut off: restore it from a "
            "copy, or load another checkpoint",
            key=first.key, start=first.start + len(data), stop=stop,
        )  # fmt: skip
    for chunk in group:
        end = None if chunk.stop is None else chunk.stop - first.start
        yield chunk, data[chunk.start - first.start : end] if len(group) > 1 else data


def _take(state: ArraysState, started: _Started) -> None:
    """Wait for a read chunk, verify it and copy its elements to the targets."""
    started.decoding.result()
    digests = state.digests.get(started.leaf)
    if digests is not None:
        _verify(state.arrays[started.leaf], started.chunk, started.elements, digests)
    for target in started.chunk.targets:
        if (common := target.box.intersect(started.valid)) is not None:
            target.buffer[common.within(target.box)] = started.elements[common.within(started.valid)]


def _verify(stored: StoredName, chunk: _ReadChunk, elements: HostArray, digests: bytes) -> None:
    expected = digests[chunk.number * DIGEST_BYTES : (chunk.number + 1) * DIGEST_BYTES]
    found = xxhash.xxh3_64_digest(elements.reshape(-1).view(np.uint8).data)
    if found != expected:
        raise ChecksumError(
            f"the read chunk at {list(chunk.box.start)} of {stored.name!r} was not decoded to what was saved: expected "
            f"xxh3_64:{expected.hex()}, found {found.hex()}; restore the checkpoint from a copy, or load another one"
        )


def _within(box: Box, outer: Box) -> Box:
    """A box relative to the one that it lies in."""
    origin = outer.start
    return Box(tuple(map(int.__sub__, box.start, origin)), tuple(map(int.__sub__, box.stop, origin)))
