"""Round trips equal NumPy slices, for all boxes, strides, dtypes and numbers of threads."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from ckptcore_testing.arrays import same_bits
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import ChecksumError
from ckptcore.io.elements import plain
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads
from ckptcore.model import Box, BytesSegment, ChunkRead
from tests.io.objects import TINY, SegmentLog, assert_targets_are_filled, stored, stored_bytes, tiles
from tests.io.watched_storage import WatchedStorage, memory_storage


@given(st.data())
def test_written_objects_contain_the_bytes_of_their_segments(data: st.DataObject) -> None:
    sources, segments, offsets, log = data.draw(stored())
    storage = memory_storage()
    recorder = ObjectRecorder(storage, IOThreads(data.draw(st.sampled_from([1, 3]))), sizes=TINY)
    recorder.write("x", segments)
    content = storage.get("x")
    assert len(content) == sum(segment.nbytes for segment in segments)
    for source, offset in zip(sources, offsets, strict=True):
        assert content[offset : offset + source.nbytes] == stored_bytes(source)
    position = 0
    for segment in segments:
        if isinstance(segment, BytesSegment):
            assert content[position : position + segment.nbytes] == segment.data
        position += segment.nbytes
    assert log.opened == list(range(len(sources)))
    assert sorted(log.closed) == log.opened


@given(st.data())
def test_targets_equal_numpy_slices(data: st.DataObject) -> None:
    sources, segments, offsets, _ = data.draw(stored())
    reads, targets = data.draw(tiles("x", sources, offsets))
    assert_targets_are_filled(data, segments, reads, targets)


@given(st.data())
def test_a_damaged_byte_is_detected_or_not_read(data: st.DataObject) -> None:
    sources, segments, offsets, _ = data.draw(stored())
    reads, targets = data.draw(tiles("x", sources, offsets))
    storage = memory_storage()
    threads = IOThreads(2)
    recorder = ObjectRecorder(storage, threads, sizes=TINY)
    recorder.write("x", segments)
    damaged = bytearray(storage.get("x"))
    if not damaged:
        return
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    storage.put("x", bytes(damaged))
    reader = ObjectReader(storage, {record.key: record for record in recorder.objects}, threads, sizes=TINY)
    try:
        list(reader.read_chunks(reads))
    except ChecksumError as error:
        assert error.key == "x"
        assert error.start is not None and error.stop is not None
        assert error.start <= place < error.stop
        assert error.stop - error.start <= TINY.block
    else:
        for array, expected in targets:
            assert same_bits(array, expected)
    start = data.draw(st.integers(0, len(damaged)))
    stop = data.draw(st.integers(start, len(damaged)))
    block = place // TINY.block
    if start < stop and start // TINY.block <= block <= (stop - 1) // TINY.block:
        with pytest.raises(ChecksumError, match="xxh3_64:"):
            reader.get("x", start, stop)
    else:
        assert reader.get("x", start, stop) == bytes(damaged[start:stop])


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_threads_does_not_matter(seed: int) -> None:
    random.seed(seed)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        generator = np.random.default_rng(seed)
        sources = [generator.integers(0, 256, (30, 1 + 37 * number), np.uint8) for number in range(12)]
        log = SegmentLog()
        segments = [
            log.segment(number, Box.whole(source.shape), [(Box.whole(source.shape), source)])
            for number, source in enumerate(sources)
        ]
        storage = WatchedStorage(memory_storage(), request_bytes=64)
        storage.jitter = 2e-4
        threads = IOThreads(6)
        recorder = ObjectRecorder(storage, threads, sizes=TINY)
        recorder.write("x", segments)
        assert sorted(log.closed) == list(range(len(sources)))
        reads, offset = [], 0
        results = []
        for number, source in enumerate(sources):
            half = source.shape[1] // 2
            left = Box((0, 0), (30, half))
            right = Box((0, half), source.shape)
            arrays = [np.empty(left.shape, np.uint8), np.empty(right.shape, np.uint8)]
            targets = ((2 * number, left, arrays[0]), (2 * number + 1, right, arrays[1]))
            reads.append(ChunkRead("x", offset, Box.whole(source.shape), 1, targets))
            results.extend([(arrays[0], source[:, :half]), (arrays[1], source[:, half:])])
            offset += source.nbytes
        records = {record.key: record for record in recorder.objects}
        reader = ObjectReader(storage, records, threads, sizes=TINY)
        for number in reader.read_chunks(reads):
            target, expected = results[number]
            assert np.array_equal(plain(target), plain(expected))  # a target is complete when its number is yielded
        assert storage.read_calls > 20
    finally:
        sys.setswitchinterval(interval)
