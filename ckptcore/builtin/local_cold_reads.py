"""Reading what is not in the page cache: straight from the disk, which is faster than through the cache.

A buffered read of cold data pays for new pages and a copy, and pushes out what others use. So a page of each window of
a file is asked for without waiting; where it is not in memory, that window is read with O_DIRECT. Both ways give the same
bytes, a wrong guess costs time only.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["ColdReader", "open_cold_reader"]

_PAGE_BYTES: Final = 4096  # what every disk takes as alignment of addresses, offsets and lengths
_SECTOR_BYTES: Final = 512
_WINDOW_BYTES: Final = 8 << 20
_BOUNCE_BYTES: Final = 4 << 20
_GUESS_SECONDS: Final = 1.0  # how long a guess about a window is believed
_LEAST_BYTES: Final = 256 << 10  # of a read that is worth going to the disk for without readahead

_REFUSALS: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES})

_memory: Final = threading.local()
"""The aligned memory of each thread, given back when the thread ends."""


def open_cold_reader(path: str, status: os.stat_result) -> ColdReader | None:
    """What reads the file at a path past the page cache; None where system, file system or size do not allow it.

    Args:
        path: the file.
        status: of the file that is meant: the path may lead to another by now.
    """
    if sys.platform != "linux" or status.st_size < _LEAST_BYTES:
        return None
    descriptors: list[int] = []
    try:
        for flags in (0, os.O_DIRECT):
            descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags))
            if not os.path.samestat(os.fstat(descriptors[-1]), status):
                raise OSError(errno.EINVAL, "another file came in its place", path)
        # Asking for a page must not make the system read more than it.
        os.posix_fadvise(descriptors[0], 0, 0, os.POSIX_FADV_RANDOM)
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if not isinstance(error, OSError):
            raise
        return None  # a file that was opened plainly can be read plainly
    return ColdReader(descriptors[0], descriptors[1], status.st_size)


class ColdReader:
    """A file of which cold parts can be read. Any thread; closed when nobody refers to it any more."""

    def __init__(self, probe: int, direct: int, size: int) -> None:
        self._probe = probe
        self._direct = direct
        self._size = size
        self._guesses: dict[int, tuple[bool, float]] = {}
        self._usable = True
        self._address_bytes = 4

    def __del__(self) -> None:
        os.close(self._probe)
        os.close(self._direct)

    def is_cold(self, offset: int, nbytes: int) -> bool:
        """Whether a read is better done by `read_into`: a guess."""
        if nbytes < _LEAST_BYTES or not self._usable:
            return False
        window = offset // _WINDOW_BYTES
        now = time.monotonic()
        guess = self._guesses.get(window)
        if guess is None or now - guess[1] > _GUESS_SECONDS:
            self._guesses[window] = guess = (self._ask(window * _WINDOW_BYTES), now)
        return guess[0]

    def _ask(self, start: int) -> bool:
        """Whether some page of a window is not in memory: another one each time, for asking brings it there."""
        pages = max(1, min(_WINDOW_BYTES, self._size - start) // _PAGE_BYTES)
        number = int.from_bytes(os.urandom(4), "little") % pages
        try:
            os.preadv(self._probe, [bytearray(_PAGE_BYTES)], start + number * _PAGE_BYTES, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._usable = False
        return False

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers that follow each other from an offset on, from the disk; how many bytes were there.

        Fewer than asked for where the file ends, or where the disk does not take such reads: the rest is then to be
        read plainly.

        Raises:
            OSError
        """
        if len(buffers) == 1 and (offset | len(buffers[0])) % _PAGE_BYTES == 0:
            done = self._read_in_place(offset, buffers[0])
            if done >= 0:
                return done
        bounce = _bounce()
        whole = np.frombuffer(bounce, np.uint8)
        done = 0
        skip = offset % _PAGE_BYTES
        pending = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        total = sum(map(len, pending))
        while done < total:
            wanted = min(_BOUNCE_BYTES, skip + total - done)
            aligned = -(-wanted // _PAGE_BYTES) * _PAGE_BYTES
            found = min(self._read(bounce[:aligned], offset + done - skip), wanted) - skip
            if found <= 0:
                break
            _spread(whole[skip : skip + found], pending)
            done += found
            if (offset + done) % _PAGE_BYTES and done < total:
                break
            skip = 0
        return done

    def _read_in_place(self, offset: int, buffer: memoryview) -> int:
        """Read straight into a buffer; -1 if the disk does not take its address."""
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        if address % self._address_bytes:
            return -1
        try:
            return os.preadv(self._direct, [buffer], offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
        # What a disk wants of addresses is found out: 4 bytes for NVMe, 512 for others, a page to be safe.
        self._address_bytes = _SECTOR_BYTES if address % _SECTOR_BYTES else _PAGE_BYTES
        return -1

    def _read(self, target: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._direct, [target], offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._usable = False
            return -1


def _bounce() -> memoryview:
    memory: memoryview | None = getattr(_memory, "bounce", None)
    if memory is None:
        pages = mmap.mmap(-1, _BOUNCE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = _memory.bounce = memoryview(pages)
    return memory


def _spread(source: npt.NDArray[np.uint8], targets: list[npt.NDArray[np.uint8]]) -> None:
    """Copy bytes into the arrays one after the other; what is filled leaves the list, or is cut off its first."""
    while len(source):
        target = targets[0]
        count = min(len(source), len(target))
        # NumPy, because it lets other threads run while it copies.
        np.copyto(target[:count], source[:count])
        source = source[count:]
        if count == len(target):
            del targets[0]
        else:
            targets[0] = target[count:]
