"""Sizes of parts: where each part of an upload begins, so that no object needs more of them than a service takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptcore_obstore.uploads import MOST_PARTS

__all__ = ["Part", "PartSizes"]

_PARTS_OF_A_SIZE: Final = 1000
"""Of an object whose size is not known each thousand parts are twice as large as the thousand before: ten thousand are the most."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an object.

    Attributes:
        number: counted from 1.
        start, stop: its bytes; where the size of the object is not known the last part may end before.
    """

    number: int
    start: int
    stop: int


class PartSizes:
    """How an object is cut into parts."""

    def __init__(self, size: int | None, least: int) -> None:
        """Cut an object.

        Args:
            size: in bytes, where it is known.
            least: bytes of a part where that is enough, else a multiple of it.
        """
        self._size = size
        self._bytes = least * max(1, -(-(size or 0) // (MOST_PARTS * least)))

    @property
    def is_one(self) -> bool:
        """Whether the object is known to fit one part."""
        return self._size is not None and self._size <= self._bytes

    def at(self, position: int) -> Part:
        """The part that has a byte."""
        size = self._bytes
        if self._size is not None:
            index = position // size
            return Part(index + 1, index * size, min((index + 1) * size, self._size))
        first, index = 0, 0
        while position >= first + size * _PARTS_OF_A_SIZE:
            first += size * _PARTS_OF_A_SIZE
            index += _PARTS_OF_A_SIZE
            size *= 2
        steps = (position - first) // size
        start = first + steps * size
        return Part(index + steps + 1, start, start + size)
