"""A writer accepts pieces in any order and writes one object, with bounded memory. A failure leaves no object."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ckptcore_fsspec.write_methods import InOrderWriter

from ckptcore.errors import StorageError, StorageFullError

BUFFERED_BYTES = 32 << 20
"""The memory limit of a writer for early pieces."""


class Collected:
    """A stream that keeps its data in memory."""

    def __init__(self, *, room: int | None = None) -> None:
        self.data = bytearray()
        self.room = room
        self.state = "open"

    def write(self, data: bytes | bytearray | memoryview) -> object:
        if self.room is not None and len(self.data) + len(data) > self.room:
            raise OSError(errno.ENOSPC, "no room")
        self.data += data
        return None

    def finish(self) -> None:
        self.state = "finished"

    def discard(self) -> None:
        self.state = "discarded"
        raise RuntimeError("nobody hears it")


@pytest.mark.parametrize("nbytes", [200_000, 64 << 20], ids=["in memory", "in a file"])
@pytest.mark.parametrize("seed", range(5))
def test_any_order_from_many_threads(seed: int, nbytes: int) -> None:
    chance = random.Random(seed)
    data = chance.randbytes(nbytes)
    cuts = [0, *sorted(chance.sample(range(1, len(data)), 60)), len(data)]
    pieces = list(itertools.pairwise(cuts))
    chance.shuffle(pieces)
    sink = Collected()
    writer = InOrderWriter(sink, "it", len(data))
    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(lambda piece: writer.write_at(piece[0], data[piece[0] : piece[1]]), pieces):
            assert writer._buffered_bytes <= BUFFERED_BYTES
    writer.finish()
    assert sink.data == data
    assert sink.state == "finished"


def test_early_pieces_beyond_the_memory_limit_go_into_a_file() -> None:
    nbytes = BUFFERED_BYTES
    writer = InOrderWriter(Collected(), "it", None)
    for number in (2, 1):
        writer.write_at(number * nbytes, bytes([number]) * nbytes)
    assert writer._buffered_bytes == nbytes
    assert writer._file is not None
    writer.write_at(0, bytes(nbytes))
    assert writer._buffered_bytes == 0
    writer.abort()
    assert writer._file is None


@pytest.mark.parametrize(("size", "pieces"), [(10, [(0, 5)]), (10, [(5, 5)]), (None, [(0, 5), (6, 2)]), (10, [])])
def test_missing_bytes_are_an_error(size: int | None, pieces: list[tuple[int, int]]) -> None:
    sink = Collected()
    writer = InOrderWriter(sink, "it", size)
    for start, length in pieces:
        writer.write_at(start, bytes(length))
    with pytest.raises(StorageError, match="contiguous bytes"):
        writer.finish()
    assert sink.state == "open"
    writer.abort()
    writer.abort()
    assert sink.state == "discarded"


def test_invalid_offsets_are_refused() -> None:
    writer = InOrderWriter(Collected(), "it", 10)
    writer.write_at(0, b"123")
    writer.write_at(5, b"567")
    for offset, data in ((-1, b"1"), (8, b"123"), (0, b"1"), (2, b"34"), (5, b"5")):
        with pytest.raises(ValueError, match="it"):
            writer.write_at(offset, data)
    writer.abort()
    for call in (lambda: writer.write_at(3, b"1"), writer.finish):
        with pytest.raises(ValueError, match="finished or aborted"):
            call()


def test_the_error_for_a_full_storage() -> None:
    writer = InOrderWriter(Collected(room=3), "'key' in place", None)
    with pytest.raises(StorageFullError, match="'key' in place"):
        writer.write_at(0, b"1234")
    writer.abort()


def test_a_slow_writer_does_not_delay_others() -> None:
    slow, begun = threading.Event(), threading.Event()

    class Slow(Collected):
        def write(self, data: bytes | bytearray | memoryview) -> object:
            begun.set()
            slow.wait()
            return super().write(data)

    first, second = InOrderWriter(Slow(), "slow", None), InOrderWriter(Collected(), "fast", None)
    thread = threading.Thread(target=first.write_at, args=(0, b"1"))
    thread.start()
    begun.wait()
    second.write_at(0, b"2")
    second.finish()
    slow.set()
    thread.join()
    first.finish()
