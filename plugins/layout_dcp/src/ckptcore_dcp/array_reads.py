"""Reading of arrays in storages: directly, as streams, or gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from isal import isal_zlib

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import Box, ChunkRead, HostArray, ReadItem
from ckptcore.protocols import ReadStore
from ckptcore_dcp.storages import (
    ArrayLocation,
    StoredBytes,
    damaged_storage,
    finish_buffer,
    gather,
    read_storage,
    should_read_whole,
)
from ckptcore_dcp.streams import Streams, streamed_axes
from ckptcore_dcp.zip_directories import STORED, Fetch


def read_arrays(
    items: Sequence[ReadItem],
    buffers: Sequence[HostArray],
    store: ReadStore,
    locations: Mapping[int, ArrayLocation],
    streams: Streams,
) -> Iterator[int]:
    """Fill ``buffers[i]`` with the box of ``items[i]``. Yields `i` when it is complete.

    Uncompressed arrays in C order are copied directly into the destination. The checksum is
    verified if the array is a whole storage and almost all of it is requested (see
    `should_read_whole`). Other arrays are read in the calling thread: dense ones in the order of their
    storage, see `Streams`, and views 64 MiB at a time. Whole storages are read if several arrays share a
    compressed one, and whole boxes if their elements overlap.

    Raises:
        CorruptCheckpointError: bytes are missing or wrong.
    """
    contiguous: dict[int, list[int]] = {}
    gathered: dict[StoredBytes, list[int]] = {}
    for number, item in enumerate(items):
        location = locations.get(item.leaf)
        if location is None:
            raise CorruptCheckpointError(f"the checkpoint has no location for the array of leaf {item.leaf}")
        if not item.box.size:
            yield number
        elif location.is_contiguous:
            contiguous.setdefault(item.leaf, []).append(number)
        else:
            gathered.setdefault(location.storage, []).append(number)
    verified: set[tuple[str, int]] = set()
    reads: list[ChunkRead] = []
    for leaf, numbers in contiguous.items():
        targets = tuple([(number, items[number].box, buffers[number]) for number in numbers])
        reads.append(_chunk_read(locations[leaf], targets, verified))
    for number in store.read_chunks(reads):
        location = locations[items[number].leaf]
        _check_whole(location, buffers[number])
        finish_buffer(location, buffers[number])
        yield number
    for storage, numbers in gathered.items():
        if (axes := streamed_axes(numbers, items, locations)) is not None:
            yield from streams.read(items, buffers, numbers, locations[items[numbers[0]].leaf], axes, store)
            continue
        whole = read_storage(storage, _store_fetch(store, storage.key)) if storage.compression != STORED else None
        for number in numbers:
            item = items[number]
            gather(locations[item.leaf], item.box, buffers[number], store, whole)
            finish_buffer(locations[item.leaf], buffers[number])
            yield number


def _check_whole(location: ArrayLocation, buffer: HostArray) -> None:
    """Compare the checksum of a storage that a buffer has whole, unless it was compared with a data descriptor."""
    storage = location.storage
    if not storage.crc or storage.checksum is not None or buffer.nbytes != storage.nbytes:
        return
    if (found := isal_zlib.crc32(buffer.reshape(-1).view(np.uint8))) != storage.crc:
        raise damaged_storage(storage, found)


def _store_fetch(store: ReadStore, key: str) -> Fetch:
    return lambda start, stop: store.get(key, start, stop)


def _chunk_read(
    location: ArrayLocation, targets: tuple[tuple[int, Box, HostArray], ...], verified: set[tuple[str, int]]
) -> ChunkRead:
    tensor, storage = location.tensor, location.storage
    spec = tensor.spec
    checksum = None
    # The checksum covers the whole storage, so it is verified only if all bytes are read, and only
    # once.
    if (
        tensor.offset == 0
        and spec.nbytes == storage.nbytes
        and should_read_whole([box for _, box, _ in targets], Box.whole(spec.shape), tensor.itemsize)
        and (storage.key, storage.start) not in verified
    ):
        checksum = storage.checksum
        verified.add((storage.key, storage.start))
    return ChunkRead(storage.key, location.extent[0], Box.whole(spec.shape), tensor.itemsize, targets, checksum)
