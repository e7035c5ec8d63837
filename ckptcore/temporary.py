"""Temporary files and directories, with errors that name the directory and say what to do.

For plugins that need an intermediate file, for example because a server sends an object only as a whole.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from typing import IO

from ckptcore.errors import StorageError, StorageFullError, converts_errors
from ckptcore.protocols import Buffer

__all__ = ["TemporaryFile", "temporary_directory"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


class TemporaryFile:
    """An unnamed temporary file, which is deleted when it is closed. Not thread-safe."""

    def __init__(self, purpose: str) -> None:
        """Create the file.

        Args:
            purpose: the source of the copy, for errors, such as "of s3://bucket/a".

        Raises:
            StorageError: there is no temporary directory, or it cannot be written to.
        """
        self._purpose = purpose
        with _converted_errors(purpose):
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="ckptcore-", buffering=0)  # noqa: SIM115  # `close`
        self._end = 0

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file.fileno()

    def write(self, data: Buffer) -> None:
        """Write bytes after the bytes of the last `write`.

        Raises:
            StorageFullError: the temporary directory is full.
            StorageError: it cannot be written to.
        """
        self.write_at(self._end, data)
        self._end += len(data)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset. See `write`."""
        written = 0
        with _converted_errors(self._purpose):
            while written < len(data):
                written += os.pwrite(self._file.fileno(), memoryview(data)[written:], offset + written)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read bytes at an offset. Returns fewer bytes at the end of the file."""
        return os.pread(self._file.fileno(), nbytes, offset)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


@converts_errors
def temporary_directory(purpose: str) -> Iterator[str]:
    """Create a temporary directory, and remove it at the end.

    Raises:
        StorageError: as for `TemporaryFile`.
        StorageFullError: the body failed because the directory is full.
    """
    with _converted_errors(purpose):
        directory = tempfile.TemporaryDirectory(prefix="ckptcore-")
    with directory as name:
        try:
            yield name
        except OSError as error:
            if isinstance(error, StorageError) or error.errno not in _FULL:
                raise
            raise _error_of(error, purpose) from error


@converts_errors
def _converted_errors(purpose: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _error_of(error, purpose) from error


def _error_of(error: OSError, purpose: str) -> StorageError:
    # Without a usable directory, the message lists the directories that were tried.
    where = f" in {tempfile.tempdir}" if tempfile.tempdir else ""
    is_full = error.errno in _FULL
    kind = StorageFullError if is_full else StorageError
    return kind(
        error.errno or errno.EIO,
        f"cannot make a temporary copy {purpose}{where}: {error.strerror or error}; set TMPDIR to a directory of a "
        f"local disk {'with more space' if is_full else 'that can be written to'}",
    )
