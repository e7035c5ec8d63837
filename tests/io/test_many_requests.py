"""Remote storages get many requests at once: for parts of several objects, and for reads of several objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from ckptcore_testing import FarStorage
from ckptcore_testing.arrays import same_bits
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from ckptcore.io import object_writes, threads
from ckptcore.io.memory import map_pages
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads, coalesce, for_each, map_ordered
from ckptcore.model import ArraySegment, Box, BytesSegment, ChunkRead, HostArray, Segment
from ckptcore.protocols import ObjectWriter
from tests.io.objects import TINY, SegmentLog, stored, stored_bytes, tiles

MIB = 1 << 20


def noise(nbytes: int) -> HostArray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def whole(log: SegmentLog, number: int, array: HostArray) -> ArraySegment:
    box = Box.whole(array.shape)
    return log.segment(number, box, [(box, array)])


def read_whole(key: str, number: int, offset: int, array: HostArray) -> ChunkRead:
    box = Box.whole(array.shape)
    return ChunkRead(key, offset, box, array.itemsize, ((number, box, array),))


def test_full_parts_are_written_concurrently_without_copies() -> None:
    storage = FarStorage(concurrency=12, part_bytes=MIB, latency=0.03)
    array = noise(24 * MIB)
    small = [noise(3000 + number) for number in range(50)]
    log = SegmentLog()
    segments: list[Segment] = [BytesSegment(b"head"), *[whole(log, n, part) for n, part in enumerate([*small, array])]]
    recorder = ObjectRecorder(storage, IOThreads())
    recorder.write("x", segments)
    expected = b"head" + b"".join([part.tobytes() for part in [*small, array]])
    assert storage.get("x") == expected
    assert recorder.objects[0].size == len(expected)
    parts = sorted([(request.start, request.stop) for request in storage.requests if request.kind == "part"])
    assert parts == [(start, min(start + MIB, len(expected))) for start in range(0, len(expected), MIB)]
    assert storage.peak_held_bytes == 0
    assert storage.count("begin", "complete") == 2
    assert 8 < storage.peak_at_once <= 12
    assert sorted(log.closed) == list(range(51))


def test_a_given_number_of_threads_limits_the_requests() -> None:
    storage = FarStorage(concurrency=12, part_bytes=MIB, latency=0.005)
    recorder = ObjectRecorder(storage, IOThreads(2))
    recorder.write_many([(f"{number}", [BytesSegment(bytes(3 * MIB))]) for number in range(4)])
    assert storage.peak_at_once == 2


def test_each_concurrent_request_uses_the_memory_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def counted(nbytes: int) -> object:
        taken.append(nbytes)
        return map_pages(nbytes)

    monkeypatch.setattr(object_writes, "map_pages", counted)
    storage = FarStorage(concurrency=6, part_bytes=2 * MIB, latency=0.002)
    strided = noise(2 * 40 * MIB)[::2]
    ObjectRecorder(storage, IOThreads()).write("x", [whole(SegmentLog(), 0, strided)])
    assert storage.get("x") == strided.tobytes()
    assert 1 <= len(taken) <= 6
    assert set(taken) == {2 * MIB}
    assert storage.peak_held_bytes == 0


def test_the_next_object_begins_before_the_previous_one_is_complete() -> None:
    storage = FarStorage(concurrency=8, part_bytes=MIB, latency=0.02)
    recorder = ObjectRecorder(storage, IOThreads())
    data = {f"{number:02}": noise((1 + number % 3) * MIB + 5).tobytes() for number in range(12)}
    data |= {f"small {number:02}": bytes([number]) * 100 for number in range(12)}
    recorder.write_many([(key, [BytesSegment(content)]) for key, content in data.items()])
    assert [record.key for record in recorder.objects] == list(data)
    assert {key: storage.get(key) for key in data} == data
    assert storage.peak_at_once > 5
    kinds = [(request.kind, request.key) for request in storage.requests]
    assert kinds.index(("begin", "03")) < kinds.index(("complete", "02"))


def test_objects_are_taken_by_one_thread_at_a_time_and_not_after_an_error() -> None:
    class Full(FarStorage):
        def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
            if key == "5":
                raise StorageError("there is no room because the test said so")
            return super().open_writer(key, size)

    storage = Full(concurrency=4, part_bytes=MIB, latency=0.005)
    log = SegmentLog()
    asking = threading.Lock()
    asked: list[int] = []

    def objects() -> Iterator[tuple[str, Sequence[Segment]]]:
        for number in range(100):
            assert asking.acquire(blocking=False)
            asked.append(number)
            asking.release()
            yield f"{number}", [whole(log, number, np.zeros(2 * MIB + 1, np.uint8))]

    recorder = ObjectRecorder(storage, IOThreads())
    with pytest.raises(StorageError, match="no room"):
        recorder.write_many(objects())
    assert len(asked) < 20
    assert sorted(log.closed) == asked
    there = set(storage.list())
    aborted = {request.key for request in storage.requests if request.kind == "abort"}
    begun = {request.key for request in storage.requests if request.kind == "begin"}
    assert begun == there | aborted and not there & aborted


@given(st.data())
def test_arrays_written_in_parts_equal_numpy_slices(data: st.DataObject) -> None:
    sources, segments, offsets, log = data.draw(stored())
    reads, targets = data.draw(tiles("x", sources, offsets))
    storage = FarStorage(
        concurrency=4, part_bytes=data.draw(st.sampled_from([64, 256, 1024])),
        request_bytes=data.draw(st.sampled_from([1, 64, 300, 4096])),
    )  # fmt: skip
    io_threads = IOThreads(data.draw(st.sampled_from([1, None])))
    recorder = ObjectRecorder(storage, io_threads, sizes=TINY)
    recorder.write_many([("x", segments)])
    content = storage.get("x")
    for source, offset in zip(sources, offsets, strict=True):
        assert content[offset : offset + source.nbytes] == stored_bytes(source)
    assert sorted(log.closed) == log.opened == list(range(len(sources)))
    assert storage.peak_held_bytes <= (storage.part_bytes if len(content) <= storage.part_bytes else 0)
    records = {record.key: record for record in recorder.objects}
    reader = ObjectReader(storage, records, io_threads, verify=data.draw(st.booleans()), sizes=TINY)
    assert sorted(reader.read_chunks(reads)) == sorted({number for read in reads for number, _, _ in read.targets})
    for array, expected in targets:
        assert same_bits(array, expected)


def written(storage: FarStorage, objects: dict[str, bytes]) -> ObjectRecorder:
    recorder = ObjectRecorder(storage, IOThreads())
    recorder.write_many([(key, [BytesSegment(data)]) for key, data in objects.items()])
    storage.forget()
    return recorder


@pytest.mark.parametrize("recorded", [True, False])
def test_many_objects_are_read_concurrently(recorded: bool) -> None:
    storage = FarStorage(concurrency=12, part_bytes=MIB, request_bytes=MIB, latency=0.03)
    objects = {f"{number:02}": noise(1000 + number).tobytes() for number in range(24)}
    recorder = written(storage, objects)
    records = {record.key: record for record in recorder.objects} if recorded else {}
    arrays = [np.zeros(len(data), np.uint8) for data in objects.values()]
    reader = ObjectReader(storage, records, IOThreads())
    reads = [read_whole(key, number, 0, arrays[number]) for number, key in enumerate(objects)]
    assert sorted(reader.read_chunks(reads)) == list(range(24))
    assert [array.tobytes() for array in arrays] == list(objects.values())
    assert storage.count("get") == 24
    assert storage.count("head") == (0 if recorded else 24)
    assert 8 < storage.peak_at_once <= 12


@pytest.mark.parametrize("verify", [True, False])
def test_a_large_array_is_read_in_requests_of_the_preferred_size(verify: bool) -> None:
    storage = FarStorage(concurrency=8, part_bytes=MIB, request_bytes=2 * MIB, latency=0.02)
    data = noise(16 * MIB)
    recorder = written(storage, {"x": data.tobytes()})
    array = np.zeros(16 * MIB, np.uint8)
    reader = ObjectReader(storage, {record.key: record for record in recorder.objects}, IOThreads(), verify=verify)
    assert list(reader.read_chunks([read_whole("x", 0, 0, array)])) == [0]
    assert np.array_equal(array, data)
    asked = sorted([(request.start, request.stop) for request in storage.requests])
    assert asked == [(start, start + 2 * MIB) for start in range(0, 16 * MIB, 2 * MIB)]
    assert 4 < storage.peak_at_once <= 8


def test_only_ranges_close_to_each_other_share_a_request() -> None:
    storage = FarStorage(concurrency=8, part_bytes=MIB, request_bytes=4 * MIB)
    data = noise(16 * MIB).tobytes()
    written(storage, {"x": data})
    reader = ObjectReader(storage, {}, IOThreads())
    places = [0, 900_000, 1_700_000, 10 * MIB]
    arrays = [np.zeros(100, np.uint8) for _ in places]
    reads = [read_whole("x", number, start, arrays[number]) for number, start in enumerate(places)]
    assert sorted(reader.read_chunks(reads)) == [0, 1, 2, 3]
    assert [array.tobytes() for array in arrays] == [data[start : start + 100] for start in places]
    assert storage.count("get") == 2


def test_get_many_needs_fewer_requests_than_get() -> None:
    storage = FarStorage(concurrency=8, part_bytes=MIB, request_bytes=MIB, latency=0.02)
    objects = {"a": noise(3 * MIB).tobytes(), "b": b"short", "c": b""}
    recorder = written(storage, objects)
    ranges: list[tuple[str, int, int | None]] = [
        ("b", 1, None), ("a", 5, 10), ("absent", 0, 4), ("a", 0, 3), ("a", 2 * MIB, 2 * MIB + 7), ("b", 3, 100),
        ("c", 0, 9),
        ("a", 5, 10), ("b", 7, 9), ("a", 200, 200), ("absent too", 0, None),
    ]  # fmt: skip
    expected = [None if "absent" in key else objects[key][start:stop] for key, start, stop in ranges]
    assert ObjectReader(storage, {}, IOThreads()).get_many(ranges) == expected
    assert storage.count("get") == 7
    assert storage.peak_at_once > 2
    assert ObjectReader(storage, {}, IOThreads(1)).get_many(ranges) == expected
    records = {record.key: record for record in recorder.objects}
    assert ObjectReader(storage, records, IOThreads()).get_many(ranges) == expected
    with pytest.raises(CorruptCheckpointError, match="absent"):
        ObjectReader(storage, records, IOThreads(), strict=True).get_many(ranges)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 99), st.none() | st.integers(0, 50)), max_size=12),
    st.integers(0, 20),
    st.integers(1, 60),
)
def test_each_range_is_in_one_group_of_limited_size(
    given_ranges: list[tuple[str, int, int | None]], gap: int, most: int
) -> None:
    ranges = [(key, start, None if length is None else start + length) for key, start, length in given_ranges]
    groups = list(coalesce(ranges, gap, most))
    assert sorted([number for group in groups for number in group.numbers]) == list(range(len(ranges)))
    for group in groups:
        for key, start, stop in [ranges[number] for number in group.numbers]:
            assert key == group.key and start >= group.start
            assert (stop is None) == (group.stop is None)
            assert stop is None or group.stop is None or stop <= group.stop
        assert len(group.numbers) == 1 or (group.stop is not None and group.stop - group.start <= most)


def test_a_failed_request_for_a_size_is_raised() -> None:
    storage = FarStorage(concurrency=4)
    written(storage, {"a": b"1"})
    arrays = [np.zeros(1, np.uint8) for _ in range(2)]
    with pytest.raises(ObjectNotFoundError):
        list(
            ObjectReader(storage, {}, IOThreads()).read_chunks(
                [read_whole(key, number, 0, arrays[number]) for number, key in enumerate(["a", "b"])]
            )
        )


def test_additional_threads_for_remote_storages_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.05)
    io_threads = IOThreads()
    together = threading.Barrier(20)
    seen: set[threading.Thread] = set()

    def work() -> None:
        together.wait(30)  # fails unless 20 threads wait at once
        seen.add(threading.current_thread())

    for _ in range(2):
        io_threads.run(work, 20, 20)
        for thread in seen - {threading.current_thread()}:
            thread.join(30)
            assert not thread.is_alive()


def test_threads_waiting_for_a_remote_storage_do_not_block_other_work() -> None:
    io_threads = IOThreads()
    release = threading.Event()
    together = threading.Barrier(2)

    def wait() -> None:
        release.wait(30)

    def meet() -> None:
        together.wait(30)

    crew = io_threads.start(wait, 30, 30)
    try:
        io_threads.run(meet, 2)
    finally:
        release.set()
        crew.join()


@pytest.mark.parametrize("parallelism", [1, 20])
def test_map_ordered_keeps_the_order_and_raises_errors(parallelism: int) -> None:
    io_threads = IOThreads()
    squares = map_ordered(io_threads, range(50), lambda number: number * number, parallelism=parallelism)
    assert squares == [number * number for number in range(50)]
    assert map_ordered(io_threads, [], str, parallelism=parallelism) == []
    with pytest.raises(ZeroDivisionError):
        map_ordered(io_threads, range(50), lambda number: 1 // (number - 7), parallelism=parallelism)


def test_for_each_runs_calls_concurrently() -> None:
    together = threading.Barrier(20)

    def meet(_: int) -> None:
        together.wait(30)  # fails unless 20 threads wait at once

    for_each(IOThreads(), range(20), meet, parallelism=20)
