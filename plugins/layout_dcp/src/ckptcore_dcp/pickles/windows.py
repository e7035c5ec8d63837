"""A long pickle that is read in windows, so that arrays in it are not read into memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from ckptcore_dcp.pickles.values import OutOfLine

_FIRST_WINDOW_BYTES: Final = 1 << 11
"""Bytes that are read after a long literal: the next one often follows soon."""
_WINDOW_BYTES: Final = 1 << 16
_OUT_OF_LINE_BYTES: Final = 1 << 14
"""Shortest literal that is not read."""


class DenseFileError(Exception):
    """A pickle that is better read as a whole: it has few long literals, or a long line."""


class Window:
    """Bytes of a file, with the methods of `bytes` that the machine calls. Not thread-safe.

    A long slice is an `OutOfLine` instead of bytes: only literals are long.

    Attributes:
        fetched: the number of bytes read so far.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, *, most_bytes: int | None) -> None:
        """Read nothing yet.

        Args:
            fetch: reads bytes of the file.
            size: length of the file.
            most_bytes: limit of the bytes that are read in all. Beyond it, `DenseFileError` is raised. None: no limit.
        """
        self._fetch = fetch
        self._size = size
        self._most_bytes = most_bytes
        self._data = b""
        self._start = 0
        self._nbytes = _WINDOW_BYTES
        self.fetched = 0

    def __len__(self) -> int:
        """Return the length of the file."""
        return self._size

    def __getitem__(self, index: int | slice) -> Any:
        """Return a byte, or several."""
        if index.__class__ is int and 0 <= (position := index - self._start) < len(self._data):
            return self._data[position]
        if isinstance(index, slice):
            start, stop, _ = index.indices(self._size)
            if stop - start >= _OUT_OF_LINE_BYTES:
                return OutOfLine(start, stop, False, self._fetch)
            self._move_to(start, stop)
            return self._data[start - self._start : max(start, stop) - self._start]
        if not 0 <= index < self._size:
            raise IndexError(index)
        self._move_to(index, index + 1)
        return self._data[index - self._start]

    def startswith(self, prefix: bytes, start: int) -> bool:
        """Return True if the bytes at an offset are `prefix`."""
        found: bytes = self[start : start + len(prefix)]
        return found == prefix

    def find(self, found: bytes, start: int, stop: int | None = None) -> int:
        """Return the offset of a byte from `start` on, or -1."""
        stop = self._size if stop is None else min(stop, self._size)
        while start < stop:
            self._move_to(start, start + 1)
            end = min(self._start + len(self._data), stop)
            position = self._data.find(found, start - self._start, end - self._start)
            if position >= 0:
                return self._start + position
            start = end
        return -1

    def unpacker(self, numbers: struct.Struct) -> Callable[[Any, int], tuple[Any, ...]]:
        """Return `numbers.unpack_from` for this file."""
        return lambda _, start: numbers.unpack(self[start : start + numbers.size])

    def _move_to(self, start: int, stop: int) -> None:
        if self._start <= start and stop <= self._start + len(self._data):
            return
        follows = self._start <= start <= self._start + len(self._data)
        self._nbytes = min(4 * self._nbytes, _WINDOW_BYTES) if follows else _FIRST_WINDOW_BYTES
        stop = min(max(stop, start + self._nbytes), self._size)
        self.fetched += stop - start
        if self._most_bytes is not None and self.fetched > self._most_bytes:
            raise DenseFileError
        self._data = self._fetch(start, stop)
        self._start = start
        if len(self._data) != stop - start:
            raise IndexError(stop)
