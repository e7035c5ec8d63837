"""System calls of Linux that Python does not offer; each says whether it could be done, for nothing depends on them."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Final

__all__ = ["allocate", "is_of_this_machine", "start_writeback"]

_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h
_STATFS_BYTES: Final = 256  # struct statfs has 120 of them
_LOCAL_FILE_SYSTEMS: Final = frozenset({
    0xEF53,  # ext2, ext3, ext4; these are from linux/magic.h
    0x58465342,  # xfs
    0x9123683E,  # btrfs
    0xF2F52010,  # f2fs
    0x2FC12FC1,  # zfs
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
})  # fmt: skip
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE, errno.EINTR})


def allocate(descriptor: int, nbytes: int) -> bool:
    """Give an open file its size and its place on the disk before it is written.

    `os.posix_fallocate` is not that: where a file system cannot, it writes into every page.

    Returns:
        False where the file system cannot; the file is then as it was.

    Raises:
        OSError: there is no space.
    """
    function = _function("fallocate", (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64))
    return function is not None and _done(function(descriptor, 0, 0, nbytes))


def start_writeback(descriptor: int, offset: int, nbytes: int) -> bool:
    """Begin to write a range of an open file from the page cache to the disk, without waiting for it.

    Returns:
        False where the file system cannot.

    Raises:
        OSError: an earlier write failed.
    """
    function = _function("sync_file_range", (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint))
    return function is not None and _done(function(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE))


def is_of_this_machine(descriptor: int) -> bool:
    """Whether an open file is on a disk or in the memory of this machine, so that nobody else can take its pages away.

    Returns:
        False also where that is not known.
    """
    function = _function("fstatfs", (ctypes.c_int, ctypes.c_void_p))
    if function is None or ctypes.sizeof(ctypes.c_long) != 8:
        return False
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    return _done(function(descriptor, found)) and ctypes.c_long.from_buffer(found).value in _LOCAL_FILE_SYSTEMS


def _done(result: int) -> bool:
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))


@functools.cache
def _function(name: str, argument_types: tuple[type, ...]) -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = argument_types
    return function
