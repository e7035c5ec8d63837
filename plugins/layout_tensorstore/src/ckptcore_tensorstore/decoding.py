"""Decoding arrays that are not stored as they are: tensorstore does, from the storage itself or from memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tensorstore
import xxhash

from ckptcore.errors import ChecksumError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import Box, HostArray
from ckptcore.protocols import ReadStore, StorageAddress
from ckptcore_tensorstore.chunk_places import ChunkPlace, ChunkPlaces
from ckptcore_tensorstore.encoding import open_in_memory
from ckptcore_tensorstore.grids import cell_box, flat_index
from ckptcore_tensorstore.reading import Target, fill_missing
from ckptcore_tensorstore.state import DIGEST_BYTES, ArraysState, StoredName
from ckptcore_tensorstore.zarr import ArrayFormat

__all__ = ["decode_arrays"]

_BATCH_BYTES: Final = 128 << 20
"""Elements that are decoded at a time, in bytes."""

_LEAST_STARTED: Final = 2
"""Chunks that are decoded at a time, however large they are."""

_OPENED: Final = 256
"""Arrays that are opened at a time."""

_MOST_CHUNK_BYTES: Final = 1 << 30
"""A chunk above is decoded only if its array is not much smaller: a hostile one may state any size."""


def decode_arrays(
    state: ArraysState, wanted: Mapping[int, Sequence[Target]], places: ChunkPlaces, store: ReadStore
) -> Iterator[int]:
    """Fill targets; yields the number of each once it is there and verified.

    What this layout wrote is fetched through the store, which verifies it, and decoded in memory; so is everything on a
    storage that tensorstore cannot read. What other software wrote is read by tensorstore from the storage. Several arrays
    are decoded at a time, of so many bytes as `_BATCH_BYTES` says.

    Raises:
        CorruptCheckpointError: where bytes are missing or wrong.
    """
    for leaf in wanted:
        _expect_reasonable(state.arrays[leaf])
    native = _native_store(state, store.address) if state.source == "other" and state.missing == "error" else None
    if native is not None:
        yield from _read_native(state, wanted, native)
    else:
        yield from _decode(state, wanted, places, store)


def _expect_reasonable(stored: StoredName) -> None:
    form = stored.form
    nbytes = Box.whole(form.chunk).size * form.spec.numpy_dtype.itemsize
    if nbytes > max(_MOST_CHUNK_BYTES, 4 * form.spec.nbytes):
        raise CorruptCheckpointError(
            f"{stored.name!r} is {form.spec} and states chunks of {list(form.chunk)} elements, {nbytes} bytes; what describes it "
            "is damaged: restore it from a copy, or load another checkpoint"
        )


def _native_store(state: ArraysState, address: StorageAddress | None) -> Any:
    """The store of tensorstore's own in which the arrays are; None where it knows no such storage."""
    if address is None:
        return None
    try:
        base = tensorstore.KvStore.Spec(f"{address.url}{state.prefix}")
    except ValueError:
        return None
    described = {**base.to_json(), **address.options}
    return {"driver": "ocdbt", "base": described} if state.storage == "ocdbt" else described


def _read_native(state: ArraysState, wanted: Mapping[int, Sequence[Target]], native: Any) -> Iterator[int]:
    # One context for all, so that a database is opened once and its nodes are kept.
    context = tensorstore.Context()
    started: deque[tuple[StoredName, Target, Any]] = deque()
    held = 0
    for leaves in _groups(list(wanted), _OPENED):
        opening = [(leaf, _open_native(state.arrays[leaf], native, context)) for leaf in leaves]
        for leaf, opened in opening:
            stored = state.arrays[leaf]
            with _Telling(stored):
                array = opened.result()
            for target in wanted[leaf]:
                with _Telling(stored):
                    reading = tensorstore.array(target.buffer).write(array[target.box.slices])
                started.append((stored, target, reading))
                held += target.buffer.nbytes
                while held > _BATCH_BYTES and len(started) > _LEAST_STARTED:
                    held -= started[0][1].buffer.nbytes
                    yield _finished(*started.popleft())
    while started:
        yield _finished(*started.popleft())


def _groups(leaves: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(leaves), size):
        yield leaves[start : start + size]


def _open_native(stored: StoredName, native: Any, context: Any) -> Any:
    kvstore = {**native, "path": f"{native.get('path', '')}{stored.prefix}"}
    driver = "zarr3" if stored.form.zarr_format == 3 else "zarr"
    spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}
    with _Telling(stored):
        return tensorstore.open(spec, open=True, read=True, context=context)


def _finished(stored: StoredName, target: Target, reading: Any) -> int:
    with _Telling(stored):
        reading.result()
    return target.number


@dataclass(frozen=True, slots=True)
class _Decoding:
    """A chunk that is being decoded.

    Attributes:
        leaf: of its array.
        index: of the chunk.
        valid: its box as far as the array goes.
        elements: that are being filled.
        reading: what fills them.
        decoder: of its array.
        targets: that want some of them.
    """

    leaf: int
    index: tuple[int, ...]
    valid: Box
    elements: HostArray
    reading: Any
    decoder: _ChunkDecoder
    targets: Sequence[Target]


def _decode(
    state: ArraysState, wanted: Mapping[int, Sequence[Target]], places: ChunkPlaces, store: ReadStore
) -> Iterator[int]:
    """Decode the chunks that targets touch, each once and whole, and copy what is wanted of them."""
    started: deque[_Decoding] = deque()
    waiting: dict[int, int] = {}
    held = 0

    def finish() -> Iterator[int]:
        nonlocal held
        decoding = started.popleft()
        held -= decoding.elements.nbytes
        _take(state, decoding)
        waiting[decoding.leaf] -= 1
        if not waiting[decoding.leaf]:
            yield from (target.number for target in wanted[decoding.leaf])

    for leaf, targets in wanted.items():
        stored = state.arrays[leaf]
        touched: dict[tuple[int, ...], tuple[ChunkPlace | None, list[Target]]] = {}
        for target in targets:
            for index, place in places.find(stored, target.box).items():
                touched.setdefault(index, (place, []))[1].append(target)
        waiting[leaf] = sum(place is not None for place, _ in touched.values())
        decoder = _ChunkDecoder(stored)
        for index, (place, takers) in touched.items():
            outer = cell_box(stored.form.chunk, index)
            if place is None:
                fill_missing(state, stored, index, outer, takers)
                continue
            data = place.inline if place.inline is not None else _fetch(place, store)
            started.append(decoder.start(leaf, index, data, outer, takers))
            held += started[-1].elements.nbytes
            while held > _BATCH_BYTES and len(started) > _LEAST_STARTED:
                yield from finish()
        if not waiting[leaf]:
            yield from (target.number for target in targets)
    while started:
        yield from finish()


def _take(state: ArraysState, decoding: _Decoding) -> None:
    """Wait for a chunk, verify it and copy its elements to the targets."""
    stored = state.arrays[decoding.leaf]
    with _Telling(stored):
        decoding.reading.result()
    decoding.decoder.forget(decoding.index)
    digests = state.digests.get(decoding.leaf)
    if digests is not None:
        _verify(stored, decoding.index, decoding.elements, digests)
    for target in decoding.targets:
        if (common := target.box.intersect(decoding.valid)) is not None:
            target.buffer[common.within(target.box)] = decoding.elements[common.within(decoding.valid)]


def _fetch(place: ChunkPlace, store: ReadStore) -> bytes:
    stop = None if place.nbytes is None else place.offset + place.nbytes
    try:
        return store.get(place.key, place.offset, stop)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(f"a chunk is missing: {error}", key=place.key) from error


def _verify(stored: StoredName, index: tuple[int, ...], elements: HostArray, digests: bytes) -> None:
    number = flat_index(index, stored.form.grid)
    expected = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
    found = xxhash.xxh3_64_digest(elements.reshape(-1).view(np.uint8).data)
    if found != expected:
        raise ChecksumError(
            f"the chunk {list(index)} of {stored.name!r} was not decoded to what was saved: expected xxh3_64:{expected.hex()}, "
            f"found {found.hex()}; restore the checkpoint from a copy, or load another one"
        )


class _ChunkDecoder:
    """Decodes chunks of one array in memory."""

    def __init__(self, stored: StoredName) -> None:
        self._stored = stored
        self._form: ArrayFormat = stored.form
        with _Telling(stored):
            self._array, self._memory = open_in_memory(stored.form)

    def start(self, leaf: int, index: tuple[int, ...], data: bytes, outer: Box, targets: Sequence[Target]) -> _Decoding:
        """Begin to decode a chunk, whose box is `outer`."""
        valid = outer.intersect(Box.whole(self._form.spec.shape))
        assert valid is not None  # a box of the array touches it
        elements = np.empty(valid.shape, self._form.spec.numpy_dtype)
        with _Telling(self._stored):
            self._memory.write(self._form.chunk_key(index), data).result()
            reading = tensorstore.array(elements).write(self._array[valid.slices])
        return _Decoding(leaf, index, valid, elements, reading, self, targets)

    def forget(self, index: tuple[int, ...]) -> None:
        """Let go of the bytes of a chunk."""
        self._memory.write(self._form.chunk_key(index), None).result()


class _Telling:
    """Turns what tensorstore raises into an error that names the array."""

    __slots__ = ("_stored",)

    def __init__(self, stored: StoredName) -> None:
        self._stored = stored

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError | OSError | IndexError | NotImplementedError) and not isinstance(
            error, CorruptCheckpointError
        ):
            text = str(error).split("[source locations", 1)[0].strip()
            raise CorruptCheckpointError(
                f"{self._stored.name!r} cannot be decoded: {text}; restore the checkpoint from a copy, or load another one"
            ) from error
