"""Atomic renames that Python does not offer: without replacing, and exchanging two names."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Final

from ckptcore.errors import AtomicityError

__all__ = ["exchange", "rename_without_replacing"]

# linux/fs.h and macOS's sys/stdio.h
_LINUX_NO_REPLACE: Final = 1
_LINUX_EXCHANGE: Final = 2
_MACOS_EXCHANGE: Final = 2
_MACOS_NO_REPLACE: Final = 4
_AT_FDCWD: Final = -100
# What systems and file systems answer that know no such rename. EINVAL also stands for a directory moved into itself.
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})

_Rename = Callable[[bytes, bytes], int]


def rename_without_replacing(source: str, destination: str) -> None:
    """Rename a file or directory, atomically.

    Raises:
        FileExistsError: something stands at the destination; nothing was changed.
        AtomicityError: the file system cannot; nothing was changed.
        OSError
    """
    _call(_no_replace(), source, destination, "rename without replacing")


def exchange(first: str, second: str) -> None:
    """Let two names of one file system change places, atomically.

    Raises:
        AtomicityError: the file system cannot; nothing was changed.
        OSError
    """
    _call(_exchange(), first, second, "exchange two names")


def _call(function: _Rename | None, first: str, second: str, what: str) -> None:
    number = errno.ENOSYS
    if function is not None:
        if function(os.fsencode(first), os.fsencode(second)) == 0:
            return
        number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        raise AtomicityError(
            f"cannot {what} atomically: {first} and {second} are on a file system or operating system without it "
            f"({os.strerror(number)}); nothing was changed. Use a local file system, or save to a new location"
        )
    raise OSError(number, os.strerror(number), first, None, second)


@functools.cache
def _no_replace() -> _Rename | None:
    return _with_flag(_LINUX_NO_REPLACE, _MACOS_NO_REPLACE)


@functools.cache
def _exchange() -> _Rename | None:
    return _with_flag(_LINUX_EXCHANGE, _MACOS_EXCHANGE)


def _with_flag(linux_flag: int, macos_flag: int) -> _Rename | None:
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        if (renamex := getattr(library, "renamex_np", None)) is None:
            return None
        renamex.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint)
        return lambda first, second: int(renamex(first, second, macos_flag))
    if (renameat2 := getattr(library, "renameat2", None)) is None:
        return None
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return lambda first, second: int(renameat2(_AT_FDCWD, first, _AT_FDCWD, second, linux_flag))
