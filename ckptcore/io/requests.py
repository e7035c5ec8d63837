"""Requests to a storage: how many at once, how large, which ranges together, and open objects for many of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from ckptcore.model import BLOCK_BYTES
from ckptcore.protocols import HeldReader, HoldsObjects, OpensObjects, RangeReader, StorageBackend

__all__ = [
    "SIZES",
    "NearRanges",
    "Requests",
    "Sizes",
    "hold_reader",
    "is_held_reader",
    "near_ranges",
    "open_reader",
    "reads_by_key",
    "requests_of",
]

_MOST_AT_ONCE: Final = 64
"""Limit of requests at once, because each one takes a thread and memory."""

_MOST_PART_BYTES: Final = 64 << 20
"""Limit of the bytes of a part, because each thread that writes has one in memory."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests that suit a storage, within limits.

    Attributes:
        concurrency: requests worth having under way at once; 1 if a thread for each processor is as good.
        part_bytes: bytes per request for an object that is written in pieces; 1 if any number is as good.
    """

    concurrency: int = 1
    part_bytes: int = 1


def requests_of(storage: StorageBackend) -> Requests:
    """Return the requests that suit a storage; see `ckptcore.protocols.ManyRequests`."""
    # Called for every directory that is opened: reading two attributes takes a tenth of the time of `isinstance`.
    concurrency: int | None = getattr(storage, "concurrency", None)
    part_bytes: int | None = getattr(storage, "part_bytes", None)
    if concurrency is None or part_bytes is None:
        return Requests()
    return Requests(max(1, min(concurrency, _MOST_AT_ONCE)), max(1, min(part_bytes, _MOST_PART_BYTES)))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of work in bytes; tests make them small.

    Attributes:
        block: what one checksum covers.
        task: what a thread reads before it takes other work, if there is so much; a multiple of `block`.
        write: what a thread copies, checks and writes at a time; a multiple of `block`, small enough for a processor's
            cache.
        inline: the calling thread alone does objects and reads of fewer bytes.
        direct: from here on bytes that only one array wants, as they are, are read straight into it.
        run: from here on each run of elements of a box is read straight into its array, block by block.
    """

    block: int = BLOCK_BYTES
    task: int = 4 << 20
    write: int = BLOCK_BYTES
    inline: int = 1 << 20
    direct: int = 64 << 10
    run: int = 4 << 20

    def for_parts(self, part_bytes: int) -> Sizes:
        """Return the sizes for a storage that writes parts of so many bytes; 1: unchanged."""
        if part_bytes == 1:
            return self
        return replace(self, write=-(-part_bytes // self.block) * self.block)

    def for_requests(self, request_bytes: int) -> Sizes:
        """Return the sizes for a storage with many requests of so many bytes at once: each is a task."""
        return replace(self, task=max(self.block, request_bytes // self.block * self.block))


SIZES: Final = Sizes()
"""The sizes for memory and local disks."""


@dataclass(frozen=True, slots=True)
class NearRanges:
    """Ranges of one object that are requested together.

    Attributes:
        key: the object.
        start, stop: the range that contains all of them; None: up to the end of the object.
        numbers: their positions in the ranges that were given.
    """

    key: str
    start: int
    stop: int | None
    numbers: tuple[int, ...]


def near_ranges(ranges: Sequence[tuple[str, int, int | None]], gap_bytes: int, most_bytes: int) -> Iterator[NearRanges]:
    """Group ranges (key, start, stop) by object, in ascending order.

    Args:
        ranges: in any order; they may overlap.
        gap_bytes: gaps up to this are cheaper to read than to leave out.
        most_bytes: the most bytes of a group of several. A range without a known end is a group of its own.
    """
    order = sorted(range(len(ranges)), key=lambda number: ranges[number][:2])
    numbers: list[int] = []
    key, first, last = "", 0, 0
    for number in order:
        of_key, start, stop = ranges[number]
        if stop is None:
            yield NearRanges(of_key, start, None, (number,))
            continue
        together = numbers and of_key == key and start <= last + gap_bytes and max(last, stop) - first <= most_bytes
        if not together:
            if numbers:
                yield NearRanges(key, first, last, tuple(numbers))
            numbers, key, first, last = [], of_key, start, stop
        numbers.append(number)
        last = max(last, stop)
    if numbers:
        yield NearRanges(key, first, last, tuple(numbers))


class _ByKey:
    """An object that its storage finds by its key for each read. Any thread."""

    def __init__(self, storage: StorageBackend, key: str) -> None:
        self._storage = storage
        self._key = key

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on."""
        self._storage.get_into(self._key, ranges)


def open_reader(storage: StorageBackend, key: str) -> RangeReader:
    """Open an object of any storage.

    Raises:
        ObjectNotFoundError: now, or by the first read.
    """
    return storage.open_reader(key) if isinstance(storage, OpensObjects) else _ByKey(storage, key)


def hold_reader(storage: StorageBackend, key: str) -> RangeReader:
    """Open an object of any storage for many small reads; a `HeldReader` if the storage has those.

    Raises:
        ObjectNotFoundError: now, or by the first read.
    """
    return cast(HoldsObjects, storage).hold_open(key) if _holds(type(storage)) else open_reader(storage, key)


def reads_by_key(reader: RangeReader) -> bool:
    """Return True if each read of `reader` finds the object by its key, so that it may be another object by then."""
    return isinstance(reader, _ByKey)


@functools.lru_cache(maxsize=64)
def _holds(kind: type[StorageBackend]) -> bool:
    """Return True if storages of a type are `HoldsObjects`. Cached: the check is slow."""
    return issubclass(kind, HoldsObjects)


@functools.lru_cache(maxsize=64)
def is_held_reader(kind: type[RangeReader]) -> bool:
    """Return True if readers of a type are `HeldReader`. Cached: the check is slow."""
    return issubclass(kind, HeldReader)
