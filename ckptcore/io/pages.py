"""Pages of memory that come fresh from the system, huge ones where it has them."""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np

__all__ = ["HUGE_PAGE_BYTES", "PAGE_BYTES", "Pages", "map_pages"]

PAGE_BYTES: Final = 4096
"""What memory of `map_pages` begins at a multiple of, at least."""

HUGE_PAGE_BYTES: Final = 2 << 20
"""Bytes of a huge page on most systems; where they are larger, memory is taken in small pages."""

_SPARE: Final = 32
"""The last huge page is asked for too where it makes the memory larger by less than one part in so many. To touch up to two MiB at the
end of each array in small pages takes longer than to fill many times as much in huge ones."""


class Pages:
    """Memory of a mapping; it is unmapped when neither this object nor an array in it is left."""

    __slots__ = ("_mapping", "_offset", "nbytes")

    def __init__(self, mapping: mmap.mmap, offset: int, nbytes: int) -> None:
        self._mapping = mapping
        self._offset = offset
        self.nbytes = nbytes

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """An array at the beginning of the memory; not initialised."""
        return np.ndarray(shape, dtype, self._mapping, self._offset)

    def memory(self) -> memoryview:
        """All of the memory as bytes."""
        return memoryview(self._mapping)[self._offset : self._offset + self.nbytes]

    def cut(self, start: int, stop: int) -> Pages:
        """A part of the memory, in bytes."""
        return Pages(self._mapping, self._offset + start, stop - start)


def map_pages(nbytes: int) -> Pages:
    """Memory that is taken from the system as it is touched; it begins at a huge page where it is as large as one.

    Huge pages are asked for where they are filled, and at the end where little of one is left over: an array costs no more than a
    thirty-second part more than its bytes, or one small page.

    Raises:
        MemoryError
    """
    whole = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    huge = whole if (whole - nbytes) * _SPARE < nbytes else nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    slack = max(huge - nbytes, 0) + HUGE_PAGE_BYTES if huge else 0
    try:
        mapping = mmap.mmap(-1, max(nbytes, 1) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot get {nbytes} bytes of memory: {error}") from error
    if not slack:
        return Pages(mapping, 0, nbytes)
    offset = -np.frombuffer(mapping, np.uint8).ctypes.data % HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(mapping, offset, huge)
    return Pages(mapping, offset, nbytes)


def _advise(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, offset, nbytes)
    except OSError:
        # A kernel without transparent huge pages refuses; the memory is as good, only slower to touch first.
        return
