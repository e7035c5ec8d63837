"""Files of a local storage that are open for reading."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from typing import Final

from ckptcore.builtin.linux_calls import open_without_links
from ckptcore.builtin.local_cold_reads import ColdReader, open_cold_reader
from ckptcore.builtin.local_errors import local_error
from ckptcore.builtin.local_links import open_inside
from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError

__all__ = ["LocalFile", "LocalFiles"]

# Without O_NONBLOCK a named pipe in a hostile checkpoint would hold the reader for ever.
_OPEN_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_IS_SOCKET: Final = (errno.ENXIO, errno.EOPNOTSUPP)  # of Linux and macOS; of a device without a driver too
_OPEN_FILES: Final = 64
_MOST_BUFFERS: Final = 1024  # IOV_MAX of Linux and macOS
_MOST_BYTES: Final = 1 << 30  # of one system call, below the 2 GiB that Linux moves at most


class LocalFile:
    """A regular file that is open for reading; closed when nobody refers to it any more."""

    __slots__ = ("_descriptor", "cold", "key", "path", "status")

    def __init__(self, key: str, path: str, root: str) -> None:
        """Open a file.

        Args:
            key: of the file, for errors.
            path: of the file, below the root.
            root: the directory of its storage.

        Raises:
            ObjectNotFoundError: there is none, or it is no regular file.
            InvalidLocationError: a symbolic link leads out of the checkpoint.
            StorageError
        """
        self._descriptor = -1
        self.cold: ColdReader | None = None
        self.key = key
        self.path = path
        try:
            descriptor = open_without_links(path, _OPEN_FILE)
            self._descriptor = open_inside(root, path, _OPEN_FILE) if descriptor is None else descriptor
            self.status = os.fstat(self._descriptor)
        except OSError as error:
            if error.errno in _IS_SOCKET:
                raise _no_file(path) from error
            raise local_error(error, "open", path) from error
        if not stat.S_ISREG(self.status.st_mode):
            raise _no_file(path)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    @property
    def descriptor(self) -> int:
        """Of the open file; it is closed with this."""
        return self._descriptor

    def read(self, start: int, stop: int | None) -> bytes:
        """Bytes `start` to `stop`; fewer where the file ends before.

        Raises:
            StorageError
        """
        end = self.status.st_size if stop is None else min(stop, self.status.st_size)
        pieces = []
        try:
            while start < end:
                piece = os.pread(self._descriptor, min(end - start, _MOST_BYTES), start)
                if not piece:
                    break
                pieces.append(piece)
                start += len(piece)
        except OSError as error:
            raise local_error(error, "read", self.path) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def map(self) -> mmap.mmap:
        """All of it, read-only, as memory that the system fills as it is touched. It stays when this is closed.

        Raises:
            StorageError: also if it is empty.
        """
        try:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
            raise local_error(reason, "map", self.path) from error

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on; ranges that follow each other are read as one.

        Raises:
            CorruptCheckpointError: the file ends before.
            StorageError
        """
        if len(ranges) == 1:
            offset, buffer = ranges[0]
            self.read_into(offset, (buffer,))
            return
        begin = stop = -1
        run: list[memoryview] = []
        for offset, buffer in ranges:
            if offset != stop:
                if run:
                    self.read_into(begin, run)
                begin, run = offset, []
            run.append(buffer)
            stop = offset + len(buffer)
        if run:
            self.read_into(begin, run)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers that follow each other from an offset on.

        Raises:
            CorruptCheckpointError: the file ends before.
            StorageError
        """
        try:
            if len(buffers) == 1 and self._read_at_once(offset, buffers[0]):
                return
            pending = _drop(list(buffers), 0)
            if self.cold is not None and self.cold.is_cold(offset, sum(map(len, pending))):
                count = self.cold.read_into(offset, pending)
                offset += count
                pending = _drop(pending, count)
            while pending:
                count = os.preadv(self._descriptor, _for_one_call(pending), offset)
                if count == 0:
                    raise self._too_short(offset, sum(map(len, pending)))
                offset += count
                pending = _drop(pending, count)
        except OSError as error:
            raise local_error(error, "read", self.path) from error

    def _read_at_once(self, offset: int, buffer: memoryview) -> bool:
        """Fill one buffer by one system call, the common case; False if that is not how it is done."""
        nbytes = len(buffer)
        if nbytes > _MOST_BYTES or (self.cold is not None and self.cold.is_cold(offset, nbytes)):
            return False
        return os.preadv(self._descriptor, (buffer,), offset) == nbytes

    def _too_short(self, offset: int, nbytes: int) -> CorruptCheckpointError:
        size = os.fstat(self._descriptor).st_size
        return CorruptCheckpointError(
            f"{self.path} is too short: expected bytes {offset} to {offset + nbytes}, found {size} bytes in all. "
            "It was cut off or replaced; restore it from a copy, or load another checkpoint",
            key=self.key,
            start=min(size, offset),
            stop=offset + nbytes,
        )


def _no_file(path: str) -> ObjectNotFoundError:
    return ObjectNotFoundError(f"cannot open {path}: expected a file, found a directory, device or socket")


def _for_one_call(buffers: list[memoryview]) -> list[memoryview]:
    """As many of the first buffers as one system call takes."""
    if len(buffers) == 1 and len(buffers[0]) <= _MOST_BYTES:
        return buffers
    chosen: list[memoryview] = []
    room = _MOST_BYTES
    for buffer in buffers[:_MOST_BUFFERS]:
        chosen.append(buffer[:room])
        room -= len(chosen[-1])
        if room == 0:
            break
    return chosen


def _drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers when their first `count` bytes are filled."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


class LocalFiles:
    """The files that were read last, kept open. Any thread.

    A file is opened anew when its path leads to another one, as after a directory was exchanged.
    """

    def __init__(self, root: str, *, direct: bool) -> None:
        """Keep files below a root; `direct` says whether cold ones may be read past the page cache."""
        self._direct = direct
        self._root = root
        self._files: dict[str, LocalFile] = {}
        self._lock = threading.Lock()

    def open(self, key: str, path: str) -> LocalFile:
        """The file that the path leads to now.

        Raises:
            ObjectNotFoundError, InvalidLocationError, StorageError: as `LocalFile`.
        """
        file = self._files.get(path)
        if file is not None:
            try:
                if os.path.samestat(os.stat(path), file.status):
                    return file
            except OSError as error:
                self.forget(path)
                raise local_error(error, "open", path) from error
        file = LocalFile(key, path, self._root)
        if self._direct:
            file.cold = open_cold_reader(path, file.status)
        with self._lock:
            self._files.pop(path, None)
            while len(self._files) >= _OPEN_FILES:
                del self._files[next(iter(self._files))]
            self._files[path] = file
        return file

    def forget(self, path: str) -> None:
        """Close a file once its readers are done."""
        with self._lock:
            self._files.pop(path, None)

    def close(self) -> None:
        """Close all of them once their readers are done."""
        with self._lock:
            self._files.clear()
