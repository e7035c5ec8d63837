"""Methods of writing objects to a file system: as a stream, from a spool file, or with a rename."""

from __future__ import annotations

import asyncio
import posixpath
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import IO, Any, Final, Protocol, TypeVar

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]  # it has no types
from fsspec.asyn import sync  # type: ignore[import-untyped]  # it has no types
from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]  # it has no types

from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.protocols import Buffer
from ckptcore.temporary import TemporaryFile
from ckptcore_fsspec.failures import MISSING_OBJECT_ERRORS, converted_errors, first_line
from ckptcore_fsspec.file_systems import FileSystem

T = TypeVar("T")

_DELETIONS_AT_ONCE: Final = 32

_PART_BYTES: Final = 8 << 20
"""Size of one request of a stream. Object stores accept at most 10000 requests per object."""

_REMOVES_EMPTY_DIRECTORIES_ONLY: Final = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb"})
"""File systems whose `rmdir` removes only empty directories.

In some other file systems of fsspec, `rmdir` also removes the contents.
"""

_RENAME_REPLACES: Final = frozenset({"file", "local", "sftp", "ssh"})
"""File systems whose `mv` replaces a file atomically."""

_MAX_TRIES: Final = 100
"""Number of tries to create a directory, because other threads or processes may remove it while it is empty."""


class Sink(Protocol):
    """An object that is written sequentially. Not thread-safe."""

    def write(self, data: bytes | bytearray | memoryview) -> object:
        """Write the next bytes."""
        ...

    def finish(self) -> None:
        """Complete the object, and replace an existing one."""
        ...

    def discard(self) -> None:
        """Discard the written data. Can be called after a failed `finish`. May raise errors."""
        ...


class WriteMethod(Protocol):
    """Method of writing and deleting objects, for one kind of file system."""

    def put(self, path: str, data: bytes) -> None:
        """Write an object. No reader sees a part of it; without replacing renames, the old one may be missing."""
        ...

    def begin(self, path: str) -> Sink:
        """Begin to write an object."""
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, and directories that become empty if the file system has real directories."""
        ...


def write_method_of(system: FileSystem, root: str) -> WriteMethod:
    """Return the method of writing for a file system."""
    if system.async_impl:
        return _StreamedWrites(system)
    # A file system with its own `mv` has real files, and readers could see incomplete ones. Other
    # file systems put a whole object in one call.
    return _SpooledWrites(system) if type(system).mv is AbstractFileSystem.mv else _RenamedWrites(system, root)


class _StreamedWrites:
    """Writes to asynchronous object stores.

    An object does not exist before its stream is closed.
    """

    def __init__(self, system: FileSystem) -> None:
        self._system = system

    def put(self, path: str, data: bytes) -> None:
        self._system.pipe_file(path, data)

    def begin(self, path: str) -> Sink:
        return _Stream(self._system.open(path, "wb", block_size=_PART_BYTES))

    def delete(self, paths: Sequence[str]) -> None:
        system: Any = self._system

        async def delete_all() -> None:
            free = asyncio.Semaphore(_DELETIONS_AT_ONCE)

            async def delete_one(path: str) -> None:
                async with free:
                    with suppress(*MISSING_OBJECT_ERRORS):
                        await system._rm_file(path)

            await asyncio.gather(*map(delete_one, paths))

        if paths:
            sync(system.loop, delete_all)


class _Stream:
    """An fsspec file that sends each part when it is full."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file: Any = file

    def write(self, data: bytes | bytearray | memoryview) -> object:
        return self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def discard(self) -> None:
        try:
            self._file.discard()
        finally:
            # Mark the file as closed. Otherwise the garbage collector closes it, and closing sends
            # the remaining data.
            if isinstance(self._file, AbstractBufferedFile):
                self._file.closed = True


class _SpooledWrites:
    """Writes to object stores that are not asynchronous, whose streams may expose incomplete objects.

    A local file collects the data first.
    """

    def __init__(self, system: FileSystem) -> None:
        self._system = system

    def put(self, path: str, data: bytes) -> None:
        self._system.pipe_file(path, data)

    def begin(self, path: str) -> Sink:
        return _Spool(self._system, path)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(*MISSING_OBJECT_ERRORS):
                if self._system.info(path).get("type") != "directory":
                    self._system.rm_file(path)


class _Spool:
    def __init__(self, system: FileSystem, path: str) -> None:
        self._system = system
        self._path = path
        self._file = TemporaryFile(f"of {path}")

    def write(self, data: bytes | bytearray | memoryview) -> object:
        self._file.write(data)
        return len(data)

    def finish(self) -> None:
        position = 0
        # Do not use `put_file`, because it creates directories, which are never removed.
        with self._system.open(self._path, "wb") as target:
            while piece := self._file.read_at(position, _PART_BYTES):
                target.write(piece)
                position += len(piece)
        self._file.close()

    def discard(self) -> None:
        self._file.close()


class _RenamedWrites:
    """Writes to file systems with directories. Data goes to a temporary file, which is then renamed."""

    def __init__(self, system: FileSystem, root: str) -> None:
        self._system = system
        self._root = root

    def put(self, path: str, data: bytes) -> None:
        sink = self.begin(path)
        try:
            sink.write(data)
            sink.finish()
        except BaseException:
            with suppress(Exception):  # the original error is more useful
                sink.discard()
            raise

    def begin(self, path: str) -> Sink:
        directory = posixpath.dirname(path)
        part = f"{directory}/.{uuid.uuid4().hex[:16]}.part"
        file = self._in_directory(directory, lambda: self._system.open(part, "wb"))
        return _RenamedFile(self._system, file, part, path, lambda: self._prune(directory))

    def _in_directory(self, directory: str, create: Callable[[], T]) -> T:
        """Call `create`, and create its directory if it is missing."""
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                return create()
            except MISSING_OBJECT_ERRORS:
                if not tries_left:
                    raise
                with suppress(
                    FileExistsError, *MISSING_OBJECT_ERRORS
                ):  # other threads create and remove directories, too
                    self._system.makedirs(directory, exist_ok=True)
        raise AssertionError("unreachable")

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(*MISSING_OBJECT_ERRORS):
                if self._system.info(path).get("type") == "directory":
                    continue
                self._system.rm_file(path)
            self._prune(posixpath.dirname(path))

    def _prune(self, directory: str) -> None:
        """Remove a directory if it is empty, and then its empty parents."""
        if not _is_one_of(self._system, _REMOVES_EMPTY_DIRECTORIES_ONLY):
            return
        while directory.startswith(f"{self._root}/"):
            try:
                self._system.rmdir(directory)
            except MISSING_OBJECT_ERRORS:
                pass  # removed by another process
            except OSError:
                return  # not empty
            directory = posixpath.dirname(directory)


class _RenamedFile:
    def __init__(self, system: FileSystem, file: IO[bytes], part: str, path: str, prune: Callable[[], None]) -> None:
        self._system = system
        self._file = file
        self._part = part
        self._path = path
        self._prune = prune

    def write(self, data: bytes | bytearray | memoryview) -> object:
        return self._file.write(data)

    def finish(self) -> None:
        self._file.close()
        system = self._system
        if _is_one_of(system, _RENAME_REPLACES):
            system.mv(self._part, self._path)
            return
        with suppress(*MISSING_OBJECT_ERRORS):
            system.rm_file(self._path)
        system.mv(self._part, self._path)
        with suppress(*MISSING_OBJECT_ERRORS):  # WebHDFS does not report a failed rename
            system.info(self._part)
            raise FileExistsError(f"cannot rename {self._part} to {self._path}: the target exists")

    def discard(self) -> None:
        try:
            self._file.close()
        finally:
            with suppress(*MISSING_OBJECT_ERRORS):
                self._system.rm_file(self._part)
            self._prune()


def _is_one_of(system: FileSystem, protocols: frozenset[str]) -> bool:
    own = system.protocol
    return not protocols.isdisjoint((own,) if isinstance(own, str) else own)


logger = logger_named("ckptcore_fsspec.writing")

_MAX_BUFFERED_BYTES: Final = 32 << 20
"""Memory limit for early pieces of one writer. Further pieces go to a file."""

_COPY_BYTES: Final = 1 << 20


class InOrderWriter:
    """Writes pieces of an object to a stream in the order of their offsets. Thread-safe.

    The next piece goes to the stream immediately. Pieces that arrive too early are kept in memory up to
    a limit, and then in a local file. While one thread writes, other threads wait, so that most
    pieces need not be copied.
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
            ValueError: if the range is outside the object's size or was already written, or after
                `finish` or `abort`.
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
        """Write early pieces, as long as the next piece is among them."""
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
