"""Reads of objects: results, errors, and no writes to targets after the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import ChecksumError, CorruptCheckpointError, ObjectNotFoundError, StorageError
from ckptcore.io.block_cache import RecentBlocks
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import SIZES, IOThreads, Sizes
from ckptcore.model import Box, BytesSegment, ChunkRead, HostArray, ObjectRecord
from tests.io.objects import TINY
from tests.io.watched_storage import WatchedStorage, memory_storage

MIB = 1 << 20


class Stored:
    """An object with known bytes, in a storage that counts reads."""

    def __init__(self, data: bytes, sizes: Sizes = SIZES, request_bytes: int = 1 << 20, threads: int = 3) -> None:
        self.data = data
        self.sizes = sizes
        self.storage = WatchedStorage(memory_storage(), request_bytes)
        self.threads = IOThreads(threads)
        recorder = ObjectRecorder(self.storage, self.threads, sizes=sizes)
        recorder.write("x", [BytesSegment(data)])
        self.records = {record.key: record for record in recorder.objects}

    def reader(self, *, verify: bool = True, strict: bool = False) -> ObjectReader:
        self.storage.reads.clear()
        self.storage.read_calls = 0
        return ObjectReader(self.storage, self.records, self.threads, verify=verify, strict=strict, sizes=self.sizes)


def noise(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


def read_whole(number: int, offset: int, array: HostArray) -> ChunkRead:
    box = Box.whole(array.shape)
    return ChunkRead("x", offset, box, array.itemsize, ((number, box, array),))


@pytest.mark.parametrize("verify", [True, False])
def test_each_byte_of_a_large_array_is_read_once(verify: bool) -> None:
    stored = Stored(noise(9 * MIB + 500))
    array = np.zeros(9 * MIB + 400, np.uint8)
    reader = stored.reader(verify=verify)
    assert list(reader.read_chunks([read_whole(0, 100, array)])) == [0]
    assert array.tobytes() == stored.data[100:]
    assert reader.bytes_read == (9 * MIB + 500 if verify else 9 * MIB + 400)
    assert reader.requests == (10 if verify else 3)


@pytest.mark.parametrize("verify", [True, False])
def test_many_small_arrays_share_a_request(verify: bool) -> None:
    stored = Stored(noise(1000 * 64 + 100))
    arrays = [np.zeros(16, np.float32) for _ in range(1000)]
    reader = stored.reader(verify=verify)
    reads = [read_whole(number, 100 + 64 * number, array) for number, array in enumerate(arrays)]
    assert sorted(reader.read_chunks(reads)) == list(range(1000))
    assert b"".join([array.tobytes() for array in arrays]) == stored.data[100:]
    assert reader.requests == 1
    assert reader.bytes_read == len(stored.data) - (0 if verify else 100)


def test_a_block_shared_by_arrays_is_read_once() -> None:
    stored = Stored(noise(8 * MIB))
    arrays = [np.zeros(MIB + 1000, np.uint8) for _ in range(7)]
    reader = stored.reader()
    reads = [read_whole(number, array.nbytes * number, array) for number, array in enumerate(arrays)]
    assert sorted(reader.read_chunks(reads)) == list(range(7))
    assert reader.bytes_read == 8 * MIB
    assert b"".join([array.tobytes() for array in arrays]) == stored.data[: 7 * (MIB + 1000)]


@pytest.mark.parametrize("verify", [True, False])
def test_targets_of_different_columns_share_reads(verify: bool) -> None:
    matrix = np.frombuffer(noise(4 * MIB), np.uint16).reshape(512, 4096)
    stored = Stored(matrix.tobytes())
    whole = Box.whole(matrix.shape)
    boxes = [Box((0, start), (512, start + 1024)) for start in range(0, 4096, 1024)]
    arrays = [np.zeros((512, 1024), np.uint16) for _ in boxes]
    targets = tuple([(number, box, array) for number, (box, array) in enumerate(zip(boxes, arrays, strict=True))])
    reader = stored.reader(verify=verify)
    assert sorted(reader.read_chunks([ChunkRead("x", 0, whole, 2, targets)])) == [0, 1, 2, 3]
    assert reader.bytes_read == 4 * MIB
    for box, array in zip(boxes, arrays, strict=True):
        assert np.array_equal(array, matrix[box.slices])
    reader = stored.reader(verify=verify)
    list(reader.read_chunks([ChunkRead("x", 0, whole, 2, targets[1:2])]))
    assert reader.bytes_read == (4 * MIB if verify else 511 * 8192 + 2048)


def test_overlapping_columns_of_several_arrays_are_read_once() -> None:
    """Rows are shorter than a block, so one block may contain columns of two rows."""
    stored = Stored(noise(9 * 50), sizes=TINY, request_bytes=1)
    matrix = np.frombuffer(stored.data, np.uint8).reshape(9, 50)
    boxes = [Box((0, 0), (7, 1)), Box((0, 0), (7, 7)), Box((2, 30), (9, 40))]
    arrays = [np.zeros(box.shape, np.uint8) for box in boxes]
    targets = tuple([(number, box, array) for number, (box, array) in enumerate(zip(boxes, arrays, strict=True))])
    filled: list[int] = []
    reader = ObjectReader(stored.storage, stored.records, stored.threads, sizes=TINY, progress=filled.append)
    assert sorted(reader.read_chunks([ChunkRead("x", 0, Box.whole(matrix.shape), 1, targets)])) == [0, 1, 2]
    assert sum(filled) == sum([array.nbytes for array in arrays])
    for box, array in zip(boxes, arrays, strict=True):
        assert np.array_equal(array, matrix[box.slices])


def test_distant_rows_are_read_separately_if_verification_is_off() -> None:
    matrix = np.frombuffer(noise(8 * MIB), np.uint8).reshape(8, MIB)
    stored = Stored(matrix.tobytes())
    array = np.zeros((8, 1000), np.uint8)
    read = ChunkRead("x", 0, Box.whole(matrix.shape), 1, ((5, Box((0, 10), (8, 1010)), array),))
    reader = stored.reader(verify=False)
    assert list(reader.read_chunks([read])) == [5]
    assert np.array_equal(array, matrix[:, 10:1010])
    assert (reader.bytes_read, reader.requests) == (8000, 8)
    reader = stored.reader()
    assert list(reader.read_chunks([read])) == [5]
    assert reader.bytes_read == 8 * MIB


def test_parts_of_long_rows_are_read_without_additional_bytes() -> None:
    """The target is a part of each row, which consists of whole blocks."""
    stored = Stored(noise(4 * 4096), sizes=TINY, request_bytes=64)
    matrix = np.frombuffer(stored.data, np.uint8).reshape(4, 4096)
    array = np.zeros((4, 1024), np.uint8)
    read = ChunkRead("x", 0, Box.whole(matrix.shape), 1, ((0, Box((0, 1024), (4, 2048)), array),))
    reader = stored.reader()
    assert list(reader.read_chunks([read])) == [0]
    assert np.array_equal(array, matrix[:, 1024:2048])
    assert reader.bytes_read == 4096


def test_large_preferred_requests_need_few_requests() -> None:
    stored = Stored(noise(16 * MIB), request_bytes=8 * MIB)
    arrays = [np.zeros(3 * MIB + 5, np.uint8) for _ in range(5)]
    reads = [read_whole(number, number * (3 * MIB + 5), array) for number, array in enumerate(arrays)]
    reader = stored.reader()
    assert sorted(reader.read_chunks(reads)) == list(range(5))
    assert b"".join([array.tobytes() for array in arrays]) == stored.data[: 15 * MIB + 25]
    assert reader.requests <= 4
    assert reader.bytes_read == 16 * MIB


def test_objects_without_recorded_checksums_are_not_verified() -> None:
    stored = Stored(noise(3000), sizes=TINY)
    stored.records = {"x": ObjectRecord("x", 3000)}
    array = np.zeros(10, np.uint8)
    reader = stored.reader()
    assert list(reader.read_chunks([read_whole(0, 1001, array)])) == [0]
    assert reader.bytes_read == 10
    stored.records = {}
    reader = stored.reader()
    assert (reader.size("x"), reader.get("x", 5, 9)) == (3000, stored.data[5:9])
    assert list(reader.read_chunks([read_whole(0, 1001, array)])) == [0]
    assert array.tobytes() == stored.data[1001:1011]
    with pytest.raises(ObjectNotFoundError):
        list(reader.read_chunks([ChunkRead("y", 0, Box((), ()), 1, ())]))


@pytest.mark.parametrize("verify", [True, False])
def test_a_strict_reader_refuses_objects_that_are_not_recorded(verify: bool) -> None:
    stored = Stored(noise(3000), sizes=TINY)
    stored.storage.put("stray", noise(3000))
    reader = stored.reader(verify=verify, strict=True)
    array = np.zeros(3000, np.uint8)
    stray = ChunkRead("stray", 0, Box((0,), (10,)), 1, ((1, Box((0,), (10,)), np.zeros(10, np.uint8)),))
    refused: list[Callable[[], object]] = [
        lambda: reader.get("stray"),
        lambda: reader.get("stray", 5, 5),
        lambda: reader.size("stray"),
        lambda: reader.size("absent"),
        lambda: list(reader.read_chunks([read_whole(0, 0, array), stray])),
        lambda: list(reader.read_chunks([ChunkRead("stray", 0, Box((0,), (0,)), 1, ())])),
    ]
    for refuse in refused:
        with pytest.raises(CorruptCheckpointError, match="is not one of the 1 objects that the root lists") as caught:
            refuse()
        assert caught.value.key in ("stray", "absent")
        assert repr(caught.value.key) in str(caught.value)
    assert stored.storage.read_calls == 0 and not array.any()
    assert reader.size("x") == 3000 and reader.get("x") == stored.data
    assert list(reader.read_chunks([read_whole(0, 0, array)])) == [0]
    assert array.tobytes() == stored.data


def test_get_verifies_the_blocks_it_covers() -> None:
    stored = Stored(noise(1000), sizes=TINY)
    reader = stored.reader()
    for start, stop in [(0, None), (0, 5), (63, 65), (64, 128), (999, 1000), (990, 5000), (1000, None), (70, 60)]:
        assert reader.get("x", start, stop) == stored.data[start:stop]
    assert isinstance(reader.get("x", 3, 70), bytes)
    damaged = bytearray(stored.data)
    damaged[130] ^= 1
    stored.storage.put("x", bytes(damaged))
    assert reader.get("x", 0, 128) == stored.data[:128]
    with pytest.raises(
        ChecksumError, match=r"'x' is damaged in bytes 128 to 192: expected xxh3_64:[0-9a-f]{16}, found"
    ) as caught:
        reader.get("x", 191, 192)
    assert (caught.value.key, caught.value.start, caught.value.stop) == ("x", 128, 192)
    assert stored.reader(verify=False).get("x") == bytes(damaged)
    stored.storage.put("x", stored.data[:600])
    with pytest.raises(CorruptCheckpointError, match="too short"):
        reader.get("x", 500, 700)


def test_targets_without_elements_are_complete_at_once() -> None:
    stored = Stored(noise(3000), sizes=TINY)
    empty = np.zeros((0, 3), np.float32)
    tile = Box((0, 0), (10, 3))
    reads = [
        ChunkRead("x", 0, tile, 4, ((7, Box((2, 0), (2, 3)), empty),)),
        ChunkRead("x", 3000, Box((0, 0), (0, 3)), 4, ((8, Box((0, 0), (0, 3)), empty),)),
        ChunkRead("x", 0, tile, 4, ((9, Box((10, 0), (12, 3)), np.zeros((2, 3), np.float32)),)),
    ]
    reader = stored.reader()
    assert list(reader.read_chunks(reads)) == [7, 8, 9]
    assert reader.requests == 0
    assert list(reader.read_chunks([])) == []


HOSTILE: Sequence[ChunkRead] = [
    ChunkRead("x", 2999, Box((0,), (2,)), 1, ()),
    ChunkRead("x", -1, Box((0,), (2,)), 1, ()),
    ChunkRead("x", 1 << 80, Box((0,), (1,)), 1, ()),
    ChunkRead("x", 0, Box((0, 0), (1 << 40, 1 << 40)), 8, ()),
    ChunkRead("x", 0, Box((0,), (2,)), 0, ()),
    ChunkRead("x", 0, Box((0,), (2,)), -4, ()),
    ChunkRead("x", 0, Box((5,), (2,)), 1, ()),
    ChunkRead("x", 0, Box((0,), (-2,)), 1, ()),
    ChunkRead("x", 0, Box((0, 0), (-2, -2)), 1, ()),
    ChunkRead("x", 0, Box((0, 0), (2,)), 1, ()),
    ChunkRead("x", 0, Box((0,), (2,)), 1, ((0, Box((0,), (3,)), np.zeros(2, np.uint8)),)),
    ChunkRead("x", 0, Box((0,), (2,)), 2, ((0, Box((0,), (2,)), np.zeros(2, np.uint8)),)),
    ChunkRead("x", 0, Box((0,), (2,)), 1, ((0, Box((0, 0), (2, 2)), np.zeros((2, 2), np.uint8)),)),
    ChunkRead("x", 0, Box((0,), (2,)), 1, ((0, Box((3,), (1,)), np.zeros(2, np.uint8)),)),
]


@pytest.mark.parametrize("read", HOSTILE)
def test_invalid_reads_are_refused_before_any_request(read: ChunkRead) -> None:
    stored = Stored(noise(3000), sizes=TINY)
    for verify in (True, False):
        reader = stored.reader(verify=verify)
        with pytest.raises(CorruptCheckpointError) as caught:
            list(reader.read_chunks([read]))
        assert caught.value.key == "x"
        assert "x" in str(caught.value)
        assert reader.requests == 0


def test_the_error_of_a_read_behind_the_end_names_the_range() -> None:
    stored = Stored(noise(3000), sizes=TINY)
    with pytest.raises(CorruptCheckpointError, match="expected bytes 2990 to 3010.*found 3000 bytes") as caught:
        list(stored.reader().read_chunks([ChunkRead("x", 2990, Box((0,), (20,)), 1, ())]))
    assert (caught.value.start, caught.value.stop) == (2990, 3010)


def test_a_wrong_number_of_checksums_is_refused() -> None:
    stored = Stored(noise(3000), sizes=TINY)
    stored.records = {"x": ObjectRecord("x", 1 << 60, stored.records["x"].checksums)}
    with pytest.raises(CorruptCheckpointError, match="checksums of 'x' are damaged"):
        list(stored.reader().read_chunks([read_whole(0, 0, np.zeros(4, np.uint8))]))
    with pytest.raises(CorruptCheckpointError, match="checksums of 'x' are damaged"):
        stored.reader().get("x")


def test_a_truncated_object_is_detected() -> None:
    stored = Stored(noise(3000), sizes=TINY)
    stored.storage.put("x", stored.data[:2000])
    for verify in (True, False):
        with pytest.raises(CorruptCheckpointError):
            list(stored.reader(verify=verify).read_chunks([read_whole(0, 0, np.zeros(2500, np.uint8))]))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("end", ["error", "close"])
def test_no_thread_writes_into_targets_after_the_end(threads: int, end: str) -> None:
    stored = Stored(noise(40_000), sizes=TINY, request_bytes=64, threads=threads)
    stored.storage.jitter = 1e-3
    arrays = [np.zeros(1000, np.uint8) for _ in range(40)]
    reads = [read_whole(number, number * 1000, array) for number, array in enumerate(arrays)]
    reader = stored.reader()
    results = reader.read_chunks(reads)
    if end == "error":
        stored.storage.fail_read_at = 60
        with pytest.raises(StorageError, match="read 60 of 'x' failed because the test said so"):
            list(results)
    else:
        next(results)
        results.close()
    assert stored.storage.busy == 0
    for array in arrays:
        array[...] = 7
    calls = stored.storage.read_calls
    # Once all threads are at the barrier, none of them has unfinished reads.
    all_threads = threading.Barrier(threads + 1, timeout=60)
    for _ in range(threads):
        stored.threads.submit(all_threads.wait)
    all_threads.wait()
    assert stored.storage.read_calls == calls < 600
    assert all((array == 7).all() for array in arrays)


def test_targets_must_be_contiguous_and_writable() -> None:
    stored = Stored(noise(3000), sizes=TINY)
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for array in (frozen, np.zeros((8,), np.uint8)[::2]):
        with pytest.raises(ValueError, match="not C-contiguous and writable"):
            list(stored.reader().read_chunks([read_whole(0, 0, array)]))


def test_names_and_sizes_come_from_the_storage() -> None:
    stored = Stored(b"1")
    stored.storage.put("d/e", b"")
    reader = stored.reader()
    assert list(reader.list_names()) == ["d/", "x"]
    assert reader.address is None
    assert reader.size("x") == 1


def test_consecutive_ranges_read_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded chunks are read one by one, and a block contains several of them."""
    stored = Stored(noise(5 * MIB + 100))
    reader = stored.reader()
    get, read = stored.storage.get, 0

    def counting(key: str, start: int = 0, stop: int | None = None) -> bytes:
        nonlocal read
        data = get(key, start, stop)
        read += len(data)
        return data

    monkeypatch.setattr(stored.storage, "get", counting)
    positions = range(10, 5 * MIB + 100, 300_000)
    for start in positions:
        assert reader.get("x", start, start + 300_000) == stored.data[start : start + 300_000]
    assert read == 5 * MIB + 100
    assert reader.get("x", 10) == stored.data[10:]


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=12))
def test_any_sequence_of_ranges_returns_the_stored_bytes(asked: list[tuple[int, int]]) -> None:
    stored = Stored(noise(67), sizes=TINY)
    reader = stored.reader()
    for start, stop in asked:
        assert reader.get("x", start, stop) == stored.data[start:stop]


def test_the_least_recently_used_block_is_dropped() -> None:
    blocks = RecentBlocks(2)
    for start in (0, 1, 2):
        blocks.keep("x", start, bytes([start]))
        blocks.find("x", 0)
    assert [blocks.find("x", start) for start in (0, 1, 2)] == [bytes([0]), None, bytes([2])]
