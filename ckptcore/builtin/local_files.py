"""Reads of local files: buffered, direct, and of cached open files.

A buffered read of data that is not in the page cache allocates pages, copies the data, and evicts other pages. To avoid
this, a file is divided into windows, and before a large read the reader probes one page of the window without waiting.
If this page is not in memory, the window is called cold, and the reader uses O_DIRECT. Both ways return the same bytes;
a wrong guess only costs time.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from ckptcore.builtin.local_calls import (
    OPEN_TO_READ,
    RECENT_FILES,
    close_in_children,
    local_error,
    open_inside,
    open_without_links,
    retry_stale,
)
from ckptcore.builtin.local_mounts import is_local_file_system
from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from ckptcore.model.arrays import HostArray

T = TypeVar("T")

_IS_SOCKET: Final = (errno.ENXIO, errno.EOPNOTSUPP)  # Linux and macOS; also for a device without a driver
_MAX_BUFFERS: Final = 1024  # IOV_MAX of Linux and macOS
_MAX_BYTES: Final = 1 << 30  # for one system call; Linux limits it to 2 GiB


class LocalFile:
    """A regular file that is open for reading. It is closed with the last reference."""

    __slots__ = ("_descriptor", "_root", "cold", "key", "path", "status")

    def __init__(self, key: str, path: str, root: str) -> None:
        """Open a file.

        Args:
            key: the key of the file, for errors.
            path: the path of the file, below the root.
            root: the directory of its storage.

        Raises:
            ObjectNotFoundError: the file does not exist, or is not a regular file.
            InvalidLocationError: a symbolic link leads out of the checkpoint.
            StorageError
        """
        self._descriptor = -1
        self.cold: ColdReader | None = None
        self.key = key
        self.path = path
        self._root = root
        try:
            self._descriptor = retry_stale(functools.partial(_open, root, path))
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
        """The descriptor; closed with this object."""
        return self._descriptor

    def read(self, start: int, stop: int | None) -> bytes:
        """Return bytes `start` to `stop`; fewer if the file ends earlier.

        Raises:
            StorageError
        """
        end = self.status.st_size if stop is None else min(stop, self.status.st_size)
        pieces = []
        try:
            while start < end:
                piece = self._fresh(functools.partial(os.pread, self._descriptor, min(end - start, _MAX_BYTES), start))
                if not piece:
                    break
                pieces.append(piece)
                start += len(piece)
        except OSError as error:
            raise local_error(error, "read", self.path) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def map(self) -> mmap.mmap:
        """Map the whole file, read-only. The mapping remains valid when this object is closed.

        Raises:
            StorageError: also if the file is empty.
        """
        try:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
            raise local_error(reason, "map", self.path) from error

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset. Adjacent ranges are read together.

        Raises:
            CorruptCheckpointError: the file ends too early.
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
        """Fill several buffers, one after the other, with the bytes from an offset.

        Raises:
            CorruptCheckpointError: the file ends too early.
            StorageError
        """
        try:
            if len(buffers) == 1 and self._read_at_once(offset, buffers[0]):
                return
            pending = _drop(list(buffers), 0)
            if self.cold is not None:
                count = self._read_cold(self.cold, offset, pending)
                offset += count
                pending = _drop(pending, count)
            while pending:
                count = self._fresh(functools.partial(os.preadv, self._descriptor, _for_one_call(pending), offset))
                if count == 0:
                    raise self._too_short(offset, sum(map(len, pending)))
                offset += count
                pending = _drop(pending, count)
        except OSError as error:
            raise local_error(error, "read", self.path) from error

    def _read_at_once(self, offset: int, buffer: memoryview) -> bool:
        """Try to fill one buffer by one buffered system call, the common case. Return False if it is not filled."""
        nbytes = len(buffer)
        try:
            if nbytes > _MAX_BYTES or (self.cold is not None and self.cold.is_cold(offset, nbytes)):
                return False
            return os.preadv(self._descriptor, (buffer,), offset) == nbytes
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False  # `read_into` opens the file again

    def _read_cold(self, cold: ColdReader, offset: int, pending: list[memoryview]) -> int:
        """Read with direct I/O if that is probably faster. Return the bytes read."""
        try:
            return cold.read_into(offset, pending) if cold.is_cold(offset, sum(map(len, pending))) else 0
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self.cold = None  # the file server has forgotten the descriptors for direct I/O too
            return 0

    def _fresh(self, read: Callable[[], T]) -> T:
        """Read. If the file server has forgotten the open file, open it again by its path, and read again.

        Raises:
            OSError: also if another file has the path now.
        """
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            again = retry_stale(functools.partial(_open, self._root, self.path))
            try:
                status, known = os.fstat(again), self.status
                if not os.path.samestat(status, known) or status.st_mtime_ns != known.st_mtime_ns:
                    raise
                os.dup2(again, self._descriptor, inheritable=False)  # same number, because other threads use it
            finally:
                os.close(again)
        return read()

    def _too_short(self, offset: int, nbytes: int) -> CorruptCheckpointError:
        size = os.fstat(self._descriptor).st_size
        return CorruptCheckpointError(
            f"{self.path} is too short: expected bytes {offset} to {offset + nbytes}, found {size} bytes in all. "
            "It was cut off or replaced; restore it from a copy, or load another checkpoint",
            key=self.key,
            start=min(size, offset),
            stop=offset + nbytes,
        )


def _open(root: str, path: str) -> int:
    descriptor = open_without_links(path, OPEN_TO_READ)
    return open_inside(root, path, OPEN_TO_READ) if descriptor is None else descriptor


def _no_file(path: str) -> ObjectNotFoundError:
    return ObjectNotFoundError(f"cannot open {path}: expected a file, found a directory, device or socket")


def _for_one_call(buffers: list[memoryview]) -> list[memoryview]:
    """Return as many of the first buffers as one system call takes."""
    if len(buffers) == 1 and len(buffers[0]) <= _MAX_BYTES:
        return buffers
    chosen: list[memoryview] = []
    room = _MAX_BYTES
    for buffer in buffers[:_MAX_BUFFERS]:
        chosen.append(buffer[:room])
        room -= len(chosen[-1])
        if room == 0:
            break
    return chosen


def _drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the unfilled rest of buffers whose first `count` bytes are filled."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


class LocalFiles:
    """The files that were opened last, kept open for further reads. Thread-safe.

    A file is opened again if its path leads to another file, as after an exchange of directories.
    """

    def __init__(self, root: str, *, direct: bool) -> None:
        """Cache files below a root. `direct` allows direct I/O for cold files."""
        self._direct = direct
        self._root = root
        self.forget()
        close_in_children(self)

    def forget(self) -> None:
        """Start without open files, as a forked child must: they would keep the space of deleted files."""
        self._files: dict[str, LocalFile] = {}
        self._lock = threading.Lock()

    def open(self, key: str, path: str) -> LocalFile:
        """Return the file that the path leads to now.

        Raises:
            ObjectNotFoundError, InvalidLocationError, StorageError: as `LocalFile`.
        """
        file = self._files.get(path)
        if file is not None:
            try:
                if os.path.samestat(retry_stale(functools.partial(os.stat, path)), file.status):
                    return file
            except OSError as error:
                self.close_file(path)
                raise local_error(error, "open", path) from error
        file = LocalFile(key, path, self._root)
        if self._direct:
            file.cold = open_cold_reader(path, file.status)
        with self._lock:
            self._files[path] = file
        RECENT_FILES.add(self, path)
        return file

    def close_file(self, path: str) -> None:
        """Close a file once its readers are done."""
        with self._lock:
            self._files.pop(path, None)

    def close(self) -> None:
        """Close all files once their readers are done."""
        with self._lock:
            self._files.clear()


_TICK_NANOSECONDS: Final = 2_000_000_000
"""Two changes within this time may have equal timestamps: FAT has a resolution of 2 s, others have milliseconds."""


class StampedFile:
    """A local file for many small reads through the page cache. Thread-safe. Closed with the last reference."""

    __slots__ = ("_descriptor", "_file", "_settled")

    def __init__(self, file: LocalFile) -> None:
        """Read from an open file."""
        self._file = file
        self._descriptor = file.descriptor
        # The last returned stamp. While the file has this stamp, no comparison with the clock is needed.
        self._settled: tuple[int, int] = (-1, -1)

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset.

        Raises:
            CorruptCheckpointError: the file ends too early.
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
        """Return the change time and the size of the file; None if a new change could still get the same change time.

        Uses the change time of the inode (``ctime``), which programs cannot set, unlike the modification time.

        Raises:
            StorageError
        """
        try:
            status = os.fstat(self._descriptor)  # inline, because this is called for each slice
        except OSError as error:
            raise local_error(error, "read the status of", self._file.path) from error
        stamp = (status.st_ctime_ns, status.st_size)
        if stamp == self._settled:
            return stamp
        if time.time_ns() - stamp[0] <= _TICK_NANOSECONDS:
            return None
        self._settled = stamp
        return stamp

    def size(self) -> int:
        """Return the current size of the file in bytes.

        Raises:
            StorageError
        """
        try:
            # Takes a third of the time of fstat. Nothing else uses the position in the file.
            return os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            raise local_error(error, "read the size of", self._file.path) from error

    def memory(self) -> memoryview | None:
        """Map the file; None if it is empty, cannot be mapped, or may be on another machine.

        If a server deletes a file or fails, touching the mapped pages kills the process. A read only raises an error.
        """
        try:
            return memoryview(self._file.map()) if is_local_file_system(self._descriptor) else None
        except (OSError, StorageError):
            return None  # the address space may be limited; the file can still be read


_PAGE_BYTES: Final = 4096  # an alignment of addresses, offsets and lengths that every disk accepts
_SECTOR_BYTES: Final = 512
_WINDOW_BYTES: Final = 8 << 20
_BOUNCE_BYTES: Final = 4 << 20
_GUESS_SECONDS: Final = 1.0  # time after which a window is probed again
_LEAST_BYTES: Final = 256 << 10  # smallest read for which direct I/O without readahead is worth it

_REFUSALS: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES})
"""Error numbers of a probe or a direct read that the system, the file system or the disk does not support."""

_memory: Final = threading.local()
"""The aligned memory of each thread, freed when the thread ends."""


def open_cold_reader(path: str, status: os.stat_result) -> ColdReader | None:
    """Open a file for direct I/O; None if the system, the file system or the size do not allow it.

    Args:
        path: the file.
        status: the status of the expected file, because the path may lead to another file now.
    """
    if sys.platform != "linux" or status.st_size < _LEAST_BYTES:
        return None
    descriptors: list[int] = []
    try:
        for flags in (0, os.O_DIRECT):  # the first descriptor probes the page cache, the second reads from the disk
            descriptors.append(os.open(path, OPEN_TO_READ | flags))
            if not os.path.samestat(os.fstat(descriptors[-1]), status):
                raise OSError(errno.EINVAL, "the file was replaced", path)
        # A probe of one page must not start readahead.
        os.posix_fadvise(descriptors[0], 0, 0, os.POSIX_FADV_RANDOM)
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if not isinstance(error, OSError):
            raise
        return None  # fall back to buffered reads
    return ColdReader(descriptors[0], descriptors[1], status.st_size)


class ColdReader:
    """Reads cold parts of a file with direct I/O. Thread-safe. The file is closed with the last reference."""

    def __init__(self, probe: int, direct: int, size: int) -> None:
        self._probe = probe
        self._direct = direct
        self._size = size
        self._guesses: dict[int, tuple[bool, float]] = {}
        self._usable = True
        self._address_bytes = 4

    def __del__(self) -> None:
        os.close(self._probe)
        os.close(self._direct)

    def is_cold(self, offset: int, nbytes: int) -> bool:
        """Return True if `read_into` is probably faster than a buffered read."""
        if nbytes < _LEAST_BYTES or not self._usable:
            return False
        window = offset // _WINDOW_BYTES
        now = time.monotonic()
        guess = self._guesses.get(window)
        if guess is None or now - guess[1] > _GUESS_SECONDS:
            self._guesses[window] = guess = (self._probe_window(window * _WINDOW_BYTES), now)
        return guess[0]

    def _probe_window(self, start: int) -> bool:
        """Return True if a random page of a window is not in memory. A fixed page may be there after another probe."""
        pages = max(1, min(_WINDOW_BYTES, self._size - start) // _PAGE_BYTES)
        number = int.from_bytes(os.urandom(4), "little") % pages
        try:
            os.preadv(self._probe, [bytearray(_PAGE_BYTES)], start + number * _PAGE_BYTES, os.RWF_NOWAIT)
        except BlockingIOError:
            return True  # RWF_NOWAIT: the read would have to wait for the disk
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._usable = False
        return False

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with contiguous bytes from an offset, with direct I/O. Return the number of bytes read.

        The number is smaller than requested at the end of the file, or if the disk refuses such reads. The caller then
        reads the rest through the page cache.

        Raises:
            OSError
        """
        if len(buffers) == 1 and (offset | len(buffers[0])) % _PAGE_BYTES == 0:
            done = self._read_in_place(offset, buffers[0])
            if done >= 0:
                return done
        bounce = _bounce()
        whole = np.frombuffer(bounce, np.uint8)
        done = 0
        skip = offset % _PAGE_BYTES
        pending = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        total = sum(map(len, pending))
        while done < total:
            wanted = min(_BOUNCE_BYTES, skip + total - done)
            aligned = -(-wanted // _PAGE_BYTES) * _PAGE_BYTES
            count = min(self._read(bounce[:aligned], offset + done - skip), wanted) - skip
            if count <= 0:
                break
            _spread(whole[skip : skip + count], pending)
            done += count
            # After a short read the position is within a page, where a direct read cannot continue.
            if (offset + done) % _PAGE_BYTES and done < total:
                break
            skip = 0
        return done

    def _read_in_place(self, offset: int, buffer: memoryview) -> int:
        """Read directly into a buffer. Return the bytes read; -1 if the disk needs another alignment of the address."""
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        if address % self._address_bytes:
            return -1
        try:
            return os.preadv(self._direct, [buffer], offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
        # The required alignment is found by trial: first 4 bytes (NVMe), then 512 bytes (other disks), then a page.
        self._address_bytes = _SECTOR_BYTES if address % _SECTOR_BYTES else _PAGE_BYTES
        return -1

    def _read(self, target: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._direct, [target], offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._usable = False
            return -1


def _bounce() -> memoryview:
    memory: memoryview | None = getattr(_memory, "bounce", None)
    if memory is None:
        pages = mmap.mmap(-1, _BOUNCE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = _memory.bounce = memoryview(pages)
    return memory


def _spread(source: HostArray, targets: list[HostArray]) -> None:
    """Copy bytes into arrays, in order. Remove filled arrays from the list, and cut off the filled part of the next."""
    while len(source):
        target = targets[0]
        count = min(len(source), len(target))
        # NumPy releases the interpreter lock while it copies.
        np.copyto(target[:count], source[:count])
        source = source[count:]
        if count == len(target):
            del targets[0]
        else:
            targets[0] = target[count:]
