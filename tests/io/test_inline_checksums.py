"""Inline checksums, which the engine computes in pieces, equal those of one pass over the preceding bytes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import PluginError, StorageError
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.threads import SIZES, IOThreads, Sizes
from ckptcore.model import ArraySegment, Box, BytesSegment, Checksum, ChecksumSegment, HostArray, Segment
from tests.io.checksum_fakes import Crc32, Length
from tests.io.objects import TINY, SegmentLog, stored, summed
from tests.io.test_recorder import checksums, whole
from tests.io.watched_storage import WatchedStorage, memory_storage

ODD = Sizes(block=3, task=6, write=6, inline=0, direct=2, run=4)
"""Sizes that cut checksums themselves."""

CHECKSUMS: Sequence[Checksum] = [Crc32(), Length()]


@given(st.data())
def test_written_objects_contain_the_checksums_of_the_preceding_segments(data: st.DataObject) -> None:
    checksum = data.draw(st.sampled_from(CHECKSUMS))
    sources, plain, _, log = data.draw(stored())
    segments, _, _, expected = data.draw(summed(checksum, sources, plain))
    sizes = data.draw(st.sampled_from([SIZES, TINY, ODD]))
    storage = memory_storage()
    recorder = ObjectRecorder(storage, IOThreads(data.draw(st.integers(1, 4))), sizes=sizes)
    recorder.write("x", segments)
    assert storage.get("x") == expected
    assert recorder.objects[0].checksums == checksums(expected, sizes.block)
    assert log.opened == list(range(len(sources)))
    assert sorted(log.closed) == log.opened


def summed_arrays(log: SegmentLog, checksum: Checksum, arrays: Sequence[HostArray]) -> list[Segment]:
    return [
        segment
        for number, array in enumerate(arrays)
        for segment in (whole(log, number, array), ChecksumSegment(checksum))
    ]


def expected_bytes(arrays: Sequence[HostArray]) -> bytes:
    crc = Crc32()
    parts = [array.tobytes() for array in arrays]
    return b"".join([part + crc.encode(crc.of(memoryview(part))) for part in parts])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("sizes", [TINY, ODD], ids=["tiny", "odd"])
def test_the_order_of_threads_does_not_matter(threads: int, sizes: Sizes) -> None:
    arrays: list[HostArray] = [np.full(nbytes, nbytes % 251, np.uint8) for nbytes in (700, 3, 0, 130, 1, 999, 64)]
    storage = WatchedStorage(memory_storage())
    storage.jitter = 2e-4
    log = SegmentLog()
    for checksum in (Crc32(jitter=1e-3), Crc32()):
        recorder = ObjectRecorder(storage, IOThreads(threads), sizes=sizes)
        recorder.write("x", summed_arrays(log, checksum, arrays))
        assert storage.get("x") == expected_bytes(arrays)
    assert sum(checksum.summed) == sum([array.nbytes for array in arrays])


def test_each_byte_of_a_large_array_is_summed_once_in_blocks() -> None:
    checksum = Crc32()
    arrays: list[HostArray] = [np.full(9 << 20, number, np.uint8) for number in (1, 2)]
    storage = WatchedStorage(memory_storage())
    ObjectRecorder(storage, IOThreads(3)).write("x", summed_arrays(SegmentLog(), checksum, arrays))
    assert storage.get("x") == expected_bytes(arrays)
    assert sum(checksum.summed) == 18 << 20
    assert max(checksum.summed) <= 1 << 20
    assert len(storage.writes) == 19


def test_many_tiny_arrays_with_checksums_share_a_write() -> None:
    checksum = Crc32()
    arrays: list[HostArray] = [np.full(16, number, np.float32) for number in range(2000)]
    storage = WatchedStorage(memory_storage())
    recorder = ObjectRecorder(storage, IOThreads(2))
    recorder.write("x", summed_arrays(SegmentLog(), checksum, arrays))
    assert (storage.get("x"), len(storage.writes)) == (expected_bytes(arrays), 1)
    big: list[HostArray] = [np.zeros(2 << 20, np.uint8), *arrays]
    checksum.summed.clear()
    recorder.write("y", summed_arrays(SegmentLog(), checksum, big))
    assert storage.get("y") == expected_bytes(big)
    assert len(storage.writes) == 4
    assert len(checksum.summed) == 2002


def test_a_checksum_may_cover_several_segments_or_no_bytes() -> None:
    crc = Crc32()
    array = np.arange(40, dtype=np.uint8)
    for sizes in (SIZES, TINY):
        storage = memory_storage()
        segments: list[Segment] = [
            BytesSegment(b""),
            ChecksumSegment(crc),
            BytesSegment(b"head"),
            whole(SegmentLog(), 0, array),
            ChecksumSegment(crc, 2),
        ]
        ObjectRecorder(storage, IOThreads(1), sizes=sizes).write("x", segments)
        payload = b"head" + array.tobytes()
        empty = crc.encode(crc.of(memoryview(b"")))
        assert storage.get("x") == empty + payload + crc.encode(crc.of(memoryview(payload)))


@pytest.mark.parametrize("sizes", [SIZES, TINY], ids=["inline", "tasks"])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("count", [-1, 0, 4])
def test_a_checksum_of_too_many_or_no_segments_is_refused(sizes: Sizes, place: int, count: int) -> None:
    log = SegmentLog()
    segments: list[Segment] = [whole(log, number, np.zeros(100, np.uint8)) for number in range(4)]
    segments.insert(place, ChecksumSegment(Crc32(), count))
    storage = memory_storage()
    with pytest.raises(PluginError, match=f"segment {place} of 5 is the checksum of {count} segments"):
        ObjectRecorder(storage, IOThreads(2), sizes=sizes).write("x", segments)
    assert sorted(log.closed) == [0, 1, 2, 3]
    assert list(storage.list()) == []


@pytest.mark.parametrize("sizes", [SIZES, TINY], ids=["inline", "tasks"])
def test_a_checksum_of_a_checksum_is_refused(sizes: Sizes) -> None:
    log = SegmentLog()
    segments: list[Segment] = [
        whole(log, 0, np.zeros(100, np.uint8)),
        ChecksumSegment(Crc32()),
        ChecksumSegment(Crc32(), 2),
    ]
    with pytest.raises(PluginError, match="may not cover another checksum"):
        ObjectRecorder(memory_storage(), IOThreads(2), sizes=sizes).write("x", segments)
    assert log.closed == [0]


class WrongSize(Crc32):
    """A checksum that states 5 bytes and encodes to 4."""

    nbytes = 5


@pytest.mark.parametrize("sizes", [SIZES, TINY, ODD], ids=["inline", "tasks", "pieces"])
@pytest.mark.parametrize("nbytes", [100, 0])
def test_a_checksum_of_another_size_than_stated_is_refused(sizes: Sizes, nbytes: int) -> None:
    log = SegmentLog()
    arrays: list[HostArray] = [np.zeros(nbytes, np.uint8)] * 3
    with pytest.raises(PluginError, match="crc32 states a size of 5 bytes and encodes to 4 bytes"):
        recorder = ObjectRecorder(memory_storage(), IOThreads(2), sizes=sizes)
        recorder.write("x", summed_arrays(log, WrongSize(), arrays))
    assert sorted(log.closed) == [0, 1, 2]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("fail_at", [0, 3, 9])
@pytest.mark.parametrize("what", ["write", "sum", "open"])
def test_a_failure_ends_the_wait_for_checksums(threads: int, fail_at: int, what: str) -> None:
    """Threads that wait for the checksum of a failed piece continue, and the first error is raised."""
    storage = WatchedStorage(memory_storage())
    storage.jitter = 1e-3
    checksum = Crc32(jitter=3e-3, fail_at=fail_at if what == "sum" else None)
    log = SegmentLog()
    # Each array needs several tasks, so that threads wait for checksums of others.
    arrays: list[HostArray] = [np.full(700, number, np.uint8) for number in range(12)]
    segments = summed_arrays(log, checksum, arrays)
    if what == "write":
        storage.fail_write_at = fail_at
    if what == "open":

        def fail() -> Sequence[tuple[Box, HostArray]]:
            raise RuntimeError("the copy failed")

        segments[2 * fail_at] = ArraySegment(Box((0,), (700,)), 1, fail, lambda: log.closed.append(fail_at))
    recorder = ObjectRecorder(storage, IOThreads(threads), sizes=TINY)
    with pytest.raises(StorageError if what == "write" else RuntimeError, match="because the test|copy failed"):
        recorder.write("x", segments)
    assert sorted(log.closed) == list(range(12))
    assert storage.aborted == storage.opened  # both are empty if no write began
    assert recorder.objects == ()


def waits_for_condition(thread: int) -> bool:
    """Return True if a thread is blocked in `threading.Condition.wait`."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code is threading.Condition.wait.__code__


def test_a_thread_waiting_for_a_checksum_ends_after_a_failure() -> None:
    """One thread sums the first task. It fails while another, which summed the rest, waits to write the checksum."""
    summed_rest = threading.Event()
    other_threads: list[int] = []

    class Failing(Crc32):
        def of(self, data: memoryview) -> int:
            if len(data) < 256:
                other_threads.append(threading.get_ident())
                summed_rest.set()
                return super().of(data)
            assert summed_rest.wait(60)
            deadline = time.monotonic() + 60
            while not waits_for_condition(other_threads[0]) and time.monotonic() < deadline:
                time.sleep(0.001)
            raise RuntimeError("the sum failed")

    log = SegmentLog()
    array = np.zeros(256 + 100, np.uint8)
    with pytest.raises(RuntimeError, match="the sum failed"):
        ObjectRecorder(memory_storage(), IOThreads(2), sizes=TINY).write("x", summed_arrays(log, Failing(), [array]))
    assert log.closed == [0]
