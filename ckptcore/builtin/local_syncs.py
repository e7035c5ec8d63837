"""Making open files and directories survive a loss of power."""

from __future__ import annotations

import errno
import fcntl
import os
import sys

__all__ = ["sync_directory", "sync_file"]


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
