"""Chunks followed by checksums. Reads verify these checksums or the blocks, whichever needs fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from ckptcore_testing.arrays import same_bits
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import SIZES, IOThreads, Sizes
from ckptcore.model import Box, BytesSegment, Checksum, ChecksumSegment, ChunkRead, HostArray, ObjectRecord, Segment
from tests.io.checksum_fakes import Crc32, Length
from tests.io.objects import TINY, assert_targets_are_filled, checked, stored, summed, tiles
from tests.io.watched_storage import WatchedStorage, memory_storage

MIB = 1 << 20

CHECKSUMS: Sequence[Checksum] = [Crc32(), Length()]


class Chunks:
    """An object that consists of two-dimensional chunks of bytes, each followed by its checksum."""

    def __init__(
        self,
        count: int,
        shape: tuple[int, int],
        *,
        recorded: bool,
        sizes: Sizes = TINY,
        request_bytes: int = 64,
        threads: int = 3,
        gap: int = 0,
    ) -> None:
        self.checksum = Crc32()
        self.chunks = np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)
        self.shape = shape
        self.sizes = sizes
        self.chunk_bytes = shape[0] * shape[1]
        self.stride = self.chunk_bytes + 4 + gap
        self.storage = WatchedStorage(memory_storage(), request_bytes)
        self.threads = IOThreads(threads)
        recorder = ObjectRecorder(self.storage, self.threads, sizes=sizes)
        segments: list[Segment] = []
        for chunk in self.chunks:
            segments += [BytesSegment(chunk.tobytes()), ChecksumSegment(self.checksum), BytesSegment(bytes(gap))]
        recorder.write("x", segments)
        self.size = count * self.stride
        self.records = {"x": recorder.objects[0] if recorded else ObjectRecord("x", self.size)}
        self.checksum.summed.clear()

    def damage(self, place: int) -> None:
        data = bytearray(self.storage.get("x"))
        data[place] ^= 0x10
        self.storage.put("x", bytes(data))

    def reader(self, *, verify: bool = True) -> ObjectReader:
        self.storage.reads.clear()
        self.storage.read_calls = 0
        return ObjectReader(self.storage, self.records, self.threads, verify=verify, sizes=self.sizes)

    def reads(self, boxes: Sequence[tuple[int, Box]]) -> tuple[list[ChunkRead], list[HostArray]]:
        """Return a read and an array for each pair of a chunk and a box."""
        arrays: list[HostArray] = [np.zeros(box.shape, np.uint8) for _, box in boxes]
        whole = Box.whole(self.shape)
        chunk_reads = [
            ChunkRead("x", chunk * self.stride, whole, 1, ((number, box, array),), self.checksum)
            for number, ((chunk, box), array) in enumerate(zip(boxes, arrays, strict=True))
        ]
        return chunk_reads, arrays

    def load(self, boxes: Sequence[tuple[int, Box]], *, verify: bool = True) -> ObjectReader:
        """Read boxes of chunks, compare the elements, and return the reader."""
        reads, arrays = self.reads(boxes)
        reader = self.reader(verify=verify)
        assert sorted(reader.read_chunks(reads)) == list(range(len(boxes)))
        for (chunk, box), array in zip(boxes, arrays, strict=True):
            assert np.array_equal(array, self.chunks[chunk][box.slices])
        assert reader.bytes_read == sum([stop - start for _, start, stop in self.storage.reads])
        assert reader.requests == self.storage.read_calls
        return reader


@given(st.data())
def test_targets_equal_numpy_slices(data: st.DataObject) -> None:
    checksum = data.draw(st.sampled_from(CHECKSUMS))
    sources, plain, _, _ = data.draw(stored())
    segments, offsets, alone, _ = data.draw(summed(checksum, sources, plain))
    reads, targets = data.draw(tiles("x", sources, offsets))
    reads = checked(reads, checksum, sources, offsets, alone)
    assert_targets_are_filled(data, segments, reads, targets, checksums=data.draw(st.booleans()))


@given(st.data())
def test_a_damaged_byte_in_a_requested_range_is_detected(data: st.DataObject) -> None:
    checksum = data.draw(st.sampled_from(CHECKSUMS))
    sources, plain, _, _ = data.draw(stored())
    segments, offsets, alone, _ = data.draw(summed(checksum, sources, plain))
    reads, targets = data.draw(tiles("x", sources, offsets))
    reads = checked(reads, checksum, sources, offsets, alone)
    storage = WatchedStorage(memory_storage(), request_bytes=data.draw(st.sampled_from([64, 1 << 20])))
    threads = IOThreads(data.draw(st.integers(1, 4)))
    recorded = data.draw(st.booleans())
    recorder = ObjectRecorder(storage, threads, checksums=recorded, sizes=TINY)
    recorder.write("x", segments)
    damaged = bytearray(storage.get("x"))
    if not damaged:
        return
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    storage.put("x", bytes(damaged))
    ends = {
        read.offset + read.box.size * read.itemsize + checksum.nbytes: read.offset
        for read in reads
        if read.checksum is not None and any(box.intersect(read.box) for _, box, _ in read.targets)
    }
    unchecked = [number for read in reads if read.checksum is None for number, _, _ in read.targets]
    reader = ObjectReader(storage, {record.key: record for record in recorder.objects}, threads, sizes=TINY)
    complete: list[int] = []
    try:
        complete.extend(reader.read_chunks(reads))
    except ChecksumError as error:
        assert error.key == "x"
        assert error.start is not None and error.stop is not None
        assert error.start <= place < error.stop
        assert recorded or ends[error.stop] == error.start
    else:
        # With recorded blocks, checksums of chunks may stay unread. Without them, every requested tile is verified.
        assert recorded or not any(start <= place < end for end, start in ends.items())
    for number in complete:
        if recorded or number not in unchecked:
            assert same_bits(*targets[number])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_scattered_chunks_are_verified_by_their_own_checksums(recorded: bool, verify: bool) -> None:
    chunks = Chunks(40, (16, 64), recorded=recorded)
    boxes = [
        (number, Box.whole(chunks.shape)) for number in (1, 3, 6, 9, 12, 18, 21, 25, 30, 35)
    ]  # no block starts at the start of one of these chunks
    reader = chunks.load(boxes, verify=verify)
    assert reader.bytes_read == len(boxes) * (1028 if verify else 1024)
    assert sum(chunks.checksum.summed) == (len(boxes) * 1024 if verify else 0)


def test_scattered_boxes_need_few_additional_bytes() -> None:
    """A chunk has the size of 16 blocks, but overlaps 17 or 18 of them."""
    chunks = Chunks(64, (16, 64), recorded=True)
    for column in range(8):
        boxes = [(row * 8 + column, Box.whole(chunks.shape)) for row in range(2, 6)]
        assert chunks.load(boxes).bytes_read <= 1.1 * 64 * 64


def test_dense_chunks_are_verified_by_recorded_blocks() -> None:
    for count, shape in [(40, (16, 64)), (200, (1, 16)), (3, (100, 64))]:
        chunks = Chunks(count, shape, recorded=True)
        reader = chunks.load([(number, Box.whole(shape)) for number in range(count)])
        assert reader.bytes_read == chunks.size
        assert chunks.checksum.summed == []


def test_a_small_chunk_is_verified_by_its_blocks_if_they_are_recorded() -> None:
    """Only block checksums, which the root records, detect bytes of another save."""
    chunks = Chunks(40, (1, 16), recorded=True)
    reader = chunks.load([(5, Box.whole(chunks.shape))])
    assert reader.bytes_read in (64, 128)
    assert chunks.checksum.summed == []


def test_parts_of_large_chunks_are_verified_by_blocks() -> None:
    chunks = Chunks(10, (100, 64), recorded=True)
    reader = chunks.load([(number, Box((0, 0), (3, 64))) for number in range(0, 10, 2)])
    assert reader.bytes_read <= 5 * 5 * 64
    assert chunks.checksum.summed == []


def test_each_part_of_an_object_is_verified_in_the_cheapest_way() -> None:
    """The object has a dense part, a part of scattered chunks, and a part where only rows of chunks are read."""
    chunks = Chunks(60, (16, 64), recorded=True)
    whole, row = Box.whole(chunks.shape), Box((1, 0), (2, 64))
    dense = [(number, whole) for number in range(20)]
    scattered = [(number, whole) for number in range(22, 40, 3)]
    rows = [(number, row) for number in range(45, 60, 3)]
    reader = chunks.load([*rows, *scattered, *dense])
    assert (
        sum(chunks.checksum.summed) == (len(scattered) + 1) * 1024
        or sum(chunks.checksum.summed) == len(scattered) * 1024
    )
    assert reader.bytes_read <= 20 * 1028 + 64 + 6 * 1028 + 5 * 128


@given(
    st.lists(st.tuples(st.integers(0, 59), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=60, unique=True),
    st.sampled_from([(4, 5), (4, 16), (4, 40), (4, 200)]),
    st.sampled_from([0, 7, 100]),
)
def test_mixed_verification_reads_hardly_more_than_the_best_single_way(
    picks: list[tuple[int, int, int]], shape: tuple[int, int], gap: int
) -> None:
    """Verification by blocks alone, or by chunks alone, reads at most 2 % or two blocks less."""
    boxes = [(chunk, Box((first, 0), (max(first + 1, last), shape[1]))) for chunk, first, last in picks]
    chunks = Chunks(60, shape, recorded=True, gap=gap)
    chosen = chunks.load(boxes).bytes_read
    chunks.checksum.summed.clear()
    reads, _ = chunks.reads(boxes)
    reader = chunks.reader()
    list(reader.read_chunks([read._replace(checksum=None) for read in reads]))
    by_blocks = reader.bytes_read
    whole = len({chunk for chunk, _ in boxes}) * (chunks.chunk_bytes + 4)
    allowance = 4 * len(boxes) + 2 * 64  # gaps of up to 4 bytes, and two blocks
    assert chosen <= 1.02 * min(by_blocks, whole) + allowance


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("place", [0, 1500, 2 * 1028 - 5, 2 * 1028 - 4, 2 * 1028 - 1])
@pytest.mark.parametrize("box", [Box((0, 0), (16, 64)), Box((0, 3), (16, 9)), Box((3, 0), (15, 64))])
def test_damage_in_a_chunk_or_its_checksum_is_detected(recorded: bool, place: int, box: Box) -> None:
    chunks = Chunks(10, (16, 64), recorded=recorded)
    chunks.damage(place)
    reads, _ = chunks.reads([(place // 1028, box), (8, box)])
    reader = chunks.reader()
    try:
        list(reader.read_chunks(reads))
    except ChecksumError as caught:
        error = caught
    else:
        # With recorded blocks, a read may skip the damaged part of a chunk.
        assert recorded and not any(start <= place < stop for _, start, stop in chunks.storage.reads)
        return
    assert error.key == "x" and error.start is not None and error.stop is not None
    assert error.start <= place < error.stop
    if not recorded:
        begin = place // 1028 * 1028
        assert (error.start, error.stop) == (begin, begin + 1028)
        stored = chunks.storage.get("x")[begin + 1024 : begin + 1028]
        assert f"expected the stored crc32 {stored.hex()}, found " in str(error)
        right = Crc32().of(memoryview(chunks.chunks[place // 1028].tobytes()))
        if place % 1028 >= 1024:
            assert Crc32().encode(right).hex() in str(error)


def test_the_error_of_a_long_checksum_names_its_range() -> None:
    """The error omits the bytes, because a format may store a longer record there."""
    storage, checksum = memory_storage(), Length()
    recorder = ObjectRecorder(storage, IOThreads(1))
    recorder.write("x", [BytesSegment(b"12345678"), ChecksumSegment(checksum)])
    data = bytearray(storage.get("x"))
    data[3] ^= 1
    storage.put("x", bytes(data))
    whole = Box.whole((8,))
    read = ChunkRead("x", 0, whole, 1, ((0, whole, np.zeros(8, np.uint8)),), checksum)
    with pytest.raises(ChecksumError, match="they do not match their length in bytes 8 to 19"):
        list(ObjectReader(storage, {"x": ObjectRecord("x", 19)}, IOThreads(1)).read_chunks([read]))


@pytest.mark.parametrize("recorded", [True, False])
def test_damaged_bytes_are_returned_if_verification_is_off(recorded: bool) -> None:
    chunks = Chunks(3, (16, 64), recorded=recorded)
    chunks.damage(1028 + 5)
    reads, arrays = chunks.reads([(1, Box.whole(chunks.shape))])
    assert list(chunks.reader(verify=False).read_chunks(reads)) == [0]
    assert arrays[0].tobytes() == chunks.storage.get("x")[1028:2052]


@pytest.mark.parametrize("threads", [1, 4])
def test_no_target_is_yielded_before_its_whole_tile_is_verified(threads: int) -> None:
    """The target is the first row. Other tasks read the remaining rows, which may be damaged."""
    for place in (5, 64 * 100 - 1, 64 * 100 + 2):
        chunks = Chunks(3, (100, 64), recorded=False, threads=threads)
        chunks.storage.jitter = 1e-4
        reads, _ = chunks.reads([(0, Box((0, 0), (1, 64))), (0, Box((7, 3), (9, 20))), (2, Box((0, 0), (1, 64)))])
        chunks.damage(place)
        seen: list[int] = []
        with pytest.raises(ChecksumError):
            seen.extend(chunks.reader().read_chunks(reads))
        assert set(seen) <= {2}


def test_a_chunk_is_read_once_for_all_its_targets() -> None:
    chunks = Chunks(3, (100, 64), recorded=False)
    whole = Box.whole(chunks.shape)
    boxes = [(1, whole), (1, Box((5, 0), (50, 64))), (1, Box((0, 7), (100, 9))), (1, whole)]
    assert chunks.load(boxes).bytes_read == 6404
    assert sum(chunks.checksum.summed) == 6400


def test_large_chunks_are_read_into_their_arrays_or_in_windows() -> None:
    class Straight(WatchedStorage):
        def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
            spare.extend([len(view) for _, view in ranges if not np.shares_memory(view, array)])
            super().get_into(key, ranges)

    chunks = Chunks(2, (10, MIB), recorded=False, sizes=SIZES, request_bytes=MIB)
    spare: list[int] = []
    array = np.zeros((10, MIB), np.uint8)
    whole = Box.whole(chunks.shape)
    storage = Straight(chunks.storage, MIB)
    read = ChunkRead("x", chunks.stride, whole, 1, ((0, whole, array),), chunks.checksum)
    reader = ObjectReader(storage, chunks.records, chunks.threads)
    assert list(reader.read_chunks([read])) == [0]
    assert np.array_equal(array, chunks.chunks[1])
    assert spare == [4]
    assert reader.bytes_read == chunks.stride
    # A part of a chunk is read in windows of at most 4 MiB, the last one with the checksum.
    part = np.zeros((10, 3), np.uint8)
    read = ChunkRead("x", 0, whole, 1, ((0, Box((0, 7), (10, 10)), part),), chunks.checksum)
    assert list(chunks.reader().read_chunks([read])) == [0]
    assert np.array_equal(part, chunks.chunks[0][:, 7:10])
    assert max([stop - start for _, start, stop in chunks.storage.reads]) <= 4 * MIB + 4


def test_small_chunks_share_a_request() -> None:
    chunks = Chunks(1000, (1, 64), recorded=False, sizes=SIZES, request_bytes=MIB)
    reader = chunks.load([(number, Box.whole(chunks.shape)) for number in range(1000)])
    assert (reader.requests, reader.bytes_read) == (1, 68_000)
    assert chunks.checksum.summed == [64] * 1000


def test_unaligned_elements_are_read() -> None:
    """The checksums of 4 bytes shift each chunk of complex numbers further from its alignment."""
    values = np.random.default_rng(3).standard_normal((5, 40, 30)).astype(np.complex128)
    crc = Crc32()
    storage = WatchedStorage(memory_storage(), 64)
    threads = IOThreads(2)
    segments: list[Segment] = [
        segment for chunk in values for segment in (BytesSegment(chunk.tobytes()), ChecksumSegment(crc))
    ]
    for recorded in (True, False):
        recorder = ObjectRecorder(storage, threads, checksums=recorded, sizes=TINY)
        recorder.write(f"x{recorded}", segments)
        box = Box((3, 2), (39, 29))
        arrays = [np.zeros(box.shape, np.complex128) for _ in values]
        reads = [
            ChunkRead(f"x{recorded}", number * (19200 + 4), Box.whole((40, 30)), 16, ((number, box, array),), crc)
            for number, array in enumerate(arrays)
        ]
        reader = ObjectReader(storage, {record.key: record for record in recorder.objects}, threads, sizes=TINY)
        assert sorted(reader.read_chunks(reads)) == [0, 1, 2, 3, 4]
        for chunk, array in zip(values, arrays, strict=True):
            assert np.array_equal(array, chunk[box.slices])


def test_elements_may_cross_the_ends_of_windows() -> None:
    chunks = Chunks(2, (100, 60), recorded=False)
    text = chunks.chunks.view("S5")
    box = Box((3, 2), (97, 11))
    array = np.zeros(box.shape, "S5")
    read = ChunkRead("x", chunks.stride, Box.whole((100, 12)), 5, ((0, box, array),), chunks.checksum)
    assert list(chunks.reader().read_chunks([read])) == [0]
    assert array.tobytes() == text[1][box.slices].tobytes()


def test_shared_requests_are_at_most_as_large_as_a_task() -> None:
    chunks = Chunks(40, (4, 16), recorded=False)
    reader = chunks.load([(number, Box((0, 3), (4, 9))) for number in range(40)])
    assert reader.bytes_read == chunks.size
    assert max([stop - start for _, start, stop in chunks.storage.reads]) == 3 * 68


def tile(offset: int, nbytes: int, number: int = 0) -> ChunkRead:
    box = Box((0,), (nbytes,))
    return ChunkRead("x", offset, box, 1, ((number, box, np.zeros(nbytes, np.uint8)),), Crc32())


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "read",
    [tile(3080, 1), tile(1 << 80, 10), tile(-1, 10), tile(2056, 1025), tile(2056, 1028), tile(0, 3081), tile(3081, 0)],
)
def test_tiles_outside_their_object_are_refused(read: ChunkRead, verify: bool, recorded: bool) -> None:
    chunks = Chunks(3, (16, 64), recorded=recorded)
    assert chunks.size == 3084
    reader = chunks.reader(verify=verify)
    with pytest.raises(CorruptCheckpointError, match="does not match the checkpoint.*and its checksum") as caught:
        list(reader.read_chunks([read]))
    assert caught.value.key == "x"
    assert reader.requests == 0


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("other", [tile(3, 1024, 1), tile(0, 1025, 1), tile(1027, 10, 1), tile(500, 20, 1)])
def test_tiles_that_overlap_are_refused(other: ChunkRead, recorded: bool) -> None:
    chunks = Chunks(3, (16, 64), recorded=recorded)
    reader = chunks.reader()
    for reads in ([tile(0, 1024), other], [other, tile(0, 1024)]):
        with pytest.raises(CorruptCheckpointError, match="expected chunks of bytes that do not overlap"):
            list(reader.read_chunks(reads))
    assert reader.requests == 0


def test_a_tile_without_requested_elements_is_not_read() -> None:
    chunks = Chunks(3, (16, 64), recorded=False)
    reads, _ = chunks.reads([(0, Box((4, 4), (4, 4))), (1, Box((20, 0), (22, 64)))])
    empty = ChunkRead("x", 0, Box((0,), (0,)), 1, ((2, Box((0,), (0,)), np.zeros(0, np.uint8)),), chunks.checksum)
    bare = ChunkRead("x", 0, Box.whole(chunks.shape), 1, (), chunks.checksum)
    reader = chunks.reader()
    assert sorted(reader.read_chunks([*reads, empty, bare])) == [0, 1, 2]
    assert reader.requests == 0


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failing_checksum_function_ends_the_read(threads: int) -> None:
    for fail_at in (0, 5, 20):
        chunks = Chunks(5, (100, 64), recorded=False, threads=threads)
        reads, _ = chunks.reads([(number, Box.whole(chunks.shape)) for number in range(5)])
        failing = Crc32(fail_at=fail_at, jitter=1e-4)
        with pytest.raises(RuntimeError, match=f"sum {fail_at} failed"):
            list(chunks.reader().read_chunks([read._replace(checksum=failing) for read in reads]))
        assert chunks.storage.busy == 0
