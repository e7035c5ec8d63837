"""Chunks of data files as the reader sees them, and their checksums."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

from ckptcore.errors import ChecksumError
from ckptcore.io.checksums import PiecedSum, encoded
from ckptcore.model import Checksum

__all__ = [
    "ChunkCheck",
    "Extent",
    "c_strides",
    "flat_boxes",
    "intersect",
    "run_axis",
    "runs",
    "spans",
]

Extent: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A box as plain tuples, (start, stop), half-open; cheaper than a `ckptcore.model.Box` in loops."""


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart neighbours along each axis lie in C order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def intersect(first: Extent, second: Extent) -> Extent | None:
    """The elements in both boxes, or None where there are none."""
    start = tuple(map(max, first[0], second[0]))
    stop = tuple(map(min, first[1], second[1]))
    return None if any(map(int.__ge__, start, stop)) else (start, stop)


def run_axis(shape: tuple[int, ...], extent: Extent) -> int:
    """The outermost axis from which on the box is one run of elements for each index of the axes before."""
    start, stop = extent
    axis = len(shape)
    while axis > 0:
        axis -= 1
        if stop[axis] - start[axis] != shape[axis]:
            return axis
    return 0


def runs(shape: tuple[int, ...], extent: Extent, axis: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The runs of a box: where each begins, as an index and as a number of elements in C order.

    Args:
        shape: of the array that the elements lie in.
        extent: the box; not empty.
        axis: `run_axis` of it, or a later axis.
    """
    start, stop = extent
    strides = c_strides(shape)
    tail = sum(map(int.__mul__, start[axis:], strides[axis:]))
    for index in itertools.product(*map(range, start[:axis], stop[:axis])):
        yield (*index, *start[axis:]), sum(map(int.__mul__, index, strides)) + tail


def spans(shape: tuple[int, ...], extent: Extent, most_gap: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements in C order, ascending and apart, that together cover a box that is not empty.

    Gaps of up to `most_gap` elements that the box does not hold are covered too.
    """
    start, stop = extent
    strides = c_strides(shape)
    # Elements from the first of the box to behind the last, along the axes from here on.
    inner = 1
    axis = len(shape)
    while axis > 0:
        count = stop[axis - 1] - start[axis - 1]
        # Gaps never shrink from an axis to the one before it, so all axes up to here are cut.
        if count > 1 and strides[axis - 1] - inner > most_gap:
            break
        inner += (count - 1) * strides[axis - 1]
        axis -= 1
    for _, flat in runs(shape, extent, axis):
        yield flat, flat + inner


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Extent]:
    """Boxes that hold exactly the elements `start` to `stop` in C order; each is one run of elements, in that order.

    At most two for each axis but the last, and one.
    """
    found: list[Extent] = []
    if start < stop:
        _cut(shape, 0, (), start, stop, found)
    return found


def _cut(shape: tuple[int, ...], axis: int, index: tuple[int, ...], start: int, stop: int, found: list[Extent]) -> None:
    """Cut the elements `start` to `stop` of the part of an array at `index` along the axes before `axis`."""
    if axis == len(shape):
        found.append((index, tuple([i + 1 for i in index])))
        return
    rest = shape[axis + 1 :]
    inner = prod(rest)
    first, skipped = divmod(start, inner)
    last, kept = divmod(stop, inner)
    if first == last:
        _cut(shape, axis + 1, (*index, first), skipped, kept, found)
        return
    if skipped:
        _cut(shape, axis + 1, (*index, first), skipped, inner, found)
        first += 1
    if first < last:
        above = tuple([i + 1 for i in index])
        found.append(((*index, first, *(0,) * len(rest)), (*above, last, *rest)))
    if kept:
        _cut(shape, axis + 1, (*index, last), 0, kept, found)


class ChunkCheck:
    """A chunk to compare with its checksum; its bytes are read in one part or several. Any thread.

    Attributes:
        start, stop: where in the object the bytes are that the checksum is of; it begins at `stop`.
        end: where the checksum ends.
        numbers: the targets that wait for this, where several parts hold the chunk; else none waits for it alone.
    """

    __slots__ = ("_checksum", "_key", "_lock", "_pieces", "_stored", "end", "numbers", "start", "stop")

    def __init__(self, key: str, start: int, stop: int, checksum: Checksum) -> None:
        self._key = key
        self._checksum = checksum
        self.start = start
        self.stop = stop
        self.end = stop + checksum.nbytes
        self.numbers: Sequence[int] = ()
        self._pieces: PiecedSum | None = None
        self._lock: threading.Lock | None = None
        self._stored = b""

    def expect_pieces(self, numbers: Sequence[int]) -> None:
        """Say that several parts hold the chunk, the last all of the checksum, and which targets wait for it."""
        self.numbers = numbers
        self._pieces = PiecedSum(self._checksum, self.stop - self.start)
        self._lock = threading.Lock()

    def compare(self, start: int, stop: int, buffers: Sequence[tuple[int, memoryview]]) -> bool:
        """Take in a part of the object; compare and return True if it was the last part of the chunk.

        Args:
            start: where the part begins.
            stop: where it ends; not within the checksum.
            buffers: (position in the object, bytes): where the part lies in memory, in order and without a gap.

        Raises:
            ChecksumError
        """
        low, high = max(start, self.start), min(stop, self.stop)
        checksum = self._checksum
        if len(buffers) == 1:
            position, buffer = buffers[0]
            value = checksum.of(buffer[low - position : high - position])
            stored = bytes(buffer[high - position : self.end - position]) if stop >= self.end else b""
        else:
            pieces = _between(buffers, low, high)
            value = checksum.of(pieces[0])
            for piece in pieces[1:]:
                value = checksum.join(value, checksum.of(piece), len(piece))
            stored = b"".join(_between(buffers, high, self.end)) if stop >= self.end else b""
        if self._pieces is None or self._lock is None:
            self._compare(value, stored)
            return True
        with self._lock:
            self._stored = self._stored or stored
            if not self._pieces.add(low, high - low, value):
                return False
        self._compare(self._pieces.value(), self._stored)
        return True

    def _compare(self, value: int, stored: bytes) -> None:
        found = encoded(self._checksum, value)
        if found != stored:
            name = self._checksum.name
            raise ChecksumError(
                f"{self._key!r} is damaged in bytes {self.start} to {self.end}: expected the {name} that stands there, "
                f"{stored.hex()}, found {found.hex()}; it changed after it was written, or the storage returned wrong "
                "bytes: restore it from a copy, or load another checkpoint",
                key=self._key,
                start=self.start,
                stop=self.end,
            )


def _between(buffers: Sequence[tuple[int, memoryview]], start: int, stop: int) -> list[memoryview]:
    """Where bytes `start` to `stop` of an object lie, of buffers as `ChunkCheck.compare` takes them."""
    place = bisect.bisect_right(buffers, start, key=_position) - 1
    position, buffer = buffers[place]
    found = [buffer[start - position : stop - position]]
    while (position := position + len(buffer)) < stop:
        place += 1
        buffer = buffers[place][1]
        found.append(buffer[: stop - position])
    return found


def _position(entry: tuple[int, memoryview]) -> int:
    return entry[0]
