"""Tasks of reading: which bytes of which object are asked for together, and which arrays take them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from ckptcore.engine.elements import bytes_of, is_little, little_dtype
from ckptcore.engine.sizes import Sizes
from ckptcore.engine.tiles import Extent, c_strides, flat_boxes, intersect, run_axis, runs, spans
from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import Box, HostArray, TileRead

__all__ = ["BoxTaker", "ObjectShape", "ReadPart", "ReadTask", "RunTaker", "Taker", "group_reads", "plan_object"]

_SMALL_BYTES: Final = 16 << 10
"""Up to here an array is filled element by element; beyond NumPy would keep the interpreter lock for some dtypes."""


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

    @property
    def grid(self) -> int:
        """What every position where a part may be cut is a multiple of, but for ends of what is wanted."""
        return self.step if self.step > 1 else self.part_bytes

    def above(self, position: int) -> int:
        """The first position from this one on where a step begins, or the end of the object."""
        end = -(-position // self.step) * self.step
        return min(self.size, end)


class RunTaker:
    """An array that wants the bytes `start` to `stop` of an object as they are, at one place of its memory."""

    __slots__ = ("_array", "_memory", "_place", "number", "start", "stop")

    def __init__(self, number: int, start: int, stop: int, array: HostArray, place: int) -> None:
        """`place` is where in the memory of the array they go, in bytes; -1 if they are all of it."""
        self.number = number
        self.start = start
        self.stop = stop
        self._array = array
        self._place = place
        self._memory: memoryview | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        """Where bytes `start` to `stop` of the object go."""
        if self._memory is None:
            self._memory = bytes_of(self._array)
        shift = max(self._place, 0) - self.start
        return self._memory[start + shift : stop + shift]

    def take(self, window: memoryview, base: int, start: int, stop: int) -> int:
        """Take what it wants of bytes `start` to `stop` of the object; returns how many it took.

        `window` holds them; its first byte is number `base` of the object.
        """
        start = max(start, self.start)
        stop = min(stop, self.stop)
        if self._place < 0 and stop - start <= _SMALL_BYTES and stop - start == self.stop - self.start:
            array = self._array
            array[...] = np.ndarray(array.shape, array.dtype, window, start - base)
            return stop - start
        destination = np.frombuffer(self.memory(start, stop), np.uint8)
        destination[...] = np.frombuffer(window, np.uint8, stop - start, start - base)
        return stop - start


class BoxTaker:
    """An array that wants a box of a tile whose elements lie apart, in the object or in its memory."""

    __slots__ = (
        "_array",
        "_extent",
        "_itemsize",
        "_offset",
        "_origin",
        "_shape",
        "_strides",
        "number",
        "start",
        "stop",
    )

    def __init__(
        self,
        number: int,
        offset: int,
        shape: tuple[int, ...],
        extent: Extent,
        array: HostArray,
        origin: tuple[int, ...],
    ) -> None:
        """Fill a part of an array.

        Args:
            number: of the target.
            offset: of the tile in the object, in bytes.
            shape: of the tile.
            extent: what is wanted, relative to the tile; not empty.
            array: of the little endian dtype that the object has.
            origin: where the array begins, relative to the tile.
        """
        self.number = number
        self._offset = offset
        self._shape = shape
        self._extent = extent
        self._array = array
        self._origin = origin
        self._itemsize = array.itemsize
        self._strides = tuple([stride * array.itemsize for stride in c_strides(shape)])
        self.start = offset + sum(map(int.__mul__, extent[0], self._strides))
        last = sum([(index - 1) * stride for index, stride in zip(extent[1], self._strides, strict=True)])
        self.stop = offset + last + array.itemsize

    def spans(self, most_gap: int) -> Iterator[tuple[int, int]]:
        """Ranges of bytes of the object that cover what it wants, ascending."""
        size = self._itemsize
        for start, stop in spans(self._shape, self._extent, most_gap // size):
            yield self._offset + start * size, self._offset + stop * size

    def take(self, window: memoryview, base: int, start: int, stop: int) -> int:
        """Take what it wants of bytes `start` to `stop` of the object; returns how many it took.

        `window` holds them; its first byte is number `base` of the object.
        """
        size = self._itemsize
        first = max(self.start, start) - self._offset
        last = min(self.stop, stop) - self._offset
        taken = 0
        for box in flat_boxes(self._shape, first // size, last // size):
            if (common := intersect(box, self._extent)) is None:
                continue
            low, high = common
            shape = tuple(map(int.__sub__, high, low))
            position = self._offset + sum(map(int.__mul__, low, self._strides)) - base
            source = np.ndarray(shape, self._array.dtype, window, position, self._strides)
            origin = self._origin
            place = tuple(map(slice, map(int.__sub__, low, origin), map(int.__sub__, high, origin)))
            np.copyto(self._array[place], source)
            taken += source.nbytes
        return taken


Taker = RunTaker | BoxTaker


class ReadPart:
    """Bytes `start` to `stop` of an object.

    Attributes:
        memory: where to read them, in the array that wants them; None: into memory of the reader, for the takers.
        takers: the arrays that want some of them, and which bytes of the object each is to take.
        holes: bytes that are read straight into the array that alone wants them, in order, where others are not.
    """

    __slots__ = ("holes", "memory", "start", "stop", "takers")

    def __init__(self, start: int, stop: int, memory: memoryview | None, takers: list[tuple[Taker, int, int]]) -> None:
        self.start = start
        self.stop = stop
        self.memory = memory
        self.takers = takers
        self.holes: list[tuple[RunTaker, int, int]] = []

    def cut_holes(self, least: int) -> None:
        """Let arrays that want `least` bytes or more be read into straight, if no two arrays want the same bytes."""
        if not any(stop - start >= least for _, start, stop in self.takers):
            return
        wanted: list[tuple[int, int, RunTaker]] = []
        for taker, start, stop in self.takers:
            if isinstance(taker, BoxTaker):
                return
            wanted.append((max(start, taker.start), min(stop, taker.stop), taker))
        wanted.sort(key=lambda entry: entry[0])
        if any(after[0] < before[1] for before, after in itertools.pairwise(wanted)):
            return
        self.takers = [(taker, start, stop) for start, stop, taker in wanted if stop - start < least]
        self.holes = [(taker, start, stop) for start, stop, taker in wanted if stop - start >= least]

    def buffers(self, spare: memoryview) -> list[tuple[int, memoryview]]:
        """Where to read the bytes: into `spare`, as long as the part, but for the holes."""
        found: list[tuple[int, memoryview]] = []
        position = self.start
        for taker, start, stop in self.holes:
            if position < start:
                found.append((position, spare[position - self.start : start - self.start]))
            found.append((start, taker.memory(start, stop)))
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
    """

    __slots__ = ("key", "most", "nbytes", "numbers", "requests")

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
        numbers = {taker.number for part in parts for taker, _, _ in part.takers}
        numbers.update([taker.number for part in parts for taker, _, _ in part.holes])
        self.numbers: Iterable[int] = numbers


def plan_object(shape: ObjectShape, reads: Sequence[TileRead]) -> list[ReadTask]:
    """Tasks that read tiles of one object; every step that is wanted is read, and most of them once.

    Raises:
        CorruptCheckpointError: a tile does not lie within the object, or a target does not fit its box.
    """
    parts: list[ReadPart] = []
    ranges: list[tuple[int, int, Taker]] = []
    step, least = shape.step, shape.direct_bytes
    for read in reads:
        for taker in _takers(shape, read):
            start, stop = taker.start, taker.stop
            if isinstance(taker, BoxTaker):
                for begin, end in taker.spans(shape.gap_bytes):
                    ranges.append((begin // step * step, shape.above(end), taker))
                continue
            # Whole steps of a run go straight into its array.
            first = shape.above(start)
            last = stop if stop == shape.size else stop // step * step
            if stop - start < least or last <= first:
                ranges.append((start // step * step, shape.above(stop), taker))
                continue
            for begin, end in _cut(first, last, shape.task_bytes):
                parts.append(ReadPart(begin, end, taker.memory(begin, end), [(taker, begin, end)]))
            if start < first:
                ranges.append((first - step, first, taker))
            if last < stop:
                ranges.append((last, shape.above(stop), taker))
    parts.sort(key=lambda part: part.start)
    parts.extend(_windows(shape, ranges, [part.start for part in parts]))
    parts.sort(key=lambda part: part.start)
    return _tasks(shape, parts)


def _tasks(shape: ObjectShape, parts: Sequence[ReadPart]) -> list[ReadTask]:
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


def _windows(shape: ObjectShape, ranges: list[tuple[int, int, Taker]], direct: Sequence[int]) -> list[ReadPart]:
    """Parts that together hold all ranges, without overlap, each with its takers.

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
    starts = [window.start for window in windows]
    for start, stop, taker in ranges:
        place = bisect.bisect_right(starts, start) - 1
        while start < stop:
            window = windows[place]
            end = min(window.stop, stop)
            takers = window.takers
            if takers and takers[-1][0] is taker and isinstance(taker, BoxTaker):
                takers[-1] = (taker, takers[-1][1], max(takers[-1][2], end))
            else:
                takers.append((taker, start, end))
            start = end
            place += 1
    for window in windows:
        window.cut_holes(shape.sizes.direct)
    return windows


def _takers(shape: ObjectShape, read: TileRead) -> Iterator[Taker]:
    tile, itemsize, offset = read.box, read.itemsize, read.offset
    # A box that begins at zero, as most do, has its shape at hand.
    tile_shape = tile.stop if not any(tile.start) and len(tile.start) == len(tile.stop) else _shape(read, tile)
    nbytes = prod(tile_shape) * itemsize
    if offset < 0 or itemsize <= 0 or offset + nbytes > shape.size or (tile_shape and min(tile_shape) < 0):
        raise CorruptCheckpointError(
            f"{read.key!r} does not hold what the checkpoint says: expected bytes {offset} to {offset + nbytes} for an "
            f"array of shape {list(tile_shape)}, found {shape.size} bytes; it was cut off, or what describes it is "
            "damaged: restore it from a copy, or load another checkpoint",
            key=read.key,
            start=offset,
            stop=offset + nbytes,
        )
    for number, box, array in read.targets:
        if box is tile or box == tile:
            box_shape = tile_shape
        else:
            box_shape = _shape(read, box)
        if array.shape != box_shape or array.itemsize != itemsize or len(box_shape) != len(tile_shape):
            raise _mismatch(
                read, f"an array of shape {list(array.shape)} with {array.itemsize} bytes per element for it"
            )
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError(f"target {number} of a read is not C-contiguous and writable")
        if nbytes == 0:
            continue
        if box_shape is tile_shape and is_little(array.dtype):
            yield RunTaker(number, offset, offset + nbytes, array, -1)
        else:
            yield from _part_takers(shape, read, tile_shape, number, box, array)


def _part_takers(
    shape: ObjectShape, read: TileRead, tile_shape: tuple[int, ...], number: int, box: Box, array: HostArray
) -> Iterator[Taker]:
    corner, itemsize = read.box.start, read.itemsize
    common = intersect((box.start, box.stop), (corner, read.box.stop))
    if common is None:
        return
    extent = _relative(common, corner)
    origin = tuple(map(int.__sub__, box.start, corner))
    inside = _relative(common, box.start)
    axis = max(run_axis(tile_shape, extent), run_axis(array.shape, inside))
    lengths = tuple(map(int.__sub__, extent[1], extent[0]))
    run_bytes = prod(lengths[axis:]) * itemsize
    little = is_little(array.dtype)
    if little and (prod(lengths[:axis]) == 1 or run_bytes >= shape.sizes.run):
        places = runs(array.shape, inside, axis)
        for (_, flat), (_, place) in zip(runs(tile_shape, extent, axis), places, strict=True):
            start = read.offset + flat * itemsize
            yield RunTaker(number, start, start + run_bytes, array, place * itemsize)
    elif read.offset % itemsize == 0 and shape.grid % itemsize == 0:
        yield BoxTaker(number, read.offset, tile_shape, extent, array.view(little_dtype(array.dtype)), origin)
    else:
        # Elements lie across the ends of what is read: take them apart into bytes, an axis of their own.
        if not little:
            raise _mismatch(read, f"elements that are not aligned, for an array of {array.dtype}")
        as_bytes = array.reshape(-1).view(np.uint8).reshape(*array.shape, itemsize)
        extent = (*extent[0], 0), (*extent[1], itemsize)
        yield BoxTaker(number, read.offset, (*tile_shape, itemsize), extent, as_bytes, (*origin, 0))


def _shape(read: TileRead, box: Box) -> tuple[int, ...]:
    if len(box.start) != len(box.stop) or any(map(int.__gt__, box.start, box.stop)):
        raise _mismatch(read, f"a box from {list(box.start)} to {list(box.stop)}")
    return tuple(map(int.__sub__, box.stop, box.start))


def _relative(extent: Extent, origin: tuple[int, ...]) -> Extent:
    return tuple(map(int.__sub__, extent[0], origin)), tuple(map(int.__sub__, extent[1], origin))


def _mismatch(read: TileRead, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"what describes {read.key!r} is damaged: expected a box from {list(read.box.start)} to {list(read.box.stop)} with "
        f"{read.itemsize} bytes per element at byte {read.offset}, found {found}; "
        "restore it from a copy, or load another checkpoint",
        key=read.key,
    )


def group_reads(reads: Iterable[TileRead]) -> Mapping[str, list[TileRead]]:
    """The reads of each object."""
    by_key: dict[str, list[TileRead]] = {}
    for read in reads:
        by_key.setdefault(read.key, []).append(read)
    return by_key
