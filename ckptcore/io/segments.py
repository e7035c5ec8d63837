"""Segments of an object that is being written: opened in order, and cut into tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Final

import numpy as np

from ckptcore.errors import PluginError
from ckptcore.io.checksums import InlineChecksum, encoded, first_covered, inline_checksums
from ckptcore.io.elements import bytes_of, flat_range, is_little, little_dtype, plain
from ckptcore.io.threads import Sizes
from ckptcore.model import ArraySegment, Box, BytesSegment, ChecksumSegment, HostArray, Segment
from ckptcore.planning.partition import boxes_of_range
from ckptcore.records import dataclass

_SMALL_BYTES: Final = 16 << 10
"""Up to this size, copying the bytes of an array is faster than keeping a reference to it."""


class WriteTask:
    """Bytes `start` to `stop` of an object that are written together: whole blocks, or up to the end of the object.

    Attributes:
        credits: (number of an array segment, bytes of it in this task).
        summed: (checksum, start, stop): the bytes of the task that an inline checksum covers, relative to its start.
        checksums: (checksum, position, start, stop): bytes `start` to `stop` of an inline checksum belong at `position`
            of the task. `fill` does not write them.
    """

    __slots__ = ("_pieces", "checksums", "credits", "start", "stop", "summed")

    def __init__(self, start: int) -> None:
        self.start = start
        self.stop = start
        self.credits: list[tuple[int, int]] = []
        self.summed: list[tuple[InlineChecksum, int, int]] = []
        self.checksums: list[tuple[InlineChecksum, int, int, int]] = []
        self._pieces: list[tuple[int, _Run, int, int]] = []

    def add(self, run: _Run, start: int, stop: int) -> None:
        """Append bytes `start` to `stop` of the object. `run` contains them."""
        self.stop = stop
        position = start - self.start
        if isinstance(run.source, InlineChecksum):
            self.checksums.append((run.source, position, start - run.start, stop - run.start))
            return
        self._pieces.append((position, run, start - run.start, stop - run.start))
        if run.segment >= 0:
            self.credits.append((run.segment, stop - start))
        checksum = run.checksum
        if checksum is not None:
            summed = self.summed
            if summed and summed[-1][0] is checksum:  # a checksum covers bytes without a gap
                summed[-1] = checksum, summed[-1][1], stop - self.start
            else:
                summed.append((checksum, position, stop - self.start))

    def fill(self, memory: memoryview) -> memoryview:
        """Copy the bytes to the start of a buffer. Reads each byte of an array only once, because it may change."""
        whole = np.frombuffer(memory, np.uint8)
        for position, run, start, stop in self._pieces:
            end = position + stop - start
            source = run.source
            if isinstance(source, _Gathering):
                source.copy_range(start, stop, memory[position:end])
                continue
            assert isinstance(source, memoryview)  # `add` stores checksums separately
            # NumPy releases the interpreter lock while it copies, but takes longer to begin.
            if end - position <= _SMALL_BYTES:
                memory[position:end] = source[start:stop]
            else:
                whole[position:end] = np.frombuffer(source, np.uint8)[start:stop]
        return memory[: self.stop - self.start]


class ObjectSegments:
    """The segments of one object. One thread at a time takes tasks; any thread reports written tasks.

    Each `ArraySegment` is opened at most once and closed exactly once. After an error, `close_rest` closes the segments
    that are still open or were never opened.
    """

    def __init__(self, segments: Sequence[Segment], segment_sizes: Sequence[int], sizes: Sizes) -> None:
        self._segments = segments
        self._sizes = segment_sizes
        self._size = sum(segment_sizes)
        self._task_bytes = sizes.write
        self._opened = 0
        self._outstanding: dict[int, int] = {}
        self._position = 0
        self._runs = self._open_runs()
        self._run: _Run | None = None

    def next_task(self) -> WriteTask | None:
        """Return the next bytes to write, or None at the end of the object. May block until arrays are ready."""
        position = self._position
        if position == self._size:
            for _ in self._runs:  # opens and closes segments without bytes
                raise AssertionError("a segment has more bytes than stated")
            return None
        task = WriteTask(position)
        limit = min((position // self._task_bytes + 1) * self._task_bytes, self._size)
        while (position := self._position) < limit:
            run = self._run
            if run is None or run.stop == position:
                run = self._run = next(self._runs)  # opens the next segment, if the last segment has no more runs
            stop = min(run.stop, limit)
            task.add(run, position, stop)
            self._position = stop
        return task

    def _open_runs(self) -> Generator[_Run, None, None]:
        position = 0
        inline = inline_checksums(self._segments, self._sizes)
        for number, (segment, size) in enumerate(zip(self._segments, self._sizes, strict=True)):
            self._opened = number + 1
            checksum = inline.get(number)
            if isinstance(segment, BytesSegment):
                if size:
                    yield _Run(-1, position, position + size, memoryview(segment.data), checksum)
            elif isinstance(segment, ChecksumSegment):
                assert checksum is not None  # `inline_checksums` has a checksum for each
                if size:
                    yield _Run(-1, position, position + size, checksum, None)
            else:
                self._outstanding[number] = size
                for start, stop, source in _open(segment, size):
                    yield _Run(number, position + start, position + stop, source, checksum)
                if size == 0:
                    self._outstanding.pop(number)
                    segment.close()
            position += size

    def written(self, task: WriteTask) -> list[Callable[[], None]]:
        """Count a written task. The caller holds its lock, and calls the returned functions after releasing it."""
        closers = []
        outstanding = self._outstanding
        for number, nbytes in task.credits:
            left = outstanding[number] - nbytes
            if left:
                outstanding[number] = left
            else:
                del outstanding[number]
                segment = self._segments[number]
                assert isinstance(segment, ArraySegment)
                closers.append(segment.close)
        return closers

    def close_rest(self) -> list[Callable[[], None]]:
        """After an error, return functions that close all segments that are not closed. The caller calls each once."""
        self._runs.close()  # breaks the cycle between this object and its generator
        self._run = None
        rest = [*self._outstanding, *range(self._opened, len(self._segments))]
        self._outstanding.clear()
        self._opened = len(self._segments)
        return [segment.close for number in rest if isinstance(segment := self._segments[number], ArraySegment)]


@dataclass(slots=True, eq=False)
class _Run:
    """Bytes `start` to `stop` of an object, in one segment. `segment` is -1 if the segment needs no closing.

    `checksum` is the inline checksum that covers the bytes, or None.
    """

    segment: int
    start: int
    stop: int
    source: memoryview | _Gathering | InlineChecksum
    checksum: InlineChecksum | None


class _Gathering:
    """The elements of a box, to be copied from one array or several, with any strides and byte order."""

    __slots__ = ("_dtype", "_itemsize", "_shape", "_sources")

    def __init__(self, shape: tuple[int, ...], itemsize: int, sources: Sequence[tuple[Box, HostArray]]) -> None:
        self._shape = shape
        self._itemsize = itemsize
        self._dtype = little_dtype(sources[0][1].dtype)
        self._sources = [(box, plain(array)) for box, array in sources]

    def copy_range(self, start: int, stop: int, memory: memoryview) -> None:
        """Copy bytes `start` to `stop` of the elements in C order to `memory`."""
        first, skipped = divmod(start, self._itemsize)
        last, kept = divmod(stop, self._itemsize)
        if first == last:
            memory[:] = self._element(first)[skipped:kept]
            return
        position = 0
        if skipped:
            position = self._itemsize - skipped
            memory[:position] = self._element(first)[skipped:]
            first += 1
        self._copy_elements(first, last, memory, position)
        if kept:
            memory[len(memory) - kept :] = self._element(last)[:kept]

    def _element(self, number: int) -> memoryview:
        memory = memoryview(bytearray(self._itemsize))
        self._copy_elements(number, number + 1, memory, 0)
        return memory

    def _copy_elements(self, first: int, last: int, memory: memoryview, position: int) -> None:
        for run in boxes_of_range(self._shape, first, last):
            destination = np.ndarray(run.shape, self._dtype, memory, position)
            position += destination.nbytes
            for box, array in self._sources:
                if (common := run.intersect(box)) is not None:
                    np.copyto(destination[common.within(run)], array[common.within(box)])


def _open(segment: ArraySegment, size: int) -> list[tuple[int, int, memoryview | _Gathering]]:
    """Open a segment. Return (start, stop, source) of its bytes in order; empty if it has none."""
    arrays = segment.open()
    if len(arrays) == 1:
        box, array = arrays[0]
        if box is not segment.box and box != segment.box:
            raise _mismatch(segment, arrays)
        # The common case: the box starts at zero, so its stop is its shape and nothing has to be calculated.
        if array.itemsize != segment.itemsize or (array.shape != box.stop and array.shape != box.shape):
            raise _mismatch(segment, arrays)
        if array.nbytes != size:
            raise _mismatch(segment, arrays)
        if size == 0:
            return []
        if size <= _SMALL_BYTES:
            return [(0, size, memoryview(_bytes_copy(array)))]
        if array.flags.c_contiguous and is_little(array.dtype):
            return [(0, size, bytes_of(array))]
    elif size == 0:
        return []
    return _open_parts(segment, size, arrays)


def _open_parts(
    segment: ArraySegment, size: int, arrays: Sequence[tuple[Box, HostArray]]
) -> list[tuple[int, int, memoryview | _Gathering]]:
    shape, origin = segment.box.shape, segment.box.start
    sources: list[tuple[Box, HostArray]] = []
    total = 0
    for box, array in arrays:
        if (
            len(box.start) != len(shape)
            or not segment.box.contains(box)
            or array.shape != box.shape
            or array.itemsize != segment.itemsize
        ):
            raise _mismatch(segment, arrays)
        total += array.nbytes
        if array.size:
            sources.append((box.relative(origin), array))
    if total != size:
        raise _mismatch(segment, arrays)
    parts: list[tuple[int, int, memoryview | _Gathering]] = []
    for box, array in sources:
        elements = flat_range(shape, box)
        if elements is None or not (array.flags.c_contiguous and is_little(array.dtype)):
            break
        parts.append((elements[0] * segment.itemsize, elements[1] * segment.itemsize, bytes_of(array)))
    else:
        parts.sort(key=lambda part: part[0])
        if all(before[1] == after[0] for before, after in itertools.pairwise(parts)):
            return parts
    return [(0, size, _Gathering(shape, segment.itemsize, sources))]


def _bytes_copy(array: HostArray) -> bytes:
    """Return the elements of a small array as they are stored."""
    return (array if is_little(array.dtype) else plain(array).astype(little_dtype(array.dtype))).tobytes()


def _mismatch(segment: ArraySegment, arrays: Sequence[tuple[Box, HostArray]]) -> PluginError:
    parts = ", ".join(f"{box.start} to {box.stop} in {array.dtype}{list(array.shape)}" for box, array in arrays)
    return PluginError(
        f"the arrays of a segment do not make up its box: expected {segment.box.start} to {segment.box.stop} with "
        f"{segment.itemsize} bytes per element, found {parts or 'no array'}; a leaf handler or layout is wrong"
    )


def join_segments(segments: Sequence[Segment], sizes: Sequence[int]) -> memoryview:
    """Return all bytes of a small object. Opens arrays and closes none. Reads each byte of an array only once."""
    memory = memoryview(bytearray(sum(sizes)))
    begins: list[int] = []
    position, before = 0, -1
    for number, (segment, size) in enumerate(zip(segments, sizes, strict=True)):
        begins.append(position)
        if isinstance(segment, BytesSegment):
            memory[position : position + size] = segment.data
        elif isinstance(segment, ChecksumSegment):
            covered = memory[begins[first_covered(segments, number, segment, before)] : position]
            memory[position : position + size] = encoded(segment.checksum, segment.checksum.of(covered))
            before = number
        else:
            for start, stop, source in _open(segment, size):
                target = memory[position + start : position + stop]
                if isinstance(source, _Gathering):
                    source.copy_range(0, stop - start, target)
                else:
                    target[:] = source
        position += size
    return memory
