"""Writes of objects: content, records, order of segments, and failures."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
import xxhash

from ckptcore.errors import PluginError, StorageError
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.threads import SIZES, IOThreads, Sizes
from ckptcore.model import ArraySegment, Box, BytesSegment, ChecksumSegment, HostArray, ObjectRecord, Segment
from ckptcore.protocols import Buffer, StorageBackend
from tests.io.checksum_fakes import Crc32
from tests.io.objects import TINY, SegmentLog
from tests.io.watched_storage import WatchedStorage, memory_storage

MIB = 1 << 20


def whole(log: SegmentLog, number: int, array: HostArray) -> ArraySegment:
    box = Box.whole(array.shape)
    return log.segment(number, box, [(box, array)])


def checksums(data: bytes, block: int) -> bytes:
    return b"".join(
        [xxhash.xxh3_64_intdigest(data[at : at + block]).to_bytes(8, "little") for at in range(0, len(data), block)]
    )


@pytest.mark.parametrize("sizes", [SIZES, TINY], ids=["inline", "tasks"])
def test_records_contain_the_size_and_a_checksum_for_each_block(sizes: Sizes) -> None:
    storage = memory_storage()
    recorder = ObjectRecorder(storage, IOThreads(2), sizes=sizes)
    block = sizes.block
    data = bytes(range(200)) * 3
    recorder.write("a", [BytesSegment(data[:7]), BytesSegment(b""), BytesSegment(data[7:])])
    recorder.put("b", b"small")
    recorder.write("c/d", [])
    assert recorder.objects == (
        ObjectRecord("a", 600, checksums(data, block)),
        ObjectRecord("b", 5, checksums(b"small", block)),
        ObjectRecord("c/d", 0, b""),
    )
    assert (storage.get("a"), storage.get("b"), storage.get("c/d")) == (data, b"small", b"")


def test_without_checksums_records_have_none() -> None:
    recorder = ObjectRecorder(memory_storage(), IOThreads(2), checksums=False, sizes=TINY)
    recorder.write("a", [BytesSegment(bytes(1000))])
    recorder.put("b", b"1")
    assert [record.checksums for record in recorder.objects] == [b"", b""]


def test_large_objects_are_written_block_by_block() -> None:
    storage = WatchedStorage(memory_storage())
    written: list[int] = []
    recorder = ObjectRecorder(storage, IOThreads(3), progress=written.append)
    log = SegmentLog()
    arrays: list[HostArray] = [
        np.full(MIB * 9 + 10, 1, np.uint8),
        np.arange(1000, dtype=np.int32),
        np.full(MIB * 2, 3, np.uint8),
    ]
    recorder.write("x", [BytesSegment(b"head"), *[whole(log, n, array) for n, array in enumerate(arrays)]])
    expected = b"head" + b"".join([array.tobytes() for array in arrays])
    assert storage.get("x") == expected
    assert recorder.objects == (ObjectRecord("x", len(expected), checksums(expected, MIB)),)
    assert sum(written) == len(expected) - len(b"head")  # progress counts only the bytes of arrays
    ranges = sorted([(start, stop) for _, start, stop in storage.writes])
    assert [start for start, _ in ranges] == [
        0,
        *[stop for _, stop in ranges[:-1]],
    ]  # the ranges are adjacent, so each byte is written once
    assert max([stop - start for start, stop in ranges]) == MIB
    assert all(start % MIB == 0 for start, _ in ranges)
    assert log.opened == [0, 1, 2] and sorted(log.closed) == [0, 1, 2]


class Changing(WatchedStorage):
    """A storage that changes the array of the caller before and after each write."""

    def __init__(self, inner: StorageBackend, array: HostArray, part_bytes: int) -> None:
        super().__init__(inner)
        self.concurrency = 2
        self.part_bytes = part_bytes
        self._bytes = array.view(np.uint8)

    def delay(self) -> None:
        self._bytes += 1


@pytest.mark.parametrize("part_bytes", [1, 2 * MIB])
@pytest.mark.parametrize("size", [3000, 100_000, 5 * MIB + 3], ids=["tiny", "small", "large"])
def test_checksums_match_the_written_bytes_if_the_array_changes(size: int, part_bytes: int) -> None:
    array = np.zeros(size, np.uint8)
    storage = Changing(memory_storage(), array, part_bytes)

    class Changed(Crc32):
        """A checksum that changes the array after it was computed."""

        def of(self, data: memoryview) -> int:
            value = super().of(data)
            storage.delay()
            return value

    recorder = ObjectRecorder(storage, IOThreads(2))
    recorder.write("x", [BytesSegment(b"head"), whole(SegmentLog(), 0, array), ChecksumSegment(Changed(), 2)])
    data = storage.get("x")
    assert recorder.objects == (ObjectRecord("x", len(data), checksums(data, MIB)),)
    crc = Crc32()
    assert data[4 + size :] == crc.encode(crc.of(memoryview(data)[: 4 + size]))
    assert array[0]  # the array did change


def test_arrays_are_passed_to_the_storage_without_a_copy() -> None:
    array = np.zeros((4, MIB), ml_dtypes.bfloat16)
    shared: list[bool] = []

    class Writer:
        def write_at(self, offset: int, data: Buffer) -> None:
            shared.append(bool(np.shares_memory(np.frombuffer(data, np.uint8), array.view(np.uint8))))

        def finish(self) -> None:
            pass

        def abort(self) -> None:
            raise AssertionError("nothing failed")

    class Storage(WatchedStorage):
        def open_writer(self, key: str, size: int | None = None) -> Writer:
            return Writer()

    recorder = ObjectRecorder(Storage(memory_storage()), IOThreads(2))
    recorder.write("x", [whole(SegmentLog(), 0, array)])
    halves = [(Box((start, 0), (start + 2, MIB)), array[start : start + 2]) for start in (2, 0)]
    recorder.write("y", [SegmentLog().segment(0, Box.whole(array.shape), halves)])
    assert shared == [False] * 16


def test_segments_are_opened_shortly_before_their_write_and_closed_after_it() -> None:
    events: list[str] = []
    arrays = [np.full(8 * MIB, number, np.uint8) for number in range(4)]

    def segment(number: int) -> ArraySegment:
        box = Box.whole(arrays[number].shape)

        def open_array() -> Sequence[tuple[Box, HostArray]]:
            events.append(f"open {number}")
            return [(box, arrays[number])]

        return ArraySegment(box, 1, open_array, lambda: events.append(f"close {number}"))

    ObjectRecorder(memory_storage(), IOThreads(1)).write("x", [segment(number) for number in range(4)])
    assert events == [f"{what} {number}" for number in range(4) for what in ("open", "close")]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("fail_at", [0, 3, 9])
def test_a_failed_write_aborts_the_object_and_closes_each_segment_once(threads: int, fail_at: int) -> None:
    storage = WatchedStorage(memory_storage())
    storage.fail_write_at = fail_at
    storage.jitter = 1e-3
    log = SegmentLog()
    segments = [whole(log, number, np.full(150, number, np.uint8)) for number in range(30)]
    recorder = ObjectRecorder(storage, IOThreads(threads), sizes=TINY)
    with pytest.raises(StorageError, match=f"write {fail_at} of 'x' failed because the test said so"):
        recorder.write("x", segments)
    assert sorted(log.closed) == list(range(30))
    assert len(log.opened) < 30 or fail_at == 9
    assert storage.aborted == ["x"]
    assert recorder.objects == ()
    assert list(storage.list()) == []


@pytest.mark.parametrize("sizes", [SIZES, TINY], ids=["inline", "tasks"])
def test_if_a_segment_cannot_be_opened_the_write_fails(sizes: Sizes) -> None:
    log = SegmentLog()

    def fail() -> Sequence[tuple[Box, HostArray]]:
        raise RuntimeError("the copy failed")

    segments: list[Segment] = [whole(log, number, np.full(150, number, np.uint8)) for number in range(9)]
    segments[4] = ArraySegment(Box((0,), (150,)), 1, fail, lambda: log.closed.append(4))
    storage = WatchedStorage(memory_storage())
    recorder = ObjectRecorder(storage, IOThreads(3), sizes=sizes)
    with pytest.raises(RuntimeError, match="the copy failed"):
        recorder.write("x", segments)
    assert sorted(log.closed) == list(range(9))
    assert list(storage.list()) == [] and recorder.objects == ()


@pytest.mark.parametrize("sizes", [SIZES, TINY], ids=["inline", "tasks"])
def test_if_closing_a_segment_fails_the_others_are_closed(sizes: Sizes) -> None:
    log = SegmentLog()
    segments: list[Segment] = [whole(log, number, np.full(150, number, np.uint8)) for number in range(9)]

    def fail() -> None:
        log.closed.append(4)
        raise RuntimeError("the memory is not ours")

    box = Box((0,), (150,))
    segments[4] = ArraySegment(box, 1, lambda: [(box, np.zeros(150, np.uint8))], fail)
    recorder = ObjectRecorder(memory_storage(), IOThreads(3), sizes=sizes)
    with pytest.raises(RuntimeError, match="the memory is not ours"):
        recorder.write("x", segments)
    assert sorted(log.closed) == list(range(9))


@pytest.mark.parametrize(
    "parts",
    [
        [(Box((0,), (3,)), np.zeros(3, np.uint8))],
        [(Box((0,), (4,)), np.zeros(3, np.uint8))],
        [(Box((0,), (4,)), np.zeros((4, 1), np.uint8))],
        [(Box((0,), (4,)), np.zeros(4, np.uint16))],
        [(Box((0,), (2,)), np.zeros(2, np.uint8)), (Box((2,), (3,)), np.zeros(1, np.uint8))],
        [(Box((0,), (2,)), np.zeros(2, np.uint8)), (Box((3,), (5,)), np.zeros(2, np.uint8))],
        [(Box((0,), (2,)), np.zeros(2, np.uint8)), (Box((2,), (4,)), np.zeros(1, np.uint8))],
        [],
    ],
)
def test_arrays_that_do_not_fill_the_box_are_refused(parts: list[tuple[Box, HostArray]]) -> None:
    closed = []
    segment = ArraySegment(Box((0,), (4,)), 1, lambda: parts, lambda: closed.append(1))
    for sizes in (SIZES, TINY):
        with pytest.raises(PluginError, match="do not make up its box"):
            ObjectRecorder(memory_storage(), IOThreads(2), sizes=sizes).write("x", [segment])
    assert closed == [1, 1]


def test_many_tiny_segments_share_a_write() -> None:
    storage = WatchedStorage(memory_storage())
    log = SegmentLog()
    arrays = [np.full(16, number, np.float32) for number in range(2000)]
    ObjectRecorder(storage, IOThreads(2)).write("x", [whole(log, n, array) for n, array in enumerate(arrays)])
    assert len(storage.writes) == 1
    big = np.zeros(2 * MIB, np.uint8)
    ObjectRecorder(storage, IOThreads(2)).write(
        "y", [whole(log, 0, big), *[whole(log, n, array) for n, array in enumerate(arrays)]]
    )
    assert len(storage.writes) == 4
    assert storage.get("y") == big.tobytes() + b"".join([array.tobytes() for array in arrays])


def test_concurrent_writes_from_many_threads_do_not_deadlock() -> None:
    """Each calling thread also does work. So all calls end, even if opening a segment waits for the other calls."""
    threads = IOThreads(2)
    storage = memory_storage()
    recorder = ObjectRecorder(storage, threads, sizes=TINY)
    barrier = threading.Barrier(6)
    data = np.arange(5000, dtype=np.uint16)
    box = Box.whole(data.shape)

    def write(number: int) -> None:
        def open_together() -> Sequence[tuple[Box, HostArray]]:
            barrier.wait(30)
            return [(box, data)]

        recorder.write(f"{number}", [ArraySegment(box, 2, open_together, lambda: None)])

    callers = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert sorted(record.key for record in recorder.objects) == sorted(map(str, range(6)))
    assert {storage.get(str(number)) for number in range(6)} == {data.tobytes()}
