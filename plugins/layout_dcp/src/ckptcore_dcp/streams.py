"""Reading of arrays in storages: directly, or as a stream if they are deflated or not in C order.

A deflated storage is decompressed from its beginning, in blocks, directly into the arrays that need
its elements. The last stream is kept, because a conversion reads an array in several parts, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

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
    verify_storage,
)
from ckptcore_dcp.stored_tensors import c_strides
from ckptcore_dcp.zip_directories import DEFLATED, STORED, Fetch
from ckptcore_dcp.zips import ZipMember, read_zip

_BLOCK_BYTES: Final = 8 << 20
"""Bytes that are read, or decompressed, at a time."""


def _stored_axes(location: ArrayLocation) -> tuple[int, ...] | None:
    """Return the axes of an array in the order of its storage, or None if its elements have gaps or overlap."""
    tensor = location.tensor
    axes = tuple(sorted(range(len(tensor.shape)), key=lambda axis: (-tensor.strides[axis], axis)))
    shape = tuple([tensor.shape[axis] for axis in axes])
    steps = zip(axes, c_strides(shape), strict=True)
    dense = all(tensor.shape[axis] == 1 or tensor.strides[axis] == step for axis, step in steps)
    return axes if dense else None


class Streams:
    """Reads dense arrays in the order of their storage. Thread-safe."""

    def __init__(self) -> None:
        """Create a reader without an open stream."""
        self._lock = threading.Lock()
        self._kept: _Stream | None = None

    def read(
        self,
        items: Sequence[ReadItem],
        buffers: Sequence[HostArray],
        numbers: Sequence[int],
        location: ArrayLocation,
        axes: tuple[int, ...],
        store: ReadStore,
    ) -> Iterator[int]:
        """Fill the buffers of several items of one array. Yield the number of each item.

        Args:
            items, buffers: see `NativeReader.read`.
            numbers: numbers of the items to read, all of one array.
            location: location of the array.
            axes: the result of `streamed_axes`.
            store: reads the object.

        Raises:
            CorruptCheckpointError: bytes are missing or wrong.
        """
        shape = tuple([location.tensor.shape[axis] for axis in axes])
        targets = [(_permuted(items[number].box, axes), buffers[number].transpose(axes)) for number in numbers]
        start = min(box.start[:1] for box, _ in targets)
        stop = max(box.stop[:1] for box, _ in targets)
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * location.tensor.itemsize
        origin = location.storage.skip + location.tensor.offset * location.tensor.itemsize
        stream = self._take(location.storage, origin + (start[0] * row_bytes if start else 0), store)
        whole = targets[0][1]
        if len(targets) == 1 and targets[0][0].shape[1:] == shape[1:] and whole.flags.c_contiguous:
            stream.read_into(whole.reshape(-1).view(np.uint8).data)
        else:
            step = max(1, _BLOCK_BYTES // max(row_bytes, 1))
            for first in range(start[0], stop[0], step):
                rows = Box((first, *[0] * (len(shape) - 1)), (min(first + step, stop[0]), *shape[1:]))
                scratch: HostArray = np.empty(rows.shape, whole.dtype)
                stream.read_into(scratch.reshape(-1).view(np.uint8).data)
                for box, buffer in targets:
                    if (common := box.intersect(rows)) is not None:
                        buffer[common.within(box)] = scratch[common.within(rows)]
        stream.check()
        with self._lock:
            self._kept = stream
        for number in numbers:
            finish_buffer(location, buffers[number])
            yield number

    def _take(self, storage: StoredBytes, position: int, store: ReadStore) -> _Stream:
        """Return a stream at a position of a storage, counted in decompressed bytes."""
        with self._lock:
            stream, self._kept = self._kept, None
        if stream is None or not stream.reaches(storage, position, store):
            stream = _Stream(storage, lambda start, stop: store.get(storage.key, start, stop), store)
        stream.skip_to(position)
        return stream


def inflated_blocks(member: ZipMember, fetch: Fetch, *, key: str) -> Iterator[bytes]:
    """Yield the content of a deflated member in blocks, and compare its checksum after the last.

    Raises:
        CorruptCheckpointError: it cannot be decompressed, or has another length than stated.
        ChecksumError: the checksum differs.
    """
    stream = _Stream(StoredBytes.of_member(key, member, big_endian=False), fetch, None)
    left = member.size
    while left:
        block = bytearray(min(left, _BLOCK_BYTES))
        stream.read_into(memoryview(block))
        left -= len(block)
        if not left:
            stream.check()
        yield bytes(block)


def _permuted(box: Box, axes: tuple[int, ...]) -> Box:
    return Box(tuple([box.start[axis] for axis in axes]), tuple([box.stop[axis] for axis in axes]))


class _Stream:
    """The decompressed bytes of a storage, in order. Not thread-safe."""

    def __init__(self, storage: StoredBytes, fetch: Fetch, store: ReadStore | None) -> None:
        self._storage = storage
        self._fetch_range = fetch
        self._store = store
        self._position = 0
        self._fetched = storage.start
        self._inflater = isal_zlib.decompressobj(-15) if storage.compression == DEFLATED else None
        self._checksum: int | None = 0  # None after a skip, which leaves out bytes

    def reaches(self, storage: StoredBytes, position: int, store: ReadStore) -> bool:
        """Return True if the stream can continue to a position without a restart."""
        return storage == self._storage and store is self._store and self._position <= position

    def skip_to(self, position: int) -> None:
        """Go forward to a position."""
        if self._inflater is None:
            if position != self._position:
                self._checksum = None
                self._fetched += position - self._position
                self._position = position
            return
        scratch = bytearray(min(position - self._position, _BLOCK_BYTES))
        while self._position < position:
            self.read_into(memoryview(scratch)[: position - self._position])

    def read_into(self, target: memoryview) -> None:
        """Fill a buffer with the next bytes.

        Raises:
            CorruptCheckpointError: there are fewer bytes, or they cannot be decompressed.
        """
        filled = 0
        while filled < len(target):
            data = self._next(len(target) - filled)
            target[filled : filled + len(data)] = data
            filled += len(data)
            self._position += len(data)
            if self._checksum is not None:
                self._checksum = isal_zlib.crc32(data, self._checksum)

    def _next(self, wanted: int) -> bytes:
        """Return at least one, and at most `wanted`, of the next bytes."""
        wanted = min(wanted, _BLOCK_BYTES)
        if self._inflater is None:
            return self._fetch(wanted)
        data = self._inflater.unconsumed_tail
        while True:
            try:
                inflated: bytes = self._inflater.decompress(data, wanted)
            except isal_zlib.error as error:  # type: ignore[misc]  # an exception, which its stubs do not say
                raise self._damaged(str(error)) from error
            if inflated:
                return inflated
            if self._inflater.eof:
                raise self._damaged(f"it ends after {self._position} of {self._storage.size} bytes")
            data = self._fetch(_BLOCK_BYTES)

    def _fetch(self, wanted: int) -> bytes:
        storage = self._storage
        stop = min(self._fetched + wanted, storage.stop)
        data = self._fetch_range(self._fetched, stop) if stop > self._fetched else b""
        if not data or len(data) != stop - self._fetched:
            raise self._damaged(f"it is cut off after {self._fetched + len(data) - storage.start} stored bytes")
        self._fetched = stop
        return data

    def check(self) -> None:
        """Compare the checksum if all bytes were read.

        Raises:
            CorruptCheckpointError: there are more bytes than stated.
            ChecksumError: the checksum differs.
        """
        storage = self._storage
        if self._position != storage.size or self._checksum is None:
            return
        if self._inflater is not None and not self._inflater.eof:
            try:
                left = self._inflater.unconsumed_tail or self._fetch_range(self._fetched, storage.stop)
                more = self._inflater.decompress(left, 1)
            except isal_zlib.error as error:  # type: ignore[misc]  # an exception, which its stubs do not say
                raise self._damaged(str(error)) from error
            if more or not self._inflater.eof:
                raise self._damaged(f"it has more than {storage.size} bytes")
        if storage.crc and self._checksum != storage.crc:
            raise damaged_storage(storage, self._checksum)

    def _damaged(self, reason: str) -> CorruptCheckpointError:
        storage = self._storage
        return CorruptCheckpointError(
            f"bytes {storage.start} to {storage.stop} of {storage.key!r} cannot be read: {reason}; restore the file "
            "from a copy, or load another checkpoint",
            key=storage.key,
            start=storage.start,
            stop=storage.stop,
        )


def streamed_axes(
    numbers: Sequence[int], items: Sequence[ReadItem], locations: Mapping[int, ArrayLocation]
) -> tuple[int, ...] | None:
    """Return the axes in storage order if all items belong to one array that can be streamed; else None.

    The items share a storage.
    """
    location = locations[items[numbers[0]].leaf]
    if any(items[number].leaf != items[numbers[0]].leaf for number in numbers) or not location.tensor.shape:
        return None
    return _stored_axes(location) if location.storage.compression in (STORED, DEFLATED) else None


def verify_other_members(store: ReadStore, key: str, known: Collection[int]) -> None:
    """Verify the checksums of the members of a zip that are not storages of arrays. Does nothing for other files.

    Args:
        store: the store.
        key: the file.
        known: offsets of the members that are verified elsewhere.

    Raises:
        CorruptCheckpointError: a checksum differs, or a member cannot be decompressed.
    """

    def fetch(start: int, stop: int) -> bytes:
        return store.get(key, start, stop)

    if fetch(0, 4) != b"PK\x03\x04":
        return
    for member in read_zip(fetch, 0, store.size(key), key=key).values():
        if member.start in known or not member.crc:
            continue
        if member.compression == STORED:
            verify_storage(StoredBytes.of_member(key, member, big_endian=False), store)
        else:
            for _ in inflated_blocks(member, fetch, key=key):
                pass


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
    storage, see `Streams`, and views 64 MiB at a time. A compressed storage that several arrays share is
    read as a whole, and so is a box whose elements overlap.

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
    """Verify the checksum of a storage if a buffer contains all of it, unless a data descriptor verified it before."""
    storage = location.storage
    if not storage.crc or storage.checksum is not None or buffer.nbytes != storage.nbytes:
        return
    if (checksum := isal_zlib.crc32(buffer.reshape(-1).view(np.uint8))) != storage.crc:
        raise damaged_storage(storage, checksum)


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
