"""Requests to a storage: how many at once, how large, which ranges together, and which readers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ckptcore.model import BLOCK_BYTES
from ckptcore.protocols import HeldReader, RangeReader, StorageBackend, StorageCapabilities
from ckptcore.protocols.storage import ReaderByKey

__all__ = [
    "SIZES",
    "NearRanges",
    "Sizes",
    "is_held_reader",
    "near_ranges",
    "reads_by_key",
    "requests_of",
]

_MOST_AT_ONCE: Final = 64
"""Limit of requests at once, because each one takes a thread and memory."""

_MOST_PART_BYTES: Final = 64 << 20
"""Limit of the bytes of a part, because each thread that writes has one in memory."""


def requests_of(storage: StorageBackend) -> StorageCapabilities:
    """Return the requests that suit a storage, within limits."""
    stated = storage.capabilities
    concurrency = max(1, min(stated.concurrency, _MOST_AT_ONCE))
    part_bytes = max(1, min(stated.part_bytes, _MOST_PART_BYTES))
    if (concurrency, part_bytes) == (stated.concurrency, stated.part_bytes):
        return stated
    return stated._replace(concurrency=concurrency, part_bytes=part_bytes)


class Sizes(NamedTuple):
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
        return self._replace(write=-(-part_bytes // self.block) * self.block)

    def for_requests(self, request_bytes: int) -> Sizes:
        """Return the sizes for a storage with many requests of so many bytes at once: each is a task."""
        return self._replace(task=max(self.block, request_bytes // self.block * self.block))


SIZES: Final = Sizes()
"""The sizes for memory and local disks."""


class NearRanges(NamedTuple):
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


def reads_by_key(reader: RangeReader) -> bool:
    """Return True if each read of `reader` finds the object by its key, so that it may be another object by then."""
    return isinstance(reader, ReaderByKey)


@functools.lru_cache(maxsize=64)
def is_held_reader(kind: type[RangeReader]) -> bool:
    """Return True if readers of a type are `HeldReader`. Cached: the check is slow."""
    return issubclass(kind, HeldReader)
