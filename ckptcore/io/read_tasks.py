"""Tasks of reading: which bytes of which object are asked for together, and for whom."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.destinations import BoxDestination, Destination, RunDestination
from ckptcore.io.elements import is_little, little_dtype
from ckptcore.io.object_sizes import Sizes
from ckptcore.io.tiles import ChunkCheck, Extent, intersect, run_axis, runs
from ckptcore.model import Box, ChunkRead, HostArray

__all__ = [
    "ObjectShape",
    "ReadPart",
    "ReadTask",
    "destinations_of",
    "group_reads",
    "group_tasks",
    "plan_object",
    "share",
]


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """How an object is read.

    Attributes:
        key: the object.
        size: its bytes.
        step: bytes that are only read together, from multiples of it on: a block where it is verified, else 1.
        part_bytes: the most bytes that are asked for at once; a multiple of `step`.
        gap_bytes: bytes that are cheaper read in vain than left out.
        sizes: how much is moved at a time.
    """

    key: str
    size: int
    step: int
    part_bytes: int
    gap_bytes: int
    sizes: Sizes

    @property
    def task_bytes(self) -> int:
        """The most bytes that a task has."""
        return max(self.sizes.task, self.part_bytes)

    @property
    def direct_bytes(self) -> int:
        """From here on bytes that follow each other are read straight into their array."""
        return self.step if self.step > 1 else self.sizes.direct

    def keeps_elements(self, offset: int, itemsize: int) -> bool:
        """Whether no element of a chunk at `offset` lies across the ends of what is read."""
        grid = self.step if self.step > 1 else self.part_bytes
        return offset % itemsize == 0 and grid % itemsize == 0

    def above(self, position: int) -> int:
        """The first position from this one on where a step begins, or the end of the object."""
        end = -(-position // self.step) * self.step
        return min(self.size, end)


class ReadPart:
    """Bytes `start` to `stop` of an object.

    Attributes:
        memory: where to read them, in the array that wants them; None: into memory of the reader, for the destinations.
        destinations: the arrays that want some of them, and which bytes of the object each is to take.
        holes: bytes that are read straight into the array that alone wants them, in order, where others are not.
        checks: chunks to compare with the checksums behind them, of which all or some bytes are in the part.
    """

    __slots__ = ("checks", "destinations", "holes", "memory", "start", "stop")

    def __init__(
        self, start: int, stop: int, memory: memoryview | None, destinations: list[tuple[Destination, int, int]]
    ) -> None:
        self.start = start
        self.stop = stop
        self.memory = memory
        self.destinations = destinations
        self.holes: list[tuple[RunDestination, int, int]] = []
        self.checks: list[ChunkCheck] = []

    def cut_holes(self, least: int) -> None:
        """Let arrays that want `least` bytes or more be read into straight, if no two arrays want the same bytes."""
        if not any(stop - start >= least for _, start, stop in self.destinations):
            return
        wanted: list[tuple[int, int, RunDestination]] = []
        for destination, start, stop in self.destinations:
            if isinstance(destination, BoxDestination):
                return
            wanted.append((max(start, destination.start), min(stop, destination.stop), destination))
        wanted.sort(key=lambda entry: entry[0])
        if any(after[0] < before[1] for before, after in itertools.pairwise(wanted)):
            return
        self.destinations = [(destination, start, stop) for start, stop, destination in wanted if stop - start < least]
        self.holes = [(destination, start, stop) for start, stop, destination in wanted if stop - start >= least]

    def buffers(self, spare: memoryview) -> list[tuple[int, memoryview]]:
        """Where to read the bytes: into `spare`, as long as the part, but for the holes."""
        found: list[tuple[int, memoryview]] = []
        position = self.start
        for destination, start, stop in self.holes:
            if position < start:
                found.append((position, spare[position - self.start : start - self.start]))
            found.append((start, destination.memory(start, stop)))
            position = stop
        if position < self.stop:
            found.append((position, spare[position - self.start :]))
        return found


class ReadTask:
    """Parts of one object that follow each other without a gap; one thread reads them.

    Attributes:
        key: the object.
        most: bytes to ask for at once.
        nbytes: bytes to read.
        requests: the parts that are asked for together, in order; one that is read straight into its array may be
            larger than what is asked for at once, and then is alone.
        numbers: of the targets that take part, each once.
        checked_numbers: of the targets that wait for chunks to be compared whose last bytes are here, once for each chunk.
    """

    __slots__ = ("checked_numbers", "key", "most", "nbytes", "numbers", "requests")

    def __init__(self, key: str, parts: Sequence[ReadPart], most: int) -> None:
        self.key = key
        self.most = most
        self.nbytes = parts[-1].stop - parts[0].start
        self.requests: list[list[ReadPart]] = []
        for part in parts:
            if self.requests and part.stop - self.requests[-1][0].start <= most:
                self.requests[-1].append(part)
            else:
                self.requests.append([part])
        numbers = {destination.number for part in parts for destination, _, _ in part.destinations}
        numbers.update([destination.number for part in parts for destination, _, _ in part.holes])
        self.numbers: Iterable[int] = numbers
        self.checked_numbers = [
            number for part in parts for check in part.checks if check.end <= part.stop for number in check.numbers
        ]


def plan_object(shape: ObjectShape, destinations: Iterable[Destination]) -> list[ReadTask]:
    """Tasks that read what destinations want of one object; every step that is wanted is read, and most of them once."""
    parts: list[ReadPart] = []
    ranges: list[tuple[int, int, Destination]] = []
    step, least = shape.step, shape.direct_bytes
    for destination in destinations:
        start, stop = destination.start, destination.stop
        if isinstance(destination, BoxDestination):
            mark = len(ranges)
            for low, high in destination.spans(shape.gap_bytes):
                begin, end = low // step * step, shape.above(high)
                if len(ranges) > mark and begin <= ranges[-1][1]:  # else it would take what is in both twice
                    ranges[-1] = ranges[-1][0], end, destination
                else:
                    ranges.append((begin, end, destination))
            continue
        # Whole steps of a run go straight into its array.
        first = shape.above(start)
        last = stop if stop == shape.size else stop // step * step
        if stop - start < least or last <= first:
            ranges.append((start // step * step, shape.above(stop), destination))
            continue
        for begin, end in _cut(first, last, shape.task_bytes):
            parts.append(ReadPart(begin, end, destination.memory(begin, end), [(destination, begin, end)]))
        if start < first:
            ranges.append((first - step, first, destination))
        if last < stop:
            ranges.append((last, shape.above(stop), destination))
    parts.sort(key=lambda part: part.start)
    parts.extend(_windows(shape, ranges, [part.start for part in parts]))
    parts.sort(key=lambda part: part.start)
    return group_tasks(shape, parts)


def group_tasks(shape: ObjectShape, parts: Sequence[ReadPart]) -> list[ReadTask]:
    """Tasks that read parts, which are in order and do not overlap unless two arrays want the same bytes."""
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


def _cut(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut a range at multiples of `most`."""
    while start < stop:
        end = min(stop, (start // most + 1) * most)
        yield start, end
        start = end


def _windows(shape: ObjectShape, ranges: list[tuple[int, int, Destination]], direct: Sequence[int]) -> list[ReadPart]:
    """Parts that together hold all ranges, without overlap, each with its destinations.

    Args:
        shape: of the object.
        ranges: which bytes are wanted for whom; sorted here.
        direct: where parts begin that are read straight into arrays, sorted: no gap is closed across one.
    """
    ranges.sort(key=lambda entry: entry[0])
    merged: list[tuple[int, int]] = []
    for start, stop, _ in ranges:
        before = merged[-1][1] if merged else -1
        near = 0 <= before and start <= before + shape.gap_bytes
        if near and (start <= before or bisect.bisect_left(direct, before) == bisect.bisect_left(direct, start)):
            merged[-1] = (merged[-1][0], max(before, stop))
        else:
            merged.append((start, stop))
    windows = [
        ReadPart(begin, end, None, []) for start, stop in merged for begin, end in _cut(start, stop, shape.part_bytes)
    ]
    share(shape, windows, ranges)
    return windows


def share(shape: ObjectShape, windows: Sequence[ReadPart], ranges: Iterable[tuple[int, int, Destination]]) -> None:
    """Give destinations to the windows that hold the bytes (start, stop) they want; windows follow each other where they do."""
    starts = [window.start for window in windows]
    for start, stop, destination in ranges:
        place = bisect.bisect_right(starts, start) - 1
        while start < stop:
            window = windows[place]
            end = min(window.stop, stop)
            destinations = window.destinations
            if destinations and destinations[-1][0] is destination and isinstance(destination, BoxDestination):
                destinations[-1] = (destination, destinations[-1][1], max(destinations[-1][2], end))
            else:
                destinations.append((destination, start, end))
            start = end
            place += 1
    for window in windows:
        window.cut_holes(shape.sizes.direct)


def destinations_of(shape: ObjectShape, read: ChunkRead) -> Iterator[Destination]:
    """What takes the bytes of a chunk that its targets want.

    Raises:
        CorruptCheckpointError: the chunk does not lie within the object, or a target does not fit its box.
    """
    chunk, itemsize, offset = read.box, read.itemsize, read.offset
    # A box that begins at zero, as most do, has its shape at hand.
    chunk_shape = chunk.stop if not any(chunk.start) and len(chunk.start) == len(chunk.stop) else _shape(read, chunk)
    nbytes = prod(chunk_shape) * itemsize
    end = offset + nbytes if read.checksum is None else offset + nbytes + read.checksum.nbytes
    if offset < 0 or itemsize <= 0 or end > shape.size or (chunk_shape and min(chunk_shape) < 0):
        raise CorruptCheckpointError(
            f"{read.key!r} does not hold what the checkpoint says: expected bytes {offset} to {end} for an "
            f"array of shape {list(chunk_shape)}{'' if read.checksum is None else ' and its checksum'}, found {shape.size} "
            "bytes; it was cut off, or what describes it is damaged: restore it from a copy, or load another checkpoint",
            key=read.key,
            start=offset,
            stop=end,
        )
    for number, box, array in read.targets:
        if box is chunk or box == chunk:
            box_shape = chunk_shape
        else:
            box_shape = _shape(read, box)
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
            yield from _part_destinations(shape, read, chunk_shape, number, box, array)


def _part_destinations(
    shape: ObjectShape, read: ChunkRead, chunk_shape: tuple[int, ...], number: int, box: Box, array: HostArray
) -> Iterator[Destination]:
    corner, itemsize = read.box.start, read.itemsize
    common = intersect((box.start, box.stop), (corner, read.box.stop))
    if common is None:
        return
    extent = _relative(common, corner)
    origin = tuple(map(int.__sub__, box.start, corner))
    inside = _relative(common, box.start)
    axis = max(run_axis(chunk_shape, extent), run_axis(array.shape, inside))
    lengths = tuple(map(int.__sub__, extent[1], extent[0]))
    run_bytes = prod(lengths[axis:]) * itemsize
    little = is_little(array.dtype)
    if little and (prod(lengths[:axis]) == 1 or run_bytes >= shape.sizes.run):
        places = runs(array.shape, inside, axis)
        for (_, flat), (_, place) in zip(runs(chunk_shape, extent, axis), places, strict=True):
            start = read.offset + flat * itemsize
            yield RunDestination(number, start, start + run_bytes, array, place * itemsize)
    elif shape.keeps_elements(read.offset, itemsize):
        yield BoxDestination(number, read.offset, chunk_shape, extent, array.view(little_dtype(array.dtype)), origin)
    else:
        # Elements lie across the ends of what is read: take them apart into bytes, an axis of their own.
        if not little:
            raise _mismatch(read, f"elements that are not aligned, for an array of {array.dtype}")
        as_bytes = array.reshape(-1).view(np.uint8).reshape(*array.shape, itemsize)
        extent = (*extent[0], 0), (*extent[1], itemsize)
        yield BoxDestination(number, read.offset, (*chunk_shape, itemsize), extent, as_bytes, (*origin, 0))


def _shape(read: ChunkRead, box: Box) -> tuple[int, ...]:
    if len(box.start) != len(box.stop) or any(map(int.__gt__, box.start, box.stop)):
        raise _mismatch(read, f"a box from {list(box.start)} to {list(box.stop)}")
    return tuple(map(int.__sub__, box.stop, box.start))


def _relative(extent: Extent, origin: tuple[int, ...]) -> Extent:
    return tuple(map(int.__sub__, extent[0], origin)), tuple(map(int.__sub__, extent[1], origin))


def _mismatch(read: ChunkRead, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"what describes {read.key!r} is damaged: expected a box from {list(read.box.start)} to {list(read.box.stop)} with "
        f"{read.itemsize} bytes per element at byte {read.offset}, found {found}; "
        "restore it from a copy, or load another checkpoint",
        key=read.key,
    )


def group_reads(reads: Iterable[ChunkRead]) -> Mapping[str, list[ChunkRead]]:
    """The reads of each object."""
    by_key: dict[str, list[ChunkRead]] = {}
    for read in reads:
        by_key.setdefault(read.key, []).append(read)
    return by_key
