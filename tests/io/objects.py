"""Strategies for arrays in every memory layout, for objects that contain them, and for tiles to read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from ckptcore_testing.arrays import same_bits
from ckptcore_testing.strategies import arrays, boxes, partitions
from hypothesis import strategies as st

from ckptcore.io.elements import plain
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads, Sizes
from ckptcore.model import (
    ArraySegment,
    Box,
    BytesSegment,
    Checksum,
    ChecksumSegment,
    ChunkRead,
    HostArray,
    Segment,
)
from tests.io.watched_storage import WatchedStorage, memory_storage

TINY = Sizes(block=64, task=256, write=256, inline=0, direct=48, run=128)
"""Sizes that make arrays of a few hundred bytes go through every path of large ones."""


class SegmentLog:
    """Record of the segments that were opened and closed.

    Attributes:
        opened, closed: numbers of segments, in the order of calls.
    """

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []

    def segment(self, number: int, box: Box, parts: Sequence[tuple[Box, HostArray]]) -> ArraySegment:
        """Return a segment that consists of these arrays."""

        def open_parts() -> Sequence[tuple[Box, HostArray]]:
            self.opened.append(number)
            return parts

        return ArraySegment(box, parts[0][1].itemsize, open_parts, lambda: self.closed.append(number))


def stored_bytes(array: HostArray) -> bytes:
    """Return the elements as an object stores them, computed without code of the engine."""
    if array.dtype.itemsize == 1 or array.dtype.kind in "VS":
        return np.ascontiguousarray(array).tobytes()
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


@st.composite
def held(draw: st.DrawFn, array: HostArray) -> HostArray:
    """Draw an equal array in another memory layout: strided, reversed, transposed, read-only or big endian."""
    kind = draw(st.sampled_from(["same", "strided", "reversed", "fortran", "read-only", "big endian", "offset"]))
    if kind == "strided" and array.ndim:
        wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if kind == "reversed" and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1]
    if kind == "fortran" and array.ndim:
        return np.asfortranarray(array)
    if kind == "read-only":
        array = array.copy()
        array.flags.writeable = False
    elif kind == "big endian" and array.dtype.kind in "iufcmMU":
        return array.astype(array.dtype.newbyteorder(">"))
    elif kind == "offset":
        memory = bytearray(array.nbytes + 1)
        moved: HostArray = np.ndarray(array.shape, array.dtype, memory, 1)
        plain(moved)[...] = plain(array)
        return moved
    return array


@st.composite
def stored(draw: st.DrawFn) -> tuple[list[HostArray], list[Segment], list[int], SegmentLog]:
    """Draw arrays, the segments of an object that contains them, their offsets, and the record of opened segments."""
    sources = draw(st.lists(arrays(), min_size=1, max_size=6))
    if draw(st.booleans()):
        # Add an array that spans many blocks.
        shape = draw(st.sampled_from([(700,), (9, 50), (3, 7, 20), (2, 300)]))
        dtype = draw(st.sampled_from(["uint8", "int16", "float32", "complex128", "S5"]))
        sources.insert(draw(st.integers(0, len(sources))), _counted(shape, dtype))
    log = SegmentLog()
    segments: list[Segment] = []
    offsets = []
    position = 0
    for number, source in enumerate(sources):
        padding = draw(st.sampled_from([0, 0, 1, 8, 63, 64, 100]))
        if padding:
            segments.append(BytesSegment(b"\xee" * padding))
            position += padding
        whole = Box.whole(source.shape)
        parts = [
            (box, draw(held(np.ascontiguousarray(source[box.slices]).reshape(box.shape))))
            for box in draw(partitions(source.shape))
        ]
        segments.append(log.segment(number, whole, parts))
        offsets.append(position)
        position += source.nbytes
    return sources, segments, offsets, log


def _counted(shape: tuple[int, ...], dtype: str) -> HostArray:
    random = np.random.default_rng(len(shape))
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return random.integers(1, 256, size, np.uint8).view(dtype).reshape(shape)


@st.composite
def tiles(
    draw: st.DrawFn, key: str, sources: Sequence[HostArray], offsets: Sequence[int]
) -> tuple[list[ChunkRead], list[tuple[HostArray, HostArray]]]:
    """Draw reads of boxes of stored arrays, and a pair (array to fill, expected array) for each target number."""
    reads: list[ChunkRead] = []
    targets: list[tuple[HostArray, HostArray]] = []
    for source, offset in zip(sources, offsets, strict=True):
        wanted: list[tuple[int, Box, HostArray]] = []
        for box in draw(st.lists(boxes(source.shape, allow_empty=True) | st.just(Box.whole(source.shape)), max_size=4)):
            array = np.full(box.size * source.itemsize, 0xEE, np.uint8).view(source.dtype).reshape(box.shape)
            wanted.append((len(targets), box, array))
            targets.append((array, source[box.slices]))
        if source.ndim and source.shape[0] > 1 and draw(st.booleans()):
            # Describe the same bytes as several chunks of consecutive rows.
            rows = sorted({0, source.shape[0], *draw(st.lists(st.integers(0, source.shape[0]), max_size=3))})
            for start, stop in itertools.pairwise(rows):
                tile = Box((start, *(0,) * (source.ndim - 1)), (stop, *source.shape[1:]))
                row_bytes = source.nbytes // source.shape[0]
                reads.append(ChunkRead(key, offset + start * row_bytes, tile, source.itemsize, tuple(wanted)))
        elif wanted:
            reads.append(ChunkRead(key, offset, Box.whole(source.shape), source.itemsize, tuple(wanted)))
    return draw(st.permutations(reads)), targets


@st.composite
def summed(
    draw: st.DrawFn, checksum: Checksum, sources: Sequence[HostArray], segments: Sequence[Segment]
) -> tuple[list[Segment], list[int], list[bool], bytes]:
    """Insert checksums after some segments of `stored`.

    Return the segments, the offset of each source, a flag for each source that has its own checksum, and the bytes of
    the object.
    """
    with_checksums: list[Segment] = []
    offsets: list[int] = []
    alone: list[bool] = []
    parts: list[bytes] = []
    free = 0
    for segment in segments:
        with_checksums.append(segment)
        if isinstance(segment, ArraySegment):
            offsets.append(sum(map(len, parts)))
            parts.append(stored_bytes(sources[len(alone)]))
            alone.append(False)
        else:
            assert isinstance(segment, BytesSegment)
            parts.append(bytes(segment.data))
        free += 1
        if draw(st.booleans()):
            count = draw(st.integers(1, free) | st.just(1))
            with_checksums.append(ChecksumSegment(checksum, count))
            parts.append(checksum.encode(checksum.of(memoryview(b"".join(parts[-count:])))))
            if isinstance(segment, ArraySegment):
                alone[-1] = count == 1
            free = 0
    return with_checksums, offsets, alone, b"".join(parts)


def checked(
    reads: Sequence[ChunkRead],
    checksum: Checksum,
    sources: Sequence[HostArray],
    offsets: Sequence[int],
    alone: Sequence[bool],
) -> list[ChunkRead]:
    """Return the reads. Those of a whole source that is followed by its own checksum get this checksum."""
    places = {
        (offset, source.nbytes)
        for source, offset, summed_alone in zip(sources, offsets, alone, strict=True)
        if summed_alone and source.nbytes
    }
    return [
        read._replace(checksum=checksum) if (read.offset, read.box.size * read.itemsize) in places else read
        for read in reads
    ]


def assert_targets_are_filled(
    data: st.DataObject,
    segments: Sequence[Segment],
    reads: Sequence[ChunkRead],
    targets: Sequence[tuple[HostArray, HostArray]],
    *,
    checksums: bool = True,
) -> None:
    """Write segments, read chunks, and assert that all targets are filled and all bytes are counted."""
    storage = WatchedStorage(memory_storage(), request_bytes=data.draw(st.sampled_from([1, 64, 300, 1 << 20])))
    threads = IOThreads(data.draw(st.integers(1, 4)))
    recorder = ObjectRecorder(storage, threads, checksums=checksums, sizes=TINY)
    recorder.write("x", segments)
    records = {record.key: record for record in recorder.objects}
    filled: list[int] = []
    verify = data.draw(st.booleans())
    reader = ObjectReader(storage, records, threads, verify=verify, sizes=TINY, progress=filled.append)
    numbers = list(reader.read_chunks(reads))
    assert sorted(numbers) == sorted({number for read in reads for number, _, _ in read.targets})
    for array, expected in targets:
        assert same_bits(array, expected)
    assert sum(filled) == sum(array.nbytes for array, _ in targets)
    assert reader.bytes_read == sum(stop - start for _, start, stop in storage.reads)
    assert reader.requests == storage.read_calls
