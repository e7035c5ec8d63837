"""Pieces in any order, in the order of the bytes."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from typing import IO, Final

from ckptcore.errors import StorageError
from ckptcore.protocols import Buffer
from ckptcore_fsspec.failures import first_line, telling
from ckptcore_fsspec.places import Sink

__all__ = ["InOrderWriter"]

logger = logging.getLogger("ckptcore_fsspec.writing")

_HELD_BYTES: Final = 32 << 20
"""Bytes of pieces that came before their turn which one writer keeps in memory; more go to a file."""

_COPIED_BYTES: Final = 1 << 20


class InOrderWriter:
    """Gives a stream the pieces of an object in the order of its bytes. Any thread.

    A piece whose turn it is goes to the stream at once; one that came early is kept until then, in memory up to a bound and
    beyond that in a file on this machine. Who writes while another thread does waits: the pieces of waiting threads are theirs.
    """

    def __init__(self, sink: Sink, where: str, size: int | None) -> None:
        """Write an object.

        Args:
            sink: takes its bytes.
            where: the object, for errors.
            size: of the object in bytes, where it is known.
        """
        self._sink: Sink | None = sink
        self._where = where
        self._size = size
        self._lock = threading.Lock()
        self._position = 0
        self._early: dict[int, bytes | int] = {}  # by offset: the piece, or how long it is in the file
        self._held = 0
        self._file: IO[bytes] | None = None

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset.

        Raises:
            StorageError: the stream failed.
            ValueError: outside the object's size, where something is written already, or after `finish` or `abort`.
        """
        stop = offset + len(data)
        if offset < 0 or (self._size is not None and stop > self._size):
            raise ValueError(f"cannot write bytes {offset} to {stop} of {self._where}: it has {self._size}")
        with self._lock:
            if (sink := self._sink) is None:
                raise ValueError(f"{self._where} is complete or given up; nothing more can be written")
            if not len(data):
                return
            if offset < self._position or offset in self._early:
                raise ValueError(f"bytes {offset} to {stop} of {self._where} are written already")
            with telling(f"cannot write {self._where}"):
                if offset > self._position:
                    self._keep(offset, data)
                    return
                sink.write(data)
                self._position = stop
                self._write_kept(sink)

    def _keep(self, offset: int, data: Buffer) -> None:
        if self._held + len(data) <= _HELD_BYTES:
            self._early[offset] = bytes(data)
            self._held += len(data)
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="ckptcore-")  # noqa: SIM115  # it is closed with the writer
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), memoryview(data)[written:], offset + written)
        self._early[offset] = len(data)

    def _write_kept(self, sink: Sink) -> None:
        """Write the pieces whose turn has come."""
        while (piece := self._early.pop(self._position, None)) is not None:
            if isinstance(piece, bytes):
                self._held -= len(piece)
                sink.write(piece)
                self._position += len(piece)
                continue
            assert self._file is not None
            stop = self._position + piece
            while self._position < stop:
                copied = os.pread(self._file.fileno(), min(_COPIED_BYTES, stop - self._position), self._position)
                sink.write(copied)
                self._position += len(copied)

    def finish(self) -> None:
        """Make the object.

        Raises:
            StorageError: bytes are missing, or the storage failed.
            ValueError: after `finish` or `abort`.
        """
        with self._lock:
            if (sink := self._sink) is None:
                raise ValueError(f"{self._where} is complete or given up already")
            if self._early or (self._size is not None and self._position != self._size):
                expected = max((offset for offset in self._early), default=self._size)
                raise StorageError(
                    f"cannot complete {self._where}: expected {expected} bytes in a row, found {self._position} written"
                )
            with telling(f"cannot complete {self._where}"):
                sink.finish()
            self._forget()

    def abort(self) -> None:
        """Give up; nothing is there of what was written, or what is cannot be taken for an object."""
        with self._lock:
            sink = self._sink
            self._forget()
        if sink is not None:
            try:
                sink.discard()
            except Exception as error:  # noqa: BLE001  # giving up never raises
                logger.warning("what was written of %s may still take room: %s", self._where, first_line(error))

    def _forget(self) -> None:
        self._sink = None
        self._early = {}
        if self._file is not None:
            self._file.close()
            self._file = None
