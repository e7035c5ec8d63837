"""Errors of file systems, as those of ckptcore."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ckptcore.errors import (
    CheckpointError,
    ObjectNotFoundError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
)
from ckptcore.redaction import chainable, redacted

__all__ = ["NOT_THERE", "failure", "first_line", "telling"]

NOT_THERE: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What file systems raise where there is no such object."""

_LONGEST: Final = 300
"""Characters of an error that are told."""

_STATUS_NAMES: Final = ("status", "status_code", "code")
"""Where errors of aiohttp, Azure, httpx, requests and gcsfs keep the status of an answer."""


def first_line(error: BaseException) -> str:
    """An error in one line: its type, and the beginning of what it says."""
    text = redacted(" ".join(str(error).split()))  # before it is cut, which could end a URL in its password
    return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Raise errors of a file system as those of ckptcore; its own pass.

    Args:
        what: what is done, and where: ``cannot read ...``.

    Raises:
        StorageError
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  # it is raised again, as one of ours
        raise failure(error, what) from chainable(error)


def failure(error: BaseException, what: str) -> StorageError:
    """The error of ckptcore for one of a file system.

    Args:
        error: of fsspec, or of what a file system is made with; they agree on builtin errors and the status of answers only.
        what: what was done, and where: ``cannot read ...``.
    """
    found = first_line(error)
    status = _status(error)
    if isinstance(error, NOT_THERE) or status in (404, 410):
        return ObjectNotFoundError(f"{what}: there is no such object ({found})")
    if status == 401 or type(error).__name__ in (
        "NoCredentialsError",
        "DefaultCredentialsError",
        "ClientAuthenticationError",
    ):
        return StorageCredentialsError(f"{what}: {found}; give credentials as this storage expects them, or new ones")
    if isinstance(error, PermissionError) or status == 403:
        return StoragePermissionError(f"{what}: {found}; give credentials that allow it, or have it allowed")
    if status in (429, 503):
        return StorageThrottledError(f"{what}: {found}; let fewer processes use the storage at once, and try again")
    if isinstance(error, TimeoutError) or status in (408, 504):
        return StorageTimeoutError(f"{what}: {found}; look whether the storage can be reached, and try again")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{what}: {found}; make room, or save elsewhere")
    return StorageError(f"{what}: {found}")


def _status(error: BaseException) -> int | None:
    """The status of the answer that an error is about."""
    for holder in (error, getattr(error, "response", None)):
        for name in _STATUS_NAMES:
            value = getattr(holder, name, None)
            if type(value) is int:
                return value
    return None
