"""Division of an object into parts, at most as many as a service accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptcore_obstore.uploads import MAX_PARTS

_PARTS_PER_SIZE: Final = 1000
"""Number of parts of equal size in an object of unknown size.

After each thousand parts the size doubles, because ten thousand parts are the limit.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an object.

    Attributes:
        number: counted from 1.
        start, stop: byte range. If the size of the object is unknown, the last part may end
            earlier.
    """

    number: int
    start: int
    stop: int


class PartSizes:
    """Division of an object into parts."""

    def __init__(self, size: int | None, least: int) -> None:
        """Divide an object.

        Args:
            size: size in bytes; None if unknown.
            least: smallest part size in bytes. Larger parts are multiples of it.
        """
        self._size = size
        self._bytes = least * max(1, -(-(size or 0) // (MAX_PARTS * least)))

    @property
    def is_one(self) -> bool:
        """True if the object is known to fit in one part."""
        return self._size is not None and self._size <= self._bytes

    def at(self, position: int) -> Part:
        """Return the part that contains a byte."""
        size = self._bytes
        if self._size is not None:
            index = position // size
            return Part(index + 1, index * size, min((index + 1) * size, self._size))
        first, index = 0, 0
        while position >= first + size * _PARTS_PER_SIZE:
            first += size * _PARTS_PER_SIZE
            index += _PARTS_PER_SIZE
            size *= 2
        steps = (position - first) // size
        start = first + steps * size
        return Part(index + steps + 1, start, start + size)
