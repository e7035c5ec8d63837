"""Requests to a storage: how many run at once, how large they are, and which ranges share one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ckptcore.model import BLOCK_BYTES
from ckptcore.protocols import StorageBackend, StorageCapabilities

_MAX_CONCURRENCY: Final = 64
"""Most requests at once: each one takes a thread and memory."""

_MAX_PART_BYTES: Final = 64 << 20
"""Most bytes of a part: each thread that writes has one in memory."""


def requests_of(storage: StorageBackend) -> StorageCapabilities:
    """Return the requests that suit a storage, within limits."""
    stated = storage.capabilities
    concurrency = max(1, min(stated.concurrency, _MAX_CONCURRENCY))
    part_bytes = max(1, min(stated.part_bytes, _MAX_PART_BYTES))
    if (concurrency, part_bytes) == (stated.concurrency, stated.part_bytes):
        return stated
    return stated._replace(concurrency=concurrency, part_bytes=part_bytes)


class Sizes(NamedTuple):
    """Sizes of work, in bytes. Tests make them small.

    Attributes:
        block: the bytes that one checksum covers.
        task: the bytes that a thread reads as one task; a multiple of `block`.
        write: the bytes that a thread copies, checks and writes at a time; a multiple of `block` that fits into the
            cache of a processor.
        inline: one thread writes an object of fewer bytes. A local read of fewer bytes stays on the calling thread.
        direct: ranges from this size that only one array needs, unchanged, are read directly into it.
        run: runs of elements of a box from this size are read directly into its array, block by block.
    """

    block: int = BLOCK_BYTES
    task: int = 4 << 20
    write: int = BLOCK_BYTES
    inline: int = 1 << 20
    direct: int = 64 << 10
    run: int = 4 << 20

    def for_parts(self, part_bytes: int) -> Sizes:
        """Return the sizes for a storage that writes parts of `part_bytes`; 1: unchanged."""
        if part_bytes == 1:
            return self
        return self._replace(write=-(-part_bytes // self.block) * self.block)

    def for_requests(self, request_bytes: int) -> Sizes:
        """Return the sizes for a storage with many requests of `request_bytes` at once. Each request is a task."""
        return self._replace(task=max(self.block, request_bytes // self.block * self.block))


SIZES: Final = Sizes()
"""The sizes for memory and local disks."""


class ObjectShape(NamedTuple):
    """The sizes of reads of one object.

    Attributes:
        key: the object.
        size: its size in bytes.
        step: reads start and end at multiples of it, in bytes: a block if blocks are verified, else 1.
        part_bytes: the most bytes of a request; a multiple of `step`.
        gap_bytes: gaps up to this size are read, because that is cheaper than another request.
        sizes: the sizes of tasks and blocks.
    """

    key: str
    size: int
    step: int
    part_bytes: int
    gap_bytes: int
    sizes: Sizes

    @property
    def task_bytes(self) -> int:
        """The most bytes of a task."""
        return max(self.sizes.task, self.part_bytes)

    def keeps_elements(self, offset: int, itemsize: int) -> bool:
        """Return True if reads never start or end inside an element of a chunk at `offset`."""
        grid = self.step if self.step > 1 else self.part_bytes
        return offset % itemsize == 0 and grid % itemsize == 0

    def above(self, position: int) -> int:
        """Return the first step boundary at or after a position, or the end of the object."""
        return min(self.size, -(-position // self.step) * self.step)


class CoalescedRange(NamedTuple):
    """Ranges of one object that are requested together.

    Attributes:
        key: the object.
        start, stop: the range that contains all of them; None: up to the end of the object.
        numbers: their positions among the given ranges.
    """

    key: str
    start: int
    stop: int | None
    numbers: tuple[int, ...]


def coalesce(
    ranges: Sequence[tuple[str, int, int | None]], gap_bytes: int, most_bytes: int
) -> Iterator[CoalescedRange]:
    """Group ranges (key, start, stop) by object, in ascending order.

    Args:
        ranges: in any order; they may overlap.
        gap_bytes: gaps up to this size are read, because that is cheaper than another request.
        most_bytes: the most bytes of a group of several ranges. A range without a known end is a separate group.
    """
    order = sorted(range(len(ranges)), key=lambda number: ranges[number][:2])
    numbers: list[int] = []
    key, first, last = "", 0, 0
    for number in order:
        of_key, start, stop = ranges[number]
        if stop is None:
            yield CoalescedRange(of_key, start, None, (number,))
            continue
        together = numbers and of_key == key and start <= last + gap_bytes and max(last, stop) - first <= most_bytes
        if not together:
            if numbers:
                yield CoalescedRange(key, first, last, tuple(numbers))
            numbers, key, first, last = [], of_key, start, stop
        numbers.append(number)
        last = max(last, stop)
    if numbers:
        yield CoalescedRange(key, first, last, tuple(numbers))
