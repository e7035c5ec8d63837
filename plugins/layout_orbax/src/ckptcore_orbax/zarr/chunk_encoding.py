"""Encodes chunks of compressed arrays, several read chunks at a time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from ckptcore.errors import AtomicityError
from ckptcore.model import ArraySegment, Box, BytesSegment, HostArray, Segment
from ckptcore.protocols import Snapshot
from ckptcore_orbax.zarr.chunking import iter_chunks
from ckptcore_orbax.zarr.codecs import max_encoded_bytes
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.shard_index import ShardIndex, encode_index
from ckptcore_orbax.zarr.stored_arrays import stored_box, stored_view
from ckptcore_orbax.zarr.tensorstore_guard import using_tensorstore

if TYPE_CHECKING:
    from ckptcore_orbax.zarr.chunk_codec import EncodingChunk


class ChunkSource:
    """One array of a snapshot. Takes the array for its first chunk, and releases it after the last. Thread-safe.

    Attributes:
        leaf: number of the leaf in the tree.
        name: name of the array.
        format: format in which the array is stored.
        chunks: index and box of each chunk that this process writes. A box may exceed the array.
    """

    def __init__(self, snapshot: Snapshot, item: int, name: str, format: ArrayFormat) -> None:
        """Plan the chunks. Does not take the array yet.

        Args:
            snapshot: the snapshot.
            item: number of the array in the snapshot's plan.
            name: name of the array, for errors.
            format: format in which the array is stored.

        Raises:
            AtomicityError: this process has only a part of a chunk.
        """
        planned = snapshot.plan.items[item]
        self.leaf = planned.leaf
        self.name = name
        self.format = format
        self._snapshot = snapshot
        self._item = item
        self._boxes = [stored_box(box, format.spec) for box in planned.boxes]
        self._whole = Box.whole(format.spec.shape)
        self._boxes_of_chunk: dict[tuple[int, ...], list[int]] = {}
        self.chunks = self._plan_chunks()
        self._arrays: Sequence[tuple[Box, HostArray]] | None = None
        self._left = 0
        self._lock = threading.Lock()

    def _plan_chunks(self) -> Sequence[tuple[tuple[int, ...], Box]]:
        """Return the index and box of each chunk of this process, in C order; boxes may exceed the array."""
        chunk = self.format.chunk
        if self._boxes == [self._whole]:
            return list(iter_chunks(chunk, self._whole))
        # A process may have hundreds of boxes of an array, so each chunk is compared only with
        # intersecting boxes.
        touched: dict[tuple[int, ...], Box] = {}
        for number, box in enumerate(self._boxes):
            for index, outer in iter_chunks(chunk, box):
                touched[index] = outer
                self._boxes_of_chunk.setdefault(index, []).append(number)
        parts = []
        for index, outer in sorted(touched.items()):
            wanted = outer.intersect(self._whole)
            common_boxes = [self._boxes[number].intersect(outer) for number in self._boxes_of_chunk[index]]
            sizes = [common.size for common in common_boxes if common is not None]
            if wanted is None or sum(sizes) != wanted.size:
                raise AtomicityError(
                    f"{self.name}: this process has only a part of the chunk {list(index)} of {list(chunk)} "
                    "elements, and no two processes can write one chunk: the cuts that its leaf handler describes "
                    "are not those of its shards"
                )
            parts.append((index, outer))
        return parts

    def inner_boxes(self, outer: Box) -> Iterator[Box]:
        """Yield the read chunks of a chunk, in C order."""
        if not self.format.sharded:
            yield outer
            return
        for _, box in iter_chunks(self.format.inner, outer):
            yield box

    def expect_segments(self, segments: int) -> None:
        """Set the number of segments that will be opened and closed. Releases the array if there are none."""
        self._left = segments
        if not segments:
            self._snapshot.release(self._item)

    def opener(self, box: Box) -> Callable[[], Sequence[tuple[Box, HostArray]]]:
        """Return a function that returns the parts of a box; see `parts`."""
        return lambda: self.parts(box)

    def parts(self, box: Box) -> Sequence[tuple[Box, HostArray]]:
        """Return the boxes and arrays that form a box, with zeros outside the array."""
        arrays = self._take()
        if len(arrays) == 1 and arrays[0][0] == box:
            return arrays
        return [*self.filled_parts(box), *self._padding(box)]

    def filled_parts(self, box: Box) -> list[tuple[Box, HostArray]]:
        """Return the boxes and arrays that form the part of a box inside the array. The box must be in one chunk."""
        arrays = self._take()
        if self._boxes_of_chunk:
            index = tuple(map(int.__floordiv__, box.start, self.format.chunk))
            arrays = [arrays[number] for number in self._boxes_of_chunk[index]]
        parts = []
        for box_part, array in arrays:
            if (common := box_part.intersect(box)) is not None:
                parts.append((common, array[common.within(box_part)]))
        return parts

    def gather(self, box: Box, memory: HostArray) -> HostArray:
        """Return a copy of the elements of a box that are inside the array: little endian, in C order.

        Always a copy: the array may change between the digest of the elements and their encoding.

        Args:
            box: a read chunk.
            memory: bytes for the elements. New memory is taken if they are too few, or more than twice as many.
        """
        valid = box.intersect(self._whole)
        assert valid is not None  # every chunk contains elements of the array
        dtype = self.format.spec.numpy_dtype.newbyteorder("<")
        nbytes = valid.size * dtype.itemsize
        if not nbytes <= len(memory) <= 2 * nbytes:
            memory = np.empty(nbytes, np.uint8)
        whole = memory[:nbytes].view(dtype).reshape(valid.shape)
        for part, array in self.filled_parts(valid):
            whole[part.within(valid)] = array
        return whole

    def _padding(self, box: Box) -> Iterator[tuple[Box, HostArray]]:
        """Yield boxes of zeros that form the part of a box outside the array."""
        zero = np.zeros((), self.format.spec.numpy_dtype)
        start, stop = list(box.start), list(box.stop)
        for axis, extent in enumerate(self._whole.stop):
            if stop[axis] > extent:
                beyond = Box((*start[:axis], max(start[axis], extent), *start[axis + 1 :]), tuple(stop))
                if prod(beyond.shape):
                    yield beyond, np.broadcast_to(zero, beyond.shape)
                stop[axis] = max(start[axis], extent)

    def _take(self) -> Sequence[tuple[Box, HostArray]]:
        with self._lock:
            if self._arrays is None:
                taken = self._snapshot.take(self._item)
                self._arrays = [
                    (box, stored_view(array, self.format.spec)) for box, array in zip(self._boxes, taken, strict=True)
                ]
            return self._arrays

    def close(self) -> None:
        """Count a segment as written or abandoned. The last one releases the array."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
            self._arrays = None
        self._snapshot.release(self._item)


ENCODED_FILE_BYTES: Final = 64 << 20
"""Approximate bytes of encoded chunks that wait to be written, and maximum bytes of a data file of encoded chunks."""

_STARTED_BYTES: Final = 64 << 20
"""Maximum size of elements being encoded at a time, in bytes, unless only `_MIN_STARTED` chunks are being encoded."""

_MIN_STARTED: Final = 2
"""Minimum number of read chunks being encoded at a time, regardless of size."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """An encoded chunk.

    Attributes:
        source: the array.
        index: index of the chunk.
        pieces: the encoded bytes.
        digests: xxh3_64 of the elements of each read chunk, in C order; zero outside the array.
    """

    source: ChunkSource
    index: tuple[int, ...]
    pieces: Sequence[bytes | memoryview]
    digests: bytes

    @property
    def nbytes(self) -> int:
        """Encoded size, in bytes."""
        return sum(map(len, self.pieces))

    @property
    def segments(self) -> Sequence[Segment]:
        """The bytes as segments."""
        return list(map(BytesSegment, self.pieces))


@dataclass(frozen=True, slots=True)
class BoundedChunk:
    """Placeholder for an encoded chunk of maximum size, without elements.

    Attributes:
        source, index: as in `EncodedChunk`.
        nbytes: maximum encoded size.
        digests: zeros, as many bytes as the real digests have.
        release: called once the chunk has been stored.
    """

    source: ChunkSource
    index: tuple[int, ...]
    nbytes: int
    digests: bytes
    release: Callable[[], None]

    @property
    def segments(self) -> Sequence[Segment]:
        """A segment of the maximum size. Opening it requests the elements, which do not exist."""
        box = Box((0,), (self.nbytes,))
        return (ArraySegment(box, 1, self.source.opener(box), self.release),)


@dataclass(slots=True)
class _PartialChunk:
    """A chunk whose read chunks are being encoded."""

    source: ChunkSource
    index: tuple[int, ...]
    pending: int
    parts: list[Sequence[bytes | memoryview]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


def encode_chunks(sources: Sequence[ChunkSource]) -> Generator[EncodedChunk, None, None]:
    """Yield the encoded chunks of arrays, in order.

    Encodes at most about `_STARTED_BYTES` of elements at a time, but always at least two read chunks.

    Close the generator before the memory of the arrays is released: encoding in progress reads it.
    """
    if not sources:
        return
    with using_tensorstore():
        yield from _encode(sources)


def bound_chunks(sources: Sequence[ChunkSource]) -> Generator[BoundedChunk, None, None]:
    """Yield placeholders of maximum size for the chunks of `encode_chunks`, without reading elements."""
    for source in sources:
        format = source.format
        source.expect_segments(len(source.chunks))
        cells = prod(format.inner_grid)
        nbytes = cells * max_encoded_bytes(format.inner_bytes) + format.index_bytes
        for index, _ in source.chunks:
            yield BoundedChunk(source, index, nbytes, bytes(8 * cells), _call_once(source.close))


def encode_buffer_bytes(sources: Sequence[ChunkSource]) -> int:
    """Return the maximum memory of `encode_chunks` and of its unwritten results, without the arrays, in bytes."""
    if not sources:
        return 0
    largest = max(prod(source.format.inner_grid) * max_encoded_bytes(source.format.inner_bytes) for source in sources)
    chunks = [(len(source.chunks) * prod(source.format.inner_grid), source.format.inner_bytes) for source in sources]
    total = sum([count * max_encoded_bytes(nbytes) for count, nbytes in chunks])
    inner = max(source.format.inner_bytes for source in sources)
    return min(2 * total, _STARTED_BYTES + _MIN_STARTED * inner + 3 * (ENCODED_FILE_BYTES + largest))


def _call_once(close: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `close` on its first call only.

    The function can be called repeatedly, because a chunk is stored once per name of its array.
    """
    calls = iter([close])

    def release() -> None:
        for call in calls:
            call()

    return release


def _encode(sources: Sequence[ChunkSource]) -> Iterator[EncodedChunk]:
    from ckptcore_orbax.zarr.chunk_codec import ChunkCodec  # delays the import of tensorstore

    started: deque[tuple[_PartialChunk, int, EncodingChunk, HostArray]] = deque()
    started_bytes = 0
    free: list[HostArray] = []  # memory that was faulted in, for the elements of further chunks
    encoders = threading.Semaphore(os.cpu_count() or 1)  # each thread has a context of zstd

    def finish() -> Iterator[EncodedChunk]:
        nonlocal started_bytes
        assembly, number, encoding, elements = started[0]
        assembly.parts[number] = encoding.result()
        started.popleft()  # last: after an interrupt, `finally` waits for the chunks in `started`
        started_bytes -= len(elements)
        if not encoding.keeps_elements:
            free.append(elements if elements.base is None else elements.base)  # whole, so that chunks count all of it
        assembly.pending -= 1
        if not assembly.pending:
            assembly.source.close()
            yield _join_parts(assembly)

    try:
        for source in sources:
            format = source.format
            source.expect_segments(len(source.chunks))
            codec = ChunkCodec(source.name, format)
            whole = Box.whole(format.spec.shape)
            for index, outer in source.chunks:
                boxes = [(box, box.intersect(whole)) for box in source.inner_boxes(outer)]
                assembly = _PartialChunk(source, index, sum(valid is not None for _, valid in boxes))
                assembly.parts = [()] * len(boxes)
                assembly.digests = [bytes(8)] * len(boxes)
                for number, (box, valid) in enumerate(boxes):
                    if valid is None:
                        continue
                    elements = source.gather(box, free.pop() if free else np.empty(0, np.uint8))
                    memory = elements.reshape(-1).view(np.uint8)
                    assembly.digests[number] = xxhash.xxh3_64_digest(memory.data)
                    part = Box(
                        tuple(map(int.__sub__, valid.start, box.start)), tuple(map(int.__sub__, valid.stop, box.start))
                    )
                    started.append((assembly, number, codec.encode(part, elements, encoders), memory))
                    started_bytes += len(memory)
                    while started_bytes > _STARTED_BYTES and len(started) > _MIN_STARTED:
                        yield from finish()
        while started:
            yield from finish()
    finally:
        # After an error tensorstore may still be reading memory that is about to be freed.
        for _, _, left, _ in started:
            left.settle()


def _join_parts(assembly: _PartialChunk) -> EncodedChunk:
    format = assembly.source.format
    parts = assembly.parts
    pieces = list(chain.from_iterable(parts))
    if format.sharded:
        lengths = np.array([sum(map(len, part)) for part in parts], np.int64)
        offsets = np.cumsum(lengths) - lengths + (format.index_bytes if format.index_at == "start" else 0)
        offsets[[not part for part in parts]] = -1
        table = encode_index(format, ShardIndex(offsets, lengths))
        pieces.insert(0 if format.index_at == "start" else len(pieces), table)
    return EncodedChunk(assembly.source, assembly.index, pieces, b"".join(assembly.digests))
