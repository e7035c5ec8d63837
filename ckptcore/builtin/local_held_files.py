"""Local files that are held open for many small reads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from ckptcore.builtin.linux_calls import is_of_this_machine
from ckptcore.builtin.local_errors import local_error
from ckptcore.builtin.local_files import LocalFile
from ckptcore.errors import StorageError

__all__ = ["HeldFile"]

_TICK_NANOSECONDS: Final = 2_000_000_000
"""Changes of a file that follow each other this fast may leave it with the same times: FAT counts in two seconds, others in
milliseconds."""


class HeldFile:
    """A local file of which parts are read many times, through the page cache. Any thread; closed when nobody refers to it any more."""

    __slots__ = ("_descriptor", "_file", "_settled")

    def __init__(self, file: LocalFile) -> None:
        """Read from a file that is open."""
        self._file = file
        self._descriptor = file.descriptor
        # The last stamp that was told: while the file has this one, it need not be compared with the clock again.
        self._settled: tuple[int, int] = (-1, -1)

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on.

        Raises:
            CorruptCheckpointError: the file ends before.
            StorageError
        """
        for offset, buffer in ranges:
            try:
                count = os.preadv(self._descriptor, (buffer,), offset)
            except OSError as error:
                raise local_error(error, "read", self._file.path) from error
            if count != len(buffer):
                self._file.read_into(offset + count, (buffer[count:],))

    def stamp(self) -> tuple[int, int] | None:
        """When the file was changed last, and its bytes; None while that is so short ago that another change may not show.

        The time of change of the inode (``ctime``) cannot be set, other than that of the contents.

        Raises:
            StorageError
        """
        try:
            status = os.fstat(self._descriptor)  # not by a function of its own: it is asked for with each slice
        except OSError as error:
            raise local_error(error, "look at", self._file.path) from error
        found = (status.st_ctime_ns, status.st_size)
        if found == self._settled:
            return found
        if time.time_ns() - found[0] <= _TICK_NANOSECONDS:
            return None
        self._settled = found
        return found

    def size(self) -> int:
        """Bytes that it has now.

        Raises:
            StorageError
        """
        try:
            # A third of the time of fstat; the position in the file is nobody's.
            return os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            raise local_error(error, "look at", self._file.path) from error

    def memory(self) -> memoryview | None:
        """The file mapped; None where it is empty, cannot be mapped, or is not known to be on this machine.

        A server takes pages away when it deletes a file or is gone, and a process that touches them is killed; a read gives an error.
        """
        try:
            return memoryview(self._file.map()) if is_of_this_machine(self._descriptor) else None
        except (OSError, StorageError):
            return None  # memory that may be addressed is bounded: all of it can be read as well
