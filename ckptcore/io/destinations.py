"""Arrays that take what they want of the bytes of an object that were read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from ckptcore.io.elements import bytes_of
from ckptcore.io.tiles import Extent, c_strides, flat_boxes, intersect, spans
from ckptcore.model import HostArray

__all__ = ["BoxDestination", "Destination", "RunDestination"]

_SMALL_BYTES: Final = 16 << 10
"""Up to here an array is filled element by element; beyond NumPy would keep the interpreter lock for some dtypes."""


class RunDestination:
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


class BoxDestination:
    """An array that wants a box of a chunk whose elements lie apart, in the object or in its memory."""

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
            offset: of the chunk in the object, in bytes.
            shape: of the chunk.
            extent: what is wanted, relative to the chunk; not empty.
            array: of the little endian dtype that the object has.
            origin: where the array begins, relative to the chunk.
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


Destination = RunDestination | BoxDestination
