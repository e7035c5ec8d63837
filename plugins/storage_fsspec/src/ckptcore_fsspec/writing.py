"""A writer that passes pieces to a stream in the order of their offsets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.protocols import Buffer
from ckptcore.temporary import TemporaryFile
from ckptcore_fsspec.failures import converted_errors, first_line
from ckptcore_fsspec.write_methods import Sink

logger = logger_named("ckptcore_fsspec.writing")

_MAX_BUFFERED_BYTES: Final = 32 << 20
"""Memory limit for early pieces of one writer. Further pieces go to a file."""

_COPY_BYTES: Final = 1 << 20


class InOrderWriter:
    """Writes pieces of an object to a stream in the order of their offsets. Thread-safe.

    The next piece goes to the stream at once. Early pieces are kept until their turn, in memory up
    to a limit and then in a local file. While a thread writes, others wait, so that most
    pieces are not copied.
    """

    def __init__(
        self,
        sink: Sink,
        where: str,
        size: int | None,
        converting: Callable[[str], AbstractContextManager[None]] = converted_errors,
    ) -> None:
        """Write an object.

        Args:
            sink: receives the bytes.
            where: the object, for errors.
            size: size of the object in bytes; None if unknown.
            converting: converts errors; see `converted_errors`.
        """
        self._converting = converting
        self._sink: Sink | None = sink
        self._where = where
        self._size = size
        self._lock = threading.Lock()
        self._position = 0
        self._early: dict[int, bytes | int] = {}  # by offset: the piece, or its length in the file
        self._buffered_bytes = 0
        self._file: TemporaryFile | None = None

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset.

        Raises:
            StorageError: if the stream failed.
            ValueError: outside the object's size, for a range already written, or after `finish` or
                `abort`.
        """
        stop = offset + len(data)
        if offset < 0 or (self._size is not None and stop > self._size):
            raise ValueError(f"cannot write bytes {offset} to {stop} of {self._where}: its size is {self._size}")
        with self._lock:
            if (sink := self._sink) is None:
                raise ValueError(f"cannot write to {self._where}: the writer is finished or aborted")
            if not len(data):
                return
            if offset < self._position or offset in self._early:
                raise ValueError(f"cannot write bytes {offset} to {stop} of {self._where}: they are already written")
            with self._converting(f"cannot write {self._where}"):
                if offset > self._position:
                    self._store_early(offset, data)
                    return
                sink.write(data)
                self._position = stop
                self._write_early(sink)

    def _store_early(self, offset: int, data: Buffer) -> None:
        if self._buffered_bytes + len(data) <= _MAX_BUFFERED_BYTES:
            self._early[offset] = bytes(data)
            self._buffered_bytes += len(data)
            return
        if self._file is None:
            self._file = TemporaryFile(f"of what is written out of order to {self._where}")
        self._file.write_at(offset, data)
        self._early[offset] = len(data)

    def _write_early(self, sink: Sink) -> None:
        """Write the early pieces that are next."""
        while (piece := self._early.pop(self._position, None)) is not None:
            if isinstance(piece, bytes):
                self._buffered_bytes -= len(piece)
                sink.write(piece)
                self._position += len(piece)
                continue
            assert self._file is not None
            stop = self._position + piece
            while self._position < stop:
                copied = self._file.read_at(self._position, min(_COPY_BYTES, stop - self._position))
                sink.write(copied)
                self._position += len(copied)

    def finish(self) -> None:
        """Complete the object.

        Raises:
            StorageError: if bytes are missing, or the storage failed.
            ValueError: after `finish` or `abort`.
        """
        with self._lock:
            if (sink := self._sink) is None:
                raise ValueError(f"cannot finish {self._where}: the writer is finished or aborted")
            if self._early or (self._size is not None and self._position != self._size):
                expected = max((offset for offset in self._early), default=self._size)
                raise StorageError(
                    f"cannot complete {self._where}: expected {expected} contiguous bytes, found {self._position}"
                )
            with self._converting(f"cannot complete {self._where}"):
                sink.finish()
            self._close_file()

    def abort(self) -> None:
        """Discard the written data, and do not create the object. Does nothing after `finish`."""
        with self._lock:
            sink = self._sink
            self._close_file()
        if sink is not None:
            try:
                sink.discard()
            except Exception as error:  # noqa: BLE001  # abort never raises
                logger.warning("cannot remove the written data of %s: %s", self._where, first_line(error))

    def _close_file(self) -> None:
        self._sink = None
        self._early = {}
        if self._file is not None:
            self._file.close()
            self._file = None
