"""Decoding arrays that are not stored as they are: tensorstore does, from the storage itself or from memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

_BATCH_BYTES: Final = 64 << 20
"""Elements that are decoded at a time, in bytes."""

_MOST_CHUNK_BYTES: Final = 1 << 30
"""A chunk above is decoded only if its array is not much smaller: a hostile one may state any size."""


def decode_arrays(
    state: ArraysState, wanted: Mapping[int, Sequence[Target]], places: ChunkPlaces, store: ReadStore
) -> Iterator[int]:
    """Fill targets; yields the number of each once it is there and verified.

    What this layout wrote is fetched through the store, which verifies it, and decoded in memory; so is everything on a
    storage that tensorstore cannot read. What other software wrote is read by tensorstore from the storage.

    Raises:
        CorruptCheckpointError: where bytes are missing or wrong.
    """
    for leaf, targets in wanted.items():
        stored = state.arrays[leaf]
        _expect_reasonable(stored)
        native = _native_store(state, store.address) if state.source == "other" else None
        if native is not None and state.missing == "error":
            yield from _read_native(stored, targets, native)
        else:
            _decode(state, leaf, targets, places, store)
            yield from (target.number for target in targets)


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


def _read_native(stored: StoredName, targets: Sequence[Target], native: Any) -> Iterator[int]:
    form = stored.form
    kvstore = {**native, "path": f"{native.get('path', '')}{stored.prefix}"}
    spec = {
        "driver": "zarr3" if form.zarr_format == 3 else "zarr",
        "kvstore": kvstore,
        "fill_missing_data_reads": False,
    }
    with _Telling(stored):
        array = tensorstore.open(spec, open=True, read=True).result()
        started = [(target, tensorstore.array(target.buffer).write(array[target.box.slices])) for target in targets]
        for target, writing in started:
            writing.result()
            yield target.number


def _decode(state: ArraysState, leaf: int, targets: Sequence[Target], places: ChunkPlaces, store: ReadStore) -> None:
    """Decode the chunks that targets touch, each once and whole, and copy what is wanted of them."""
    stored = state.arrays[leaf]
    form = stored.form
    digests = state.digests.get(leaf)
    wanted: dict[tuple[int, ...], tuple[ChunkPlace | None, list[Target]]] = {}
    for target in targets:
        for index, place in places.find(stored, target.box).items():
            wanted.setdefault(index, (place, []))[1].append(target)
    decoder = _ChunkDecoder(stored)
    whole = Box.whole(form.spec.shape)
    batch: list[tuple[tuple[int, ...], Box, Any, HostArray, Sequence[Target]]] = []
    held = 0

    def finish() -> None:
        for index, valid, reading, elements, takers in batch:
            with _Telling(stored):
                reading.result()
            decoder.forget(index)
            if digests is not None:
                _verify(stored, index, elements, digests)
            for target in takers:
                if (common := target.box.intersect(valid)) is not None:
                    target.buffer[common.within(target.box)] = elements[common.within(valid)]
        batch.clear()

    for index, (place, takers) in wanted.items():
        outer = cell_box(form.chunk, index)
        if place is None:
            fill_missing(state, stored, index, outer, takers)
            continue
        valid = outer.intersect(whole)
        assert valid is not None  # a box of the array touches it
        elements = np.empty(valid.shape, form.spec.numpy_dtype)
        data = place.inline if place.inline is not None else _fetch(place, store)
        with _Telling(stored):
            batch.append((index, valid, decoder.start(index, data, valid, elements), elements, takers))
        held += elements.nbytes
        if held >= _BATCH_BYTES:
            finish()
            held = 0
    finish()


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
        self._form: ArrayFormat = stored.form
        with _Telling(stored):
            self._array, self._memory = open_in_memory(stored.form)

    def start(self, index: tuple[int, ...], data: bytes, valid: Box, elements: HostArray) -> Any:
        """Begin to decode a chunk into `elements`, which are those of the box `valid`."""
        self._memory.write(self._form.chunk_key(index), data).result()
        return tensorstore.array(elements).write(self._array[valid.slices])

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
