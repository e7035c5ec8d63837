"""What the operating system's errors on local files become."""

from __future__ import annotations

import errno
from typing import Final

from ckptcore.errors import ObjectNotFoundError, StorageError, StorageFullError

__all__ = ["ABSENT", "local_error"]

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
