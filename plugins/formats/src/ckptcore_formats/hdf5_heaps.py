"""Checks of the global heaps of an HDF5 file, which have the texts and lists of its attributes.

The library of HDF5 trusts the sizes in them: one that is zero makes it loop without an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_MAGIC: Final = b"GCOL\x01"
_SUPERBLOCK: Final = b"\x89HDF\r\n\x1a\n"
_LEAST_BYTES: Final = 4096
_WINDOW_BYTES: Final = 1 << 14
_MAX_OBJECTS: Final = 1 << 20


class HeapChecks:
    """Checks each heap whose beginning is among bytes that the library reads. Not thread-safe."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        """Read how many bytes a length has. `fetch` returns bytes from `start` to `stop` of the file."""
        self._fetch = fetch
        self._size = size
        self._checked: set[int] = set()
        self._left = _MAX_OBJECTS
        origin = 0
        head = b""
        while origin < size and (head := fetch(origin, min(origin + 16, size)))[:8] != _SUPERBLOCK:
            origin = max(2 * origin, 512)
        at = 14 if head[8:9] in (b"\0", b"\1") else 10
        self._length = head[at] if len(head) == 16 else 8

    def check(self, data: bytes, start: int) -> None:
        """Check the heaps that begin in data, which is at offset `start` of the file.

        Raises:
            ValueError: one is damaged.
        """
        found = -1
        while (found := data.find(_MAGIC, found + 1)) >= 0:
            if start + found not in self._checked:
                self._check_heap(start + found)
                self._checked.add(start + found)

    def _check_heap(self, start: int) -> None:
        aligned = -(-(8 + self._length) // 8) * 8
        size = self._number(start + 8)
        stop = start + size
        position = start + aligned
        if not _LEAST_BYTES <= size <= self._size - start:
            self._damaged(start, f"has a size of {size} bytes")
        window, origin = b"", 0
        while position + aligned <= stop:
            self._left -= 1
            if self._left < 0:
                self._damaged(start, f"and those before it have more than {_MAX_OBJECTS} objects")
            if not origin <= position <= origin + len(window) - aligned:
                window, origin = self._fetch(position, min(position + _WINDOW_BYTES, stop)), position
            header = window[position - origin : position - origin + aligned]
            number = int.from_bytes(header[:2], "little")
            nbytes = int.from_bytes(header[8 : 8 + self._length], "little")
            step = aligned + -(-nbytes // 8) * 8 if number else nbytes  # number 0 is the free space, with its header
            if not aligned <= step <= stop - position:
                self._damaged(start, f"has an object of {nbytes} bytes at byte {position} (number {number})")
            position += step

    def _number(self, start: int) -> int:
        return int.from_bytes(self._fetch(start, min(start + self._length, self._size)), "little")

    def _damaged(self, start: int, reason: str) -> None:
        raise ValueError(f"the global heap at byte {start} {reason}, which cannot be")
