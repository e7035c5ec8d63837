"""Read tasks: the byte ranges of an object to request, the arrays that take them, and the checksums to compare."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from math import prod
from operator import attrgetter, itemgetter
from typing import Final, TypeAlias

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.checksums import ChunkCheck
from ckptcore.io.elements import bytes_of, c_strides, is_little, little_dtype, run_axis, runs, spans
from ckptcore.io.threads import ObjectShape
from ckptcore.model import Box, Checksum, ChunkRead, HostArray
from ckptcore.planning.partition import boxes_of_range
from ckptcore.records import dataclass

_SPARE_BLOCKS: Final = 2
"""Number of unneeded blocks of an object that may always be read to verify it by blocks. If there are more, inline
checksums may be used: see `_divide`. Checksums of blocks are better: they are in the root, so they prove that bytes
belong to this save."""


_FIRST: Final = itemgetter(0)
_START: Final = attrgetter("start")

_SMALL_BYTES: Final = 16 << 10
"""Up to this size an array is filled by NumPy assignment, which for some dtypes holds the interpreter lock."""


@dataclass(slots=True, eq=False)
class RunDestination:
    """An array that takes the bytes `start` to `stop` of an object unchanged, at one offset of its memory.

    `_array_offset` is this offset, in bytes; -1 if the bytes fill the array.
    """

    number: int
    start: int
    stop: int
    _array: HostArray
    _array_offset: int
    _memory: memoryview | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        """Return the memory for bytes `start` to `stop` of the object."""
        if self._memory is None:
            self._memory = bytes_of(self._array)
        shift = max(self._array_offset, 0) - self.start
        return self._memory[start + shift : stop + shift]

    def take(self, window: memoryview, base: int, start: int, stop: int) -> int:
        """Copy the part of bytes `start` to `stop` of the object that belongs to the array. Return the bytes copied.

        `window` contains the bytes; its first byte is at position `base` of the object.
        """
        start = max(start, self.start)
        stop = min(stop, self.stop)
        if self._array_offset < 0 and stop - start <= _SMALL_BYTES and stop - start == self.stop - self.start:
            array = self._array
            array[...] = np.ndarray(array.shape, array.dtype, window, start - base)
            return stop - start
        target = np.frombuffer(self.memory(start, stop), np.uint8)
        target[...] = np.frombuffer(window, np.uint8, stop - start, start - base)
        return stop - start


@dataclass(slots=True, eq=False)
class BoxDestination:
    """An array that takes a box of a chunk, which NumPy copies between strided views.

    Used if the runs of contiguous elements are short, or if the array does not have the byte order of the object.

    Attributes:
        number: the number of the target.
        start, stop: the bytes of the object from the first element of the box to the last.
        _offset: the position of the chunk in the object, in bytes.
        _shape: the shape of the chunk.
        _box: the box, relative to the chunk; not empty.
        _array: an array of the little endian dtype of the object.
        _origin: the first element of the array, relative to the chunk.
        _strides: the strides of the chunk, in bytes.
    """

    number: int
    _offset: int
    _shape: tuple[int, ...]
    _box: Box
    _array: HostArray
    _origin: tuple[int, ...]
    start: int = field(init=False)
    stop: int = field(init=False)
    _strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        itemsize = self._array.itemsize
        self._strides = tuple([stride * itemsize for stride in c_strides(self._shape)])
        self.start = self._offset + sum(map(int.__mul__, self._box.start, self._strides))
        last = sum([(index - 1) * stride for index, stride in zip(self._box.stop, self._strides, strict=True)])
        self.stop = self._offset + last + itemsize

    def spans(self, most_gap: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of bytes of the object that cover the box, in ascending order."""
        size = self._array.itemsize
        for start, stop in spans(self._shape, self._box, most_gap // size):
            yield self._offset + start * size, self._offset + stop * size

    def take(self, window: memoryview, base: int, start: int, stop: int) -> int:
        """See `RunDestination.take`."""
        size = self._array.itemsize
        first = max(self.start, start) - self._offset
        last = min(self.stop, stop) - self._offset
        taken = 0
        for run in boxes_of_range(self._shape, first // size, last // size):
            if (common := run.intersect(self._box)) is None:
                continue
            position = self._offset + sum(map(int.__mul__, common.start, self._strides)) - base
            source = np.ndarray(common.shape, self._array.dtype, window, position, self._strides)
            np.copyto(self._array[common.relative(self._origin).slices], source)
            taken += source.nbytes
        return taken


Destination: TypeAlias = RunDestination | BoxDestination


def destinations_of(shape: ObjectShape, read: ChunkRead, base: int = 0) -> Iterator[Destination]:
    """Yield destinations for the bytes of a chunk that its targets need.

    Args:
        shape: the sizes of reads of the object.
        read: the chunk and its targets.
        base: the position at which the reads of the object start.

    Raises:
        CorruptCheckpointError: the chunk is not within the object, or a target does not fit its box.
    """
    chunk, itemsize, offset = read.box, read.itemsize, read.offset
    # The common case: the box starts at zero, so its stop is its shape.
    chunk_shape = chunk.stop if not any(chunk.start) and len(chunk.start) == len(chunk.stop) else _shape(read, chunk)
    nbytes = prod(chunk_shape) * itemsize
    end = offset + nbytes if read.checksum is None else offset + nbytes + read.checksum.nbytes
    if offset < 0 or itemsize <= 0 or end > shape.size or (chunk_shape and min(chunk_shape) < 0):
        checksum = "" if read.checksum is None else " and its checksum"
        raise CorruptCheckpointError(
            f"{read.key!r} does not match the checkpoint: expected bytes {offset} to {end} for an array of "
            f"shape {list(chunk_shape)}{checksum}, found {shape.size} bytes. The object was cut off, or the metadata "
            "is damaged: restore it from a copy, or load another checkpoint",
            key=read.key,
            start=offset,
            stop=end,
        )
    for number, box, array in read.targets:
        box_shape = chunk_shape if box is chunk or box == chunk else _shape(read, box)
        if array.shape != box_shape or array.itemsize != itemsize or len(box_shape) != len(chunk_shape):
            raise _mismatch(
                read, f"an array of shape {list(array.shape)} with {array.itemsize} bytes per element for it"
            )
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError(f"target {number} of a read is not C-contiguous and writable")
        if nbytes == 0:
            continue
        if box_shape is chunk_shape and is_little(array.dtype):
            yield RunDestination(number, offset, offset + nbytes, array, -1)
        else:
            yield from _part_destinations(shape, read, base, chunk_shape, number, box, array)


def _part_destinations(
    shape: ObjectShape,
    read: ChunkRead,
    base: int,
    chunk_shape: tuple[int, ...],
    number: int,
    box: Box,
    array: HostArray,
) -> Iterator[Destination]:
    corner, itemsize = read.box.start, read.itemsize
    common = box.intersect(read.box)
    if common is None:
        return
    in_chunk, in_array = common.relative(corner), common.relative(box.start)
    origin = box.relative(corner).start
    axis = max(run_axis(chunk_shape, in_chunk), run_axis(array.shape, in_array))
    lengths = common.shape
    run_bytes = prod(lengths[axis:]) * itemsize
    little = is_little(array.dtype)
    if little and (prod(lengths[:axis]) == 1 or run_bytes >= shape.sizes.run):
        array_runs = runs(array.shape, in_array, axis)
        for (_, flat), (_, first) in zip(runs(chunk_shape, in_chunk, axis), array_runs, strict=True):
            start = read.offset + flat * itemsize
            yield RunDestination(number, start, start + run_bytes, array, first * itemsize)
    elif shape.keeps_elements(read.offset - base, itemsize):
        yield BoxDestination(number, read.offset, chunk_shape, in_chunk, array.view(little_dtype(array.dtype)), origin)
    else:
        # Reads may start or end inside an element, so the elements are read as bytes, with an additional last axis.
        if not little:
            raise _mismatch(read, f"elements that are not aligned, for an array of {array.dtype}")
        as_bytes = array.reshape(-1).view(np.uint8).reshape(*array.shape, itemsize)
        in_bytes = Box((*in_chunk.start, 0), (*in_chunk.stop, itemsize))
        yield BoxDestination(number, read.offset, (*chunk_shape, itemsize), in_bytes, as_bytes, (*origin, 0))


def _shape(read: ChunkRead, box: Box) -> tuple[int, ...]:
    if len(box.start) != len(box.stop) or any(map(int.__gt__, box.start, box.stop)):
        raise _mismatch(read, f"a box from {list(box.start)} to {list(box.stop)}")
    return tuple(map(int.__sub__, box.stop, box.start))


def _mismatch(read: ChunkRead, given: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the metadata of {read.key!r} is damaged: expected a box from {list(read.box.start)} to {list(read.box.stop)} "
        f"with {read.itemsize} bytes per element at byte {read.offset}, found {given}. Restore it from a copy, or load "
        "another checkpoint",
        key=read.key,
    )


class ReadPart:
    """Bytes `start` to `stop` of an object.

    Attributes:
        destinations: arrays that take some of the bytes, and the range of the object for each.
        direct: ranges that are read directly into the only array that needs them, in order.
        checks: the inline checksums to compare, of chunks that are wholly or partly in this part.
    """

    __slots__ = ("checks", "destinations", "direct", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self.destinations: list[tuple[Destination, int, int]] = []
        self.direct: list[tuple[RunDestination, int, int]] = []
        self.checks: list[ChunkCheck] = []

    def choose_direct(self, least: int) -> None:
        """Read directly into arrays that need `least` bytes or more, if no two arrays need the same bytes."""
        for _, start, stop in self.destinations:
            if stop - start >= least:
                break
        else:
            return
        runs: list[tuple[int, int, RunDestination]] = []
        for destination, start, stop in self.destinations:
            if isinstance(destination, BoxDestination):
                return
            runs.append((max(start, destination.start), min(stop, destination.stop), destination))
        runs.sort(key=_FIRST)
        if any(after[0] < before[1] for before, after in itertools.pairwise(runs)):
            return
        self.destinations = [(destination, start, stop) for start, stop, destination in runs if stop - start < least]
        self.direct = [(destination, start, stop) for start, stop, destination in runs if stop - start >= least]

    def buffers(self, spare: memoryview) -> list[tuple[int, memoryview]]:
        """Return the memory for the bytes: `spare`, which has the length of the part, except for `direct` ranges."""
        buffers: list[tuple[int, memoryview]] = []
        position = self.start
        for destination, start, stop in self.direct:
            if position < start:
                buffers.append((position, spare[position - self.start : start - self.start]))
            buffers.append((start, destination.memory(start, stop)))
            position = stop
        if position < self.stop:
            buffers.append((position, spare[position - self.start :]))
        return buffers


class ReadTask:
    """Adjacent parts of one object. One thread reads them.

    Attributes:
        key: the object.
        nbytes: the bytes to read.
        requests: the parts of each request, in order.
        numbers: the targets that need bytes of the task, each once.
        checked_numbers: for each chunk that ends in the task, the targets that wait for the check of its checksum.
    """

    __slots__ = ("checked_numbers", "key", "nbytes", "numbers", "requests")

    def __init__(self, key: str, parts: Sequence[ReadPart], most: int) -> None:
        """Group parts into requests of at most `most` bytes."""
        self.key = key
        self.nbytes = parts[-1].stop - parts[0].start
        self.requests: list[list[ReadPart]] = []
        for part in parts:
            if self.requests and part.stop - self.requests[-1][0].start <= most:
                self.requests[-1].append(part)
            else:
                self.requests.append([part])
        numbers: set[int] = set()
        checked: list[int] = []
        for part in parts:
            for destination, _, _ in part.destinations:
                numbers.add(destination.number)
            for run, _, _ in part.direct:
                numbers.add(run.number)
            for check in part.checks:
                if check.end <= part.stop:
                    checked.extend(check.numbers)
        self.numbers: Iterable[int] = numbers
        self.checked_numbers: Sequence[int] = checked


@dataclass(slots=True, eq=False)
class _CheckedChunk:
    """Bytes `start` to `stop` of an object and their destinations. Their inline checksum ends at `end`."""

    start: int
    stop: int
    end: int
    checksum: Checksum
    reads: list[ChunkRead] = field(default_factory=list)
    destinations: list[Destination] = field(default_factory=list)


def plan_object(
    shape: ObjectShape, chunk_shape: ObjectShape, reads: Sequence[ChunkRead], *, verify: bool
) -> list[ReadTask]:
    """Plan the tasks that read chunks of one object.

    Args:
        shape: the sizes of reads of the object, in whole blocks if the blocks have checksums, else in bytes.
        chunk_shape: the sizes of reads of chunks that are verified by their inline checksums.
        reads: the chunks to read.
        verify: compare inline checksums.

    Raises:
        CorruptCheckpointError: a chunk or its checksum is not within the object, a target does not fit its box, or
            chunks with inline checksums overlap.
    """
    others: list[Destination] = []
    by_extent: dict[tuple[int, int, str], _CheckedChunk] = {}
    for read in reads:
        checksum = read.checksum if verify else None
        if checksum is None:
            others.extend(destinations_of(shape, read))
        elif destinations := list(destinations_of(shape, read, 0 if shape.step > 1 else read.offset)):
            stop = read.offset + prod(map(int.__sub__, read.box.stop, read.box.start)) * read.itemsize
            extent = read.offset, stop, checksum.name
            chunk = by_extent.get(extent)
            if chunk is None:
                chunk = by_extent[extent] = _CheckedChunk(read.offset, stop, stop + checksum.nbytes, checksum)
            chunk.reads.append(read)
            chunk.destinations.extend(destinations)
    if not by_extent:
        return _plan_destinations(shape, others)
    chunks = sorted(by_extent.values(), key=lambda chunk: chunk.start)
    _refuse_overlap(shape.key, chunks)
    if shape.step > 1:
        by_blocks, chunks = _divide(shape, chunks)
        others.extend([destination for chunk in by_blocks for destination in chunk.destinations])
        for chunk in chunks:
            if any(isinstance(destination, BoxDestination) for destination in chunk.destinations):
                # Choose the destinations again: they were chosen for blocks, which may cut elements that reads of the
                # chunk do not cut.
                chunk.destinations = [
                    destination
                    for read in chunk.reads
                    for destination in destinations_of(chunk_shape, read, read.offset)
                ]
    return [*_plan_destinations(shape, others), *_plan_chunks(chunk_shape, chunks)]


def _refuse_overlap(key: str, chunks: Sequence[_CheckedChunk]) -> None:
    # Otherwise a small hostile checkpoint could make the reader hash the same bytes any number of times.
    stop = 0
    for chunk in chunks:
        if chunk.start < stop:
            raise CorruptCheckpointError(
                f"the metadata of {key!r} is damaged: expected chunks of bytes that do not overlap, found one at "
                f"bytes {chunk.start} to {chunk.end} and another that ends at {stop}. Restore it from a copy, or "
                "load another checkpoint",
                key=key,
                start=chunk.start,
                stop=stop,
            )
        stop = chunk.end


@dataclass(slots=True, eq=False)
class _Neighbours:
    """Chunks whose blocks are read together, with the bytes of the blocks, the chunks, and the gaps between chunks."""

    chunks: list[_CheckedChunk] = field(default_factory=list)
    block_bytes: int = 0
    chunk_bytes: int = 0
    gap_bytes: int = 0


def _divide(shape: ObjectShape, chunks: Sequence[_CheckedChunk]) -> tuple[list[_CheckedChunk], list[_CheckedChunk]]:
    """Return the chunks to verify by blocks, and the chunks to verify by their inline checksums.

    Chunks that are close to each other are verified in the same way. They are verified by blocks, unless the blocks
    have over 2 % more bytes than the whole chunks and the gaps between them. All chunks are verified by blocks if this
    adds at most `_SPARE_BLOCKS` blocks to the reads of the object, unless their checksums are enough.
    """
    groups: list[_Neighbours] = []
    near = shape.gap_bytes
    read_to = -1 - near  # the first chunk begins a group
    for chunk in chunks:
        ranges = sorted(_block_ranges(shape, chunk.destinations))
        if ranges[0][0] > read_to + near:
            groups.append(_Neighbours())
        group = groups[-1]
        for start, stop in ranges:
            if stop > read_to:
                group.block_bytes += stop - (start if start > read_to + near else read_to)
                read_to = stop
        if group.chunks and chunk.start - group.chunks[-1].end <= near:
            group.gap_bytes += chunk.start - group.chunks[-1].end
        group.chunk_bytes += chunk.end - chunk.start
        group.chunks.append(chunk)
    by_blocks: list[_CheckedChunk] = []
    alone: list[_CheckedChunk] = []
    unneeded = sum([max(group.block_bytes - group.chunk_bytes, 0) for group in groups])
    for group in groups:
        few = unneeded <= _SPARE_BLOCKS * shape.step and not group.chunks[0].checksum.is_enough
        worth = group.block_bytes * 50 <= (group.chunk_bytes + group.gap_bytes) * 51
        (by_blocks if few or worth else alone).extend(group.chunks)
    return by_blocks, alone


def _block_ranges(shape: ObjectShape, destinations: Iterable[Destination]) -> Iterator[tuple[int, int]]:
    step = shape.step
    for destination in destinations:
        if isinstance(destination, BoxDestination):
            for start, stop in destination.spans(shape.gap_bytes):
                yield start // step * step, shape.above(stop)
        else:
            yield destination.start // step * step, shape.above(destination.stop)


def _plan_chunks(shape: ObjectShape, chunks: Sequence[_CheckedChunk]) -> list[ReadTask]:
    """Plan tasks that read whole chunks, each byte once, and compare their checksums. Cuts parts between chunks."""
    windows: list[ReadPart] = []
    ranges: list[tuple[int, int, Destination]] = []
    most = shape.part_bytes
    for chunk in chunks:
        for destination in chunk.destinations:
            ranges.append((destination.start, destination.stop, destination))
        in_parts = chunk.stop - chunk.start > most
        numbers = sorted({destination.number for destination in chunk.destinations}) if in_parts else ()
        check = ChunkCheck(shape.key, chunk.start, chunk.stop, chunk.checksum, numbers)
        if windows and chunk.start - windows[-1].stop <= shape.gap_bytes and chunk.end - windows[-1].start <= most:
            windows[-1].stop = chunk.end
            windows[-1].checks.append(check)
            continue
        for begin in range(chunk.start, chunk.stop, most):
            # The checksum is in the same part as the last bytes that it covers.
            end = begin + most if begin + most < chunk.stop else chunk.end
            window = ReadPart(begin, end)
            window.checks.append(check)
            windows.append(window)
    _share(shape, windows, ranges)
    return _group(shape, windows)


def _plan_destinations(shape: ObjectShape, destinations: Iterable[Destination]) -> list[ReadTask]:
    """Plan tasks that read the bytes of destinations. Every needed step is read, and most steps only once."""
    ranges: list[tuple[int, int, Destination]] = []
    step = shape.step
    for destination in destinations:
        if isinstance(destination, RunDestination):
            ranges.append((destination.start // step * step, shape.above(destination.stop), destination))
            continue
        mark = len(ranges)
        for low, high in destination.spans(shape.gap_bytes):
            begin, end = low // step * step, shape.above(high)
            if len(ranges) > mark and begin <= ranges[-1][1]:  # otherwise `take` copies shared bytes twice
                ranges[-1] = ranges[-1][0], end, destination
            else:
                ranges.append((begin, end, destination))
    return _group(shape, _windows(shape, ranges))


def _group(shape: ObjectShape, parts: Sequence[ReadPart]) -> list[ReadTask]:
    """Group adjacent parts into tasks. Parts are in order, and do not overlap."""
    tasks: list[ReadTask] = []
    group: list[ReadPart] = []
    for part in parts:
        if group and (group[-1].stop != part.start or part.stop - group[0].start > shape.task_bytes):
            tasks.append(ReadTask(shape.key, group, shape.part_bytes))
            group = []
        group.append(part)
    if group:
        tasks.append(ReadTask(shape.key, group, shape.part_bytes))
    return tasks


def _windows(shape: ObjectShape, ranges: list[tuple[int, int, Destination]]) -> list[ReadPart]:
    """Return parts that together contain all ranges, without overlap, each with its destinations.

    Args:
        shape: the sizes of reads of the object.
        ranges: the needed bytes, with their destinations; sorted here.
    """
    ranges.sort(key=_FIRST)
    merged: list[tuple[int, int]] = []
    for start, stop, _ in ranges:
        if merged and start <= merged[-1][1] + shape.gap_bytes:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    windows: list[ReadPart] = []
    most = shape.part_bytes
    for start, stop in merged:
        edges = [start, *range((start // most + 1) * most, stop, most), stop]
        windows.extend(itertools.starmap(ReadPart, itertools.pairwise(edges)))
    _share(shape, windows, ranges)
    return windows


def _share(shape: ObjectShape, windows: Sequence[ReadPart], ranges: Iterable[tuple[int, int, Destination]]) -> None:
    """Add each destination to the windows that contain its bytes (start, stop)."""
    starts = list(map(_START, windows))
    for start, stop, destination in ranges:
        index = bisect.bisect_right(starts, start) - 1
        while start < stop:
            window = windows[index]
            end = min(window.stop, stop)
            takers = window.destinations
            if takers and takers[-1][0] is destination and isinstance(destination, BoxDestination):
                takers[-1] = (destination, takers[-1][1], max(takers[-1][2], end))
            else:
                takers.append((destination, start, end))
            start = end
            index += 1
    for window in windows:
        window.choose_direct(shape.sizes.direct)
