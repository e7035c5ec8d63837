"""Reads of boxes of arrays through a chunk index. All layouts use this read path."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np

from ckptcore.errors import ChecksumError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.elements import copy_elements, little_dtype
from ckptcore.model import (
    JSON,
    ArraySpec,
    Box,
    Checksum,
    Chunk,
    ChunkRead,
    HostArray,
    Pending,
    ReadItem,
    TreeMetadata,
)
from ckptcore.planning.chunk_table import ChunkTable
from ckptcore.protocols import ChunkIndex, Layout, NativeReader, ReadStore

_FETCHED_BYTES: Final = 32 << 20
"""Maximum bytes that one request fetches for several encoded chunks."""

_GAP_BYTES: Final = 64 << 10
"""Largest gap between two encoded chunks that one request fetches, in bytes."""

_DECODED_BYTES: Final = 128 << 20
"""Maximum bytes of elements that are being decoded, or are decoded and not yet copied."""

_LEAST_STARTED: Final = 2
"""Number of chunks that may be decoded at a time even if they exceed `_DECODED_BYTES`."""

_BATCH_CHUNKS: Final = 1 << 12
"""Maximum number of chunks of a box that are read at a time. Hostile metadata of a few bytes may state millions."""

_NO_CHUNKS: Final[JSON] = {"files": [], "leaf": [], "file": [], "offset": []}
"""The state of a table without chunks."""

_Target: TypeAlias = tuple[int, Box, HostArray]
"""The number of an item, its box and its buffer."""


class _RequestedChunk(NamedTuple):
    """A chunk, and the targets that need elements of it."""

    chunk: Chunk
    targets: list[_Target]


class StoredFormat:
    """A layout and its state, which locate the arrays of a checkpoint in its objects. Thread-safe.

    Checkpoints that are opened with the same root share one `StoredFormat`, and thus the chunk index.

    Attributes:
        layout: the layout; None for files, which have no arrays.
        state: the state that the layout stored with the tree; for files, their empty directories.
    """

    def __init__(self, layout: Layout | None, state: JSON) -> None:
        """Create no index yet."""
        self.layout = layout
        self.state = state
        self._last: tuple[TreeMetadata, ChunkIndex] | None = None

    def index(self, tree: TreeMetadata) -> ChunkIndex:
        """Return the chunk index of a tree. Caches the last index.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """
        last = self._last  # tree and index are replaced together, so threads need no lock
        if last is None or last[0] is not tree:
            index = ChunkTable(tree, _NO_CHUNKS) if self.layout is None else self.layout.index(tree, self.state)
            last = self._last = (tree, index)
        return last[1]


def read_boxes(
    index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
) -> Iterator[int]:
    """Fill ``buffers[i]`` with the box of ``items[i]``; yields `i` once it is complete and verified.

    Args:
        index: the index of the checkpoint; its state may be hostile.
        items: the boxes to read, in any order.
        buffers: C-contiguous and writable, of the box's shape and the stored dtype.
        store: reads and verifies objects.

    Raises:
        CorruptCheckpointError: bytes are missing or wrong, or chunks do not cover a box.
        UnsupportedLeafError: an array is stored in a way that cannot be read.
    """
    native, specs = native_reader(index), index.stored_specs
    by_index: list[_Target] = []
    by_chunk: dict[tuple[int, int], list[_Target]] = {}
    reads: list[ChunkRead] = []  # chunks at exact positions
    requested: list[_RequestedChunk] = []  # the others
    for number, (item, buffer) in enumerate(zip(items, buffers, strict=True)):
        box = item.box
        if (spec := specs.get(item.leaf)) is not None:
            box, buffer = _as_stored(box, buffer, spec)
        size = missing = buffer.size  # equal to the size of the box, without a Python call
        if native is not None and size and native.reads(item.leaf, store):
            by_index.append((number, box, buffer))
            continue
        chunks = index.boxes(item.leaf, box)
        if not size:
            yield number
            continue
        target = (number, box, buffer)
        waiting = 0
        for chunk in chunks:
            if waiting == _BATCH_CHUNKS:
                # The target `number` is not complete: more of its chunks follow.
                yield from [done for done in _read_chunks(index, store, reads, requested) if done != number]
                by_chunk, reads, requested, waiting = {}, [], [], 0
            if chunk.box is box:
                missing -= size
            elif (common := chunk.box.intersect(box)) is not None:
                missing -= common.size
            else:
                continue
            key = chunk.leaf, chunk.number
            targets = by_chunk.get(key)
            if targets is not None:
                targets.append(target)
            else:
                targets = by_chunk[key] = [target]
                if chunk.is_exact:
                    reads.append(ChunkRead(chunk.key, chunk.offset, chunk.box, buffer.itemsize, targets))
                else:
                    requested.append(_RequestedChunk(chunk, targets))
            waiting += 1
        if missing:
            raise CorruptCheckpointError(
                f"leaf {item.leaf}: {missing} of the {size} elements of a box are in no chunk. Restore the checkpoint "
                "from a copy, or load another one"
            )
        if not waiting:
            yield number
    if by_index and native is not None:
        part = [ReadItem(items[number].leaf, box) for number, box, _ in by_index]
        for position in native.read(part, [buffer for _, _, buffer in by_index], store):
            yield by_index[position][0]
    yield from _read_chunks(index, store, reads, requested)


def _read_chunks(
    index: ChunkIndex, store: ReadStore, reads: list[ChunkRead], requested: Iterable[_RequestedChunk]
) -> Iterator[int]:
    """Read chunks. Yields the number of each target once all of its chunks in both lists are complete."""
    by_leaf: dict[int, list[_RequestedChunk]] = {}
    for request in requested:
        by_leaf.setdefault(request.chunk.leaf, []).append(request)
    return _Located(index, store, reads).results(by_leaf) if by_leaf else iter(store.read_chunks(reads))


def native_reader(index: ChunkIndex) -> NativeReader | None:
    """Return an index as a native reader, or None if it is no native reader."""
    return cast(NativeReader, index) if _is_native(type(index)) else None


@functools.lru_cache(maxsize=64)
def _is_native(kind: type[ChunkIndex]) -> bool:
    """Return True if indexes of a type are `NativeReader`. Cached: the check is slow."""
    return issubclass(kind, NativeReader)


def _as_stored(box: Box, buffer: HostArray, spec: ArraySpec) -> tuple[Box, HostArray]:
    """Return a box and its buffer in the stored dtype, which may have the bytes of an element as a last axis."""
    shape = buffer.shape
    if len(spec.shape) > len(shape):
        box = Box((*box.start, 0), (*box.stop, spec.shape[-1]))
        shape = (*shape, spec.shape[-1])
    return box, buffer.reshape(-1).view(spec.numpy_dtype).reshape(shape)


def _chunk_read(requested: _RequestedChunk, key: str, offset: int, checksum: Checksum | None) -> ChunkRead:
    targets = requested.targets
    return ChunkRead(key, offset, requested.chunk.box, targets[0][2].itemsize, targets, checksum)


class _Encoded(NamedTuple):
    """An encoded chunk: bytes `start` to `stop` of an object, or of `inline` if that is not None."""

    requested: _RequestedChunk
    key: str
    start: int
    stop: int | None
    inline: bytes | None


class _Decoding(NamedTuple):
    """A chunk that is being decoded, and the bytes of its elements."""

    requested: _RequestedChunk
    nbytes: int
    elements: Pending[HostArray]


class _Located:
    """Chunks that the index locates with I/O: raw, encoded, inline, or missing with a fill value."""

    def __init__(self, index: ChunkIndex, store: ReadStore, reads: list[ChunkRead]) -> None:
        self._index = index
        self._store = store
        self._reads = reads
        self._encoded: list[_Encoded] = []
        self._copied: dict[int, None] = {}
        self._left: dict[int, int] = {}

    def results(self, by_leaf: Mapping[int, Sequence[_RequestedChunk]]) -> Iterator[int]:
        """Yield the number of each target once all of its chunks are complete, including exact chunks."""
        for chunks in by_leaf.values():
            self._locate(chunks)
        for encoded in self._encoded:
            for number, _, _ in encoded.requested.targets:
                self._left[number] = self._left.get(number, 0) + 1
        if self._copied:
            in_reads = {number for read in self._reads for number, _, _ in read.targets}
            yield from [number for number in self._copied if number not in in_reads and number not in self._left]
        for number in self._store.read_chunks(self._reads):
            if number not in self._left:
                yield number
        if self._encoded:
            yield from self._decode(self._encoded)

    def _locate(self, chunks: Sequence[_RequestedChunk]) -> None:
        """Locate the chunks of one array. Copies inline chunks and fill values, and collects the others."""
        located = self._index.locate([requested.chunk for requested in chunks], self._store)
        encoded, inline, fills, checksums = located.encoded, located.inline, located.fills, located.checksums
        at: dict[tuple[str, int], Chunk] = {}
        for row, (requested, key, start) in enumerate(zip(chunks, located.keys, located.starts, strict=True)):
            if row in encoded:
                self._encoded.append(_Encoded(requested, key, start, located.stops.get(row), inline.get(row)))
            elif row in fills or row in inline:
                if row in fills:
                    _fill(requested, fills[row])
                else:
                    _copy(requested, _elements(requested, inline[row], start, checksums.get(row)))
                self._copied.update(dict.fromkeys([number for number, _, _ in requested.targets]))
            elif at.setdefault((key, start), requested.chunk) is not requested.chunk:
                raise CorruptCheckpointError(
                    f"leaf {requested.chunk.leaf} has two chunks at byte {start} of {key}: the metadata is damaged. "
                    "Restore the checkpoint from a copy, or load another one",
                    key=key,
                )
            else:
                self._reads.append(_chunk_read(requested, key, start, checksums.get(row)))

    def _decode(self, encoded: Sequence[_Encoded]) -> Iterator[int]:
        """Decode whole chunks, each once and several at a time, and copy their elements to targets."""
        started: deque[_Decoding] = deque()
        decoded_bytes = 0
        try:
            for requested, data in _fetched(encoded, self._store):
                nbytes = max(requested.chunk.box.size, 1) * requested.targets[0][2].itemsize
                started.append(_Decoding(requested, nbytes, self._index.decode(requested.chunk, data)))
                decoded_bytes += nbytes
                while decoded_bytes > _DECODED_BYTES and len(started) > _LEAST_STARTED:
                    decoded_bytes -= started[0].nbytes
                    yield from self._take(started)
            while started:
                yield from self._take(started)
        finally:
            # After an error, wait for decoders: they may still write into memory that is about to be freed.
            for left in started:
                with suppress(Exception):  # another error is being raised
                    left.elements.result()

    def _take(self, started: deque[_Decoding]) -> Iterator[int]:
        oldest = started[0]
        _copy(oldest.requested, oldest.elements.result())
        started.popleft()  # only now: `_decode` waits for all started chunks, also after an interrupt
        for number, _, _ in oldest.requested.targets:
            self._left[number] -= 1
            if not self._left[number]:
                yield number


def _copy(requested: _RequestedChunk, elements: HostArray) -> None:
    """Copy elements of a chunk to its targets. A chunk that extends beyond the array may have fewer elements."""
    origin = requested.chunk.box.start
    valid = Box(origin, tuple(map(int.__add__, origin, elements.shape)))
    for _, box, buffer in requested.targets:
        if (common := box.intersect(valid)) is not None:
            # The ellipsis keeps arrays without axes from becoming scalars.
            to: tuple[Any, ...] = (*common.within(box), ...)
            of: tuple[Any, ...] = (*common.within(valid), ...)
            copy_elements(buffer[to], elements[of])


def _fill(requested: _RequestedChunk, value: HostArray) -> None:
    for _, box, buffer in requested.targets:
        if (common := box.intersect(requested.chunk.box)) is not None:
            buffer[common.within(box)] = value


def _elements(requested: _RequestedChunk, data: bytes, start: int, checksum: Checksum | None) -> HostArray:
    """Return the elements of a raw inline chunk.

    Raises:
        CorruptCheckpointError: the number of bytes is wrong.
        ChecksumError
    """
    box, dtype = requested.chunk.box, requested.targets[0][2].dtype
    nbytes = box.size * dtype.itemsize
    elements = memoryview(data)[start : start + nbytes]
    if len(elements) != nbytes:
        raise CorruptCheckpointError(
            f"a chunk of leaf {requested.chunk.leaf} has {len(elements)} bytes, where {nbytes} are expected; restore "
            "the checkpoint from a copy, or load another one"
        )
    if checksum is not None:
        end = start + nbytes
        if checksum.encode(checksum.of(elements)) != data[end : end + checksum.nbytes]:
            raise ChecksumError(
                f"a chunk of leaf {requested.chunk.leaf} is damaged: its {checksum.name} differs. Restore the "
                "checkpoint from a copy, or load another one"
            )
    return np.frombuffer(elements, little_dtype(dtype)).reshape(box.shape)


def _fetched(encoded: Sequence[_Encoded], store: ReadStore) -> Iterator[tuple[_RequestedChunk, bytes]]:
    """Fetch encoded chunks. One request fetches several if they are close to each other."""
    group: list[_Encoded] = []
    for chunk in sorted(encoded, key=lambda chunk: (chunk.requested.chunk.leaf, chunk.key, chunk.start)):
        if group and not _follows(group, chunk):
            yield from _fetched_together(group, store)
            group = []
        group.append(chunk)
    if group:
        yield from _fetched_together(group, store)


def _follows(group: Sequence[_Encoded], chunk: _Encoded) -> bool:
    last = group[-1]
    if chunk.inline is not None or last.key != chunk.key or last.stop is None or chunk.stop is None:
        return False
    # The chunks of the next array may precede the chunks of this array, but a group only continues forward.
    return 0 <= chunk.start - last.stop <= _GAP_BYTES and chunk.stop - group[0].start <= _FETCHED_BYTES


def _fetched_together(group: Sequence[_Encoded], store: ReadStore) -> Iterator[tuple[_RequestedChunk, bytes]]:
    first = group[0]
    if first.inline is not None:
        yield first.requested, first.inline[first.start : first.stop]
        return
    # A hostile index may state chunks that end before they start, so the last chunk need not have the highest end.
    stop = None if first.stop is None else max(chunk.stop or 0 for chunk in group)
    try:
        data = store.get(first.key, first.start, stop)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(
            f"a chunk is missing: {error}; restore it from a copy, or load another checkpoint", key=first.key
        ) from error
    if stop is not None and len(data) != stop - first.start:
        raise CorruptCheckpointError(
            f"{first.key} ends at byte {first.start + len(data)}, where {stop} are expected. It was cut off: restore "
            "it from a copy, or load another checkpoint",
            key=first.key, start=first.start + len(data), stop=stop,
        )  # fmt: skip
    for chunk in group:
        end = None if chunk.stop is None else chunk.stop - first.start
        yield chunk.requested, data[chunk.start - first.start : end]  # Python does not copy for a slice of all bytes
