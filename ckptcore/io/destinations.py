"""Destinations of a read: arrays, and the bytes of an object that each of them takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.elements import (
    bytes_of,
    c_strides,
    is_little,
    little_dtype,
    run_axis,
    runs,
    spans,
)
from ckptcore.io.requests import Sizes
from ckptcore.model import Box, ChunkRead, HostArray
from ckptcore.planning.partition import boxes_of_range

_SMALL_BYTES: Final = 16 << 10
"""Up to this size an array is filled by NumPy assignment, which for some dtypes holds the interpreter lock."""


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
    # The shape of a box that starts at zero, the common case, is its stop.
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
        # Reads may start or end inside elements: read them as bytes, with the bytes of an element as a last axis.
        if not little:
            raise _mismatch(read, f"elements that are not aligned, for an array of {array.dtype}")
        as_bytes = array.reshape(-1).view(np.uint8).reshape(*array.shape, itemsize)
        in_bytes = Box((*in_chunk.start, 0), (*in_chunk.stop, itemsize))
        yield BoxDestination(number, read.offset, (*chunk_shape, itemsize), in_bytes, as_bytes, (*origin, 0))


def _shape(read: ChunkRead, box: Box) -> tuple[int, ...]:
    if len(box.start) != len(box.stop) or any(map(int.__gt__, box.start, box.stop)):
        raise _mismatch(read, f"a box from {list(box.start)} to {list(box.stop)}")
    return tuple(map(int.__sub__, box.stop, box.start))


def _mismatch(read: ChunkRead, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the metadata of {read.key!r} is damaged: expected a box from {list(read.box.start)} to {list(read.box.stop)} "
        f"with {read.itemsize} bytes per element at byte {read.offset}, found {found}. Restore it from a copy, or load "
        "another checkpoint",
        key=read.key,
    )
