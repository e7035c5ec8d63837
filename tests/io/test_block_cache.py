"""Block caches: they reread and reverify blocks when necessary, and return only verified bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore.io.block_cache import BlockCache, RecentBlocks
from ckptcore.io.checksums import BlockChecksums, RecordedChecksums
from ckptcore.io.threads import IOThreads
from ckptcore.model import ObjectRecord
from ckptcore.protocols import RangeReader

BLOCK = 100
SIZE = 1030


class ChangingObject:
    """An object whose bytes and stamp the test sets.

    Attributes:
        data: the current bytes.
        now: the current stamp.
        reads: all ranges that were read, in order.
        after_read: called after each read.
    """

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.now: Hashable | None = 0
        self.reads: list[tuple[int, int]] = []
        self.after_read: Callable[[], None] = lambda: None

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for start, memory in ranges:
            self.reads.append((start, start + len(memory)))
            memory[:] = self.data[start : start + len(memory)]
        self.after_read()

    def stamp(self) -> Hashable | None:
        return self.now

    def size(self) -> int:
        return len(self.data)

    def memory(self) -> memoryview | None:
        return memoryview(self.data).toreadonly()


def data_of(size: int = SIZE) -> bytes:
    return np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()


def held(reader: ChangingObject, far: RangeReader | None = None, *, verified: bool = True) -> BlockCache:
    sums = None
    if verified:
        writer = BlockChecksums(SIZE, block_bytes=BLOCK)
        writer.add(0, data_of())
        sums = RecordedChecksums(ObjectRecord("a", len(reader.data), writer.encode()), block_bytes=BLOCK)
    size, recent = len(reader.data), RecentBlocks(32)
    return BlockCache("a", far or reader, size, sums, block_bytes=BLOCK, recent=recent, count=lambda nbytes: None)


def read(cache: BlockCache, start: int, stop: int) -> bytes:
    memory = bytearray(stop - start)
    cache.read_into(start, memoryview(memory))
    return bytes(memory)


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=20), st.booleans())
def test_any_sequence_of_reads_returns_the_stored_bytes(bounds: list[tuple[int, int]], verified: bool) -> None:
    reader = ChangingObject(data_of())
    cache = held(reader, verified=verified)
    for pair in bounds:
        start, stop = min(pair), max(pair)
        if start < stop and cache.is_cached(start, stop):
            memory = cache.memory()
            assert memory is not None and memory[start:stop] == reader.data[start:stop]
        assert read(cache, start, stop) == reader.data[start:stop]


class FarObject:
    """An object on a remote storage: a reader without stamps, sizes or mapped memory."""

    def __init__(self, inner: ChangingObject) -> None:
        self.get_into = inner.get_into


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=20), st.booleans())
def test_any_sequence_of_reads_of_a_remote_object_returns_the_stored_bytes(
    bounds: list[tuple[int, int]], verified: bool
) -> None:
    reader = ChangingObject(data_of())
    cache = held(reader, FarObject(reader), verified=verified)
    for pair in bounds:
        start, stop = min(pair), max(pair)
        assert not cache.is_cached(start, stop) and not cache.fetch(start, stop, IOThreads(1))
        assert read(cache, start, stop) == reader.data[start:stop]


def test_the_last_verified_blocks_of_a_remote_object_are_kept() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader, FarObject(reader))
    read(cache, 250, 530)
    read(cache, 210, 300)
    read(cache, 599, 601)
    assert sorted(reader.reads) == [(200, 300), (300, 500), (500, 600), (600, 700)]
    reader.data[350] ^= 1
    with pytest.raises(ChecksumError, match="bytes 300 to 400"):
        read(cache, 340, 341)
    assert len(read(held(reader, FarObject(reader), verified=False), 340, 341)) == 1 and reader.reads[-1] == (340, 341)


def test_a_block_of_a_remote_object_is_requested_once() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader, FarObject(reader))
    read(cache, 110, 120)
    for _ in range(5):
        assert read(cache, 100, 200) == reader.data[100:200]
    assert reader.reads == [(100, 200)]
    for _ in range(2):
        read(cache, 1000, SIZE)
    assert reader.reads == [(100, 200), (1000, SIZE)]


def test_fetch_reads_each_block_once_until_the_object_changes() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader)
    read(cache, 250, 260)
    assert cache.fetch(150, SIZE, IOThreads(3)) and cache.is_cached(100, SIZE)
    assert sorted(reader.reads) == [(100, 200), (200, 300), (300, SIZE)]
    reader.data[450] ^= 1
    reader.now = 1
    with pytest.raises(ChecksumError, match="bytes 400 to 500"):
        cache.fetch(0, SIZE, IOThreads(3))
    assert cache.fetch(500, 700, IOThreads(3)) and not cache.is_cached(400, 700)
    reader.now = None
    before = len(reader.reads)
    assert not cache.fetch(500, 700, IOThreads(3)) and len(reader.reads) == before
    with pytest.raises(CorruptCheckpointError, match="found 1030 bytes"):
        cache.fetch(0, SIZE + 1, IOThreads(3))


def test_a_block_is_verified_once() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader)
    assert not cache.is_cached(250, 260)
    read(cache, 250, 260)
    assert reader.reads == [(200, 300)]
    assert cache.is_cached(200, 300) and not cache.is_cached(250, 310)
    read(cache, 20, 30)
    read(cache, 210, 215)  # a verified block, although another one was verified last
    assert reader.reads[1:] == [(0, 100), (210, 215)]
    read(cache, 290, 530)  # part of a block, whole blocks, part of a block
    assert reader.reads[3:] == [(200, 600)]
    assert cache.is_cached(200, 600) and not cache.is_cached(1000, SIZE)
    read(cache, 1000, SIZE)  # the last block is shorter
    assert cache.is_cached(1010, SIZE)


def test_blocks_are_verified_again_after_a_change() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader)
    read(cache, 250, 260)
    read(cache, 20, 30)
    reader.data[255] ^= 1
    reader.now = 1
    assert not cache.is_cached(250, 260)
    with pytest.raises(ChecksumError, match="bytes 200 to 300"):
        read(cache, 250, 260)
    with pytest.raises(ChecksumError):  # again, because a damaged block is never recorded as verified
        read(cache, 250, 260)
    assert read(cache, 120, 130) == reader.data[120:130]
    reader.data[255] ^= 1
    assert read(cache, 250, 260) == reader.data[250:260]


def test_a_change_during_a_read_is_detected() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader)
    read(cache, 250, 260)
    read(cache, 20, 30)

    def change() -> None:
        reader.data[252] ^= 1
        reader.now = 1
        reader.after_read = lambda: None

    reader.after_read = change
    with pytest.raises(ChecksumError):
        read(cache, 250, 260)


def test_a_block_that_changes_while_it_is_verified_does_not_count_as_verified() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader)

    def change() -> None:
        reader.data[252] ^= 1
        reader.now = 1
        reader.after_read = lambda: None

    reader.after_read = change
    read(cache, 250, 260)  # returns the bytes from before the change
    assert not cache.is_cached(250, 260)
    read(cache, 20, 30)
    with pytest.raises(ChecksumError):
        read(cache, 250, 260)


def test_blocks_of_an_object_without_a_stamp_do_not_count_as_verified() -> None:
    reader = ChangingObject(data_of())
    reader.now = None
    cache = held(reader)
    read(cache, 250, 260)
    assert not cache.is_cached(250, 260)
    assert read(cache, 260, 270) == reader.data[260:270] and len(reader.reads) == 1  # from the memory of the last block
    read(cache, 20, 30)
    reader.data[252] ^= 1
    with pytest.raises(ChecksumError):
        read(cache, 250, 260)


def test_a_damaged_block_does_not_replace_the_last_verified_block() -> None:
    reader = ChangingObject(data_of())
    reader.now = None
    cache = held(reader)
    first = read(cache, 20, 30)
    reader.data[250] ^= 1
    with pytest.raises(ChecksumError):
        read(cache, 255, 260)
    assert read(cache, 20, 30) == first  # although the failed read overwrote the memory of this block


def test_the_last_block_of_a_thread_is_not_used_for_another_object() -> None:
    reader, other = ChangingObject(data_of()), ChangingObject(data_of())
    reader.now = other.now = None
    other.data[25] ^= 1
    first, second = held(reader), held(other)
    assert read(first, 20, 30) == reader.data[20:30]
    with pytest.raises(ChecksumError):
        read(second, 20, 30)
    assert read(first, 30, 40) == reader.data[30:40]


def test_blocks_verified_with_a_stamp_are_verified_again_without_one() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader)
    read(cache, 250, 260)
    reader.data[252] ^= 1
    reader.now = None
    with pytest.raises(ChecksumError):
        read(cache, 250, 260)


def test_ranges_behind_the_end_of_the_object_are_not_cached() -> None:
    for verified in (True, False):
        reader = ChangingObject(data_of())
        cache = held(reader, verified=verified)
        read(cache, 900, SIZE)
        assert cache.is_cached(900, SIZE) and not cache.is_cached(900, SIZE + 1) and not cache.is_cached(-1, 5)
        del reader.data[1000:]
        reader.now = 1
        assert not cache.is_cached(900, 1010)
        with pytest.raises(CorruptCheckpointError, match="expected bytes 0 to 1031"):
            read(cache, 0, SIZE + 1)


def test_without_verification_an_object_is_cached_after_its_first_read() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader, verified=False)
    assert not cache.is_cached(0, 10)
    read(cache, 500, 510)
    assert reader.reads == [(500, 510)] and cache.is_cached(0, 10)


@pytest.mark.parametrize("stamp", [0, None])
def test_threads_do_not_wait_for_each_other(stamp: Hashable | None) -> None:
    reader = ChangingObject(data_of())
    reader.now = stamp
    cache, inside, go_on = held(reader), threading.Event(), threading.Event()

    def wait() -> None:
        reader.after_read = lambda: None
        inside.set()
        go_on.wait(20)

    reader.after_read = wait
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(read(cache, 250, 260)))
    thread.start()
    assert inside.wait(20)
    assert read(cache, 20, 30) == reader.data[20:30]
    go_on.set()
    thread.join()
    assert results == [reader.data[250:260]]


def test_first_reads_of_several_blocks_ask_once_for_the_stamp() -> None:
    reader = ChangingObject(data_of())
    stamps: list[Hashable | None] = []

    def stamp() -> Hashable | None:
        stamps.append(reader.now)
        return reader.now

    reader.stamp = stamp  # type: ignore[method-assign]
    cache = held(reader)
    for start in (0, 250, 510, 900):
        assert read(cache, start, start + 60) == reader.data[start : start + 60]
    assert len(stamps) == 1


def test_blocks_that_are_verified_after_a_change_are_not_used_with_the_earlier_stamp() -> None:
    reader = ChangingObject(data_of())
    cache = held(reader)
    read(cache, 0, 100)
    reader.now = 1
    read(cache, 100, 200)
    assert not cache.is_cached(100, 200)
    reader.data[150] ^= 1
    with pytest.raises(ChecksumError, match="bytes 100 to 200"):
        read(cache, 100, 200)
