"""What the operating system's errors on local files become."""

from __future__ import annotations

import errno
import os
from typing import Final

from ckptcore.errors import InvalidLocationError, ObjectNotFoundError, StorageError, StorageFullError

__all__ = ["ABSENT", "close_descriptor", "local_error", "working_directory"]

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
