"""System calls of local storage, and the errors that they raise."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct
import sys
from collections.abc import Callable
from typing import Final

from ckptcore.errors import InvalidLocationError, ObjectNotFoundError, StorageError, StorageFullError

__all__ = [
    "ABSENT",
    "allocate",
    "close_descriptor",
    "is_of_this_machine",
    "local_error",
    "open_without_links",
    "real_path",
    "start_writeback",
    "sync_directory",
    "sync_file",
    "working_directory",
]

_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h
_OPENAT2: Final = 437  # the same on all machines that are younger than it; asm-generic/unistd.h
_OPENAT2_MACHINES: Final = frozenset({"x86_64", "aarch64", "riscv64", "ppc64le", "s390x", "loongarch64"})
_AT_FDCWD: Final = -100  # linux/fcntl.h
_RESOLVE_NO_SYMLINKS: Final = 0x04  # linux/openat2.h, as is struct open_how: flags, mode and resolve, 64 bits each
_OPEN_HOW: Final = struct.Struct("=QQQ")
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


def open_without_links(path: str, flags: int) -> int | None:
    """Open a file on whose path no symbolic link is, so that it is where its path says.

    Args:
        path: of the file.
        flags: as for `os.open`; not to create it.

    Returns:
        A descriptor. None where the system cannot, where a link is on the path, and where the file cannot be opened: `os.open` says why.
    """
    opener = _opener(flags)
    return None if opener is None else opener(path)


def real_path(path: str) -> str:
    """What `os.path.realpath` gives, which looks at every directory on the way: where no link is on the path the system says so by one look."""
    absolute = path if path.startswith("/") else f"{working_directory()}/{path}"
    # `link/..` is not where it stands, and two slashes in front mean something to some systems.
    if sys.platform == "linux" and ".." not in absolute.split("/") and not absolute.startswith("//"):
        descriptor = open_without_links(absolute, os.O_PATH | os.O_CLOEXEC)
        if descriptor is not None:
            close_descriptor(descriptor, absolute)
            return os.path.normpath(absolute)
    return os.path.realpath(path)


@functools.cache
def _opener(flags: int) -> Callable[[str], int | None] | None:
    """What opens files without links with these flags; None where the system cannot."""
    if sys.platform != "linux" or os.uname().machine not in _OPENAT2_MACHINES:
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "syscall", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    call.restype = ctypes.c_long
    how = ctypes.create_string_buffer(_OPEN_HOW.pack(flags, 0, _RESOLVE_NO_SYMLINKS), _OPEN_HOW.size)

    def open_file(path: str) -> int | None:
        encoded = os.fsencode(path)
        if b"\0" in encoded:
            return None  # C would see less of it
        sys.audit("open", path, None, flags)
        descriptor: int = call(_OPENAT2, _AT_FDCWD, encoded, how, _OPEN_HOW.size)
        return descriptor if descriptor >= 0 else None

    root = open_file("/")  # an old system does not know it, and who runs in a box may not be allowed to
    if root is None:
        return None
    os.close(root)
    return open_file


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


ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)
"""What the system answers where there is nothing: also where a file stands in the place of a directory."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def local_error(error: OSError, doing: str, path: str, nbytes: int | None = None) -> StorageError:
    """The error to raise from `error`.

    Args:
        error: what the system said.
        doing: what was tried, as in "cannot <doing> <path>".
        path: the file or directory.
        nbytes: how many bytes were to be written, where that is known.
    """
    amount = "" if nbytes is None else f" ({nbytes} bytes)"
    reason = error.strerror or repr(error)
    found: StorageError
    if error.errno in _FULL:
        what = "quota of this user" if error.errno == errno.EDQUOT else "file system"
        found = StorageFullError(
            f"cannot {doing} {path}{amount}: the {what} is full ({reason}). "
            "Free some space, delete old checkpoints or save elsewhere; what was committed before is intact"
        )
    elif error.errno in ABSENT:
        found = ObjectNotFoundError(
            f"cannot {doing} {path}: it is not there ({reason}). Look whether the location is right, and complete"
        )
    else:
        found = StorageError(f"cannot {doing} {path}{amount}: {reason}")
    found.errno = error.errno
    return found


def close_descriptor(descriptor: int, path: str) -> None:
    """Close an open file or directory. A network file system may report lost writes here.

    Raises:
        StorageError
    """
    try:
        os.close(descriptor)
    except OSError as error:
        raise local_error(error, "close", path) from error


def working_directory() -> str:
    """Return the working directory of this process.

    Raises:
        InvalidLocationError: it was removed.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise InvalidLocationError(
            "cannot resolve a relative path: the working directory of this process cannot be determined "
            f"({error.strerror}). "
            "Pass an absolute path, or change to another directory"
        ) from error


def sync_file(descriptor: int) -> None:
    """Make the bytes and the size of an open file durable.

    Raises:
        OSError
    """
    if sys.platform == "darwin":
        try:
            # fsync of macOS leaves the bytes in the cache of the drive.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
        os.fsync(descriptor)
    else:
        os.fdatasync(descriptor)


def sync_directory(descriptor: int) -> None:
    """Make the names in an open directory durable, as far as its file system has that notion.

    Raises:
        OSError
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems refuse this for directories: their names need no sync of their own.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
