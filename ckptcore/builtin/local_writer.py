"""A local file that is written in pieces."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Final

from ckptcore.builtin.local_calls import local_error, start_writeback, sync_file
from ckptcore.builtin.local_directories import LocalDirectories
from ckptcore.errors import StorageError
from ckptcore.protocols import Buffer

__all__ = ["LocalWriter"]

_WRITEBACK_BYTES: Final = 4 << 20


class LocalWriter:
    """Writes a new file. Any thread."""

    def __init__(
        self, path: str, descriptor: int, size: int | None, directories: LocalDirectories, *, durable: bool
    ) -> None:
        """Take over an empty file that is open for writing.

        Args:
            path: where it is.
            descriptor: the open file.
            size: the bytes it will have, if known.
            directories: those of the storage it is in.
            durable: whether it must survive a loss of power once it is complete.
        """
        self._path = path
        self._descriptor = descriptor
        self._size = size
        self._directories = directories
        self._durable = durable
        self._written = 0
        self._dirty_bytes = 0
        self._dirty_start = sys.maxsize
        self._dirty_stop = 0
        self._complete = False
        self._status = os.fstat(descriptor)
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        # Identifiers of the threads that write. A thread that was interrupted may leave its own here, and then aborts.
        self._writing: set[int] = set()

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset.

        Raises:
            ValueError: outside the file's size, or after `finish` or `abort`.
            StorageFullError, StorageError
        """
        nbytes = len(data)
        if offset < 0 or (self._size is not None and offset + nbytes > self._size):
            raise ValueError(f"cannot write bytes {offset} to {offset + nbytes} of {self._path}: it has {self._size}")
        thread = threading.get_ident()
        try:
            with self._lock:
                self._expect_open()
                self._writing.add(thread)
            self._write(offset, data)
            self._count(offset, nbytes)
        except OSError as error:
            raise local_error(error, "write", self._path, nbytes) from error
        finally:
            with self._lock:
                self._writing.discard(thread)
                self._state.notify_all()

    def _write(self, offset: int, data: Buffer) -> None:
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._descriptor, rest, offset)
            offset += count
            rest = rest[count:]

    def _count(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes
            if not self._durable:
                return
            # The disk works while more is copied, so that less is left to wait for at the end.
            self._dirty_bytes += nbytes
            self._dirty_start = min(self._dirty_start, offset)
            self._dirty_stop = max(self._dirty_stop, offset + nbytes)
            if self._dirty_bytes < _WRITEBACK_BYTES:
                return
            start, stop = self._dirty_start, self._dirty_stop
            self._dirty_bytes, self._dirty_start, self._dirty_stop = 0, sys.maxsize, 0
        start_writeback(self._descriptor, start, stop - start)

    def finish(self) -> None:
        """Complete the file.

        Raises:
            StorageError: bytes are missing, or it could not be made durable.
            ValueError: after `finish` or `abort`.
        """
        with self._lock:
            self._expect_open()
            self._wait_for_writes()
            self._expect_open()
            if self._size is not None and self._written != self._size:
                raise StorageError(
                    f"cannot complete {self._path}: expected {self._size} bytes to be written, found {self._written}"
                )
            try:
                if self._durable:
                    sync_file(self._descriptor)
                self._close()
            except OSError as error:
                raise local_error(error, "make durable", self._path, self._written) from error
        if self._durable:
            self._directories.make_durable(os.path.dirname(self._path))
        self._complete = True

    def abort(self) -> None:
        """Remove the file, once no thread writes to it; nothing after a `finish` that succeeded."""
        with self._lock:
            self._wait_for_writes()
            # What cannot be removed is found again with the directory it is in; an abort follows an error that says more.
            with suppress(OSError):
                self._close()
            if not self._complete:
                with suppress(OSError):
                    if os.path.samestat(os.lstat(self._path), self._status):
                        os.unlink(self._path)
                        self._directories.remove_empty(os.path.dirname(self._path))

    def _wait_for_writes(self) -> None:
        self._writing.discard(threading.get_ident())
        self._state.wait_for(lambda: not self._writing)

    def _expect_open(self) -> None:
        if self._descriptor < 0:
            raise ValueError(f"{self._path} is complete or given up; nothing more can be written")

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
