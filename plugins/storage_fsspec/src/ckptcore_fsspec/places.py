"""How a file system is given an object: streamed, spooled, or renamed."""

from __future__ import annotations

import asyncio
import posixpath
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, Final, Protocol, TypeVar

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]  # it has no types
from fsspec.asyn import sync  # type: ignore[import-untyped]  # it has no types
from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]  # it has no types

from ckptcore_fsspec.failures import NOT_THERE
from ckptcore_fsspec.file_systems import FileSystem

__all__ = ["Places", "Sink", "places_of"]

T = TypeVar("T")

_DELETIONS_AT_ONCE: Final = 32

_PART_BYTES: Final = 8 << 20
"""What one request of a stream carries; an object store takes 10000 of them."""

_REFUSE_TO_REMOVE_MORE: Final = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb"})
"""File systems whose `rmdir` removes an empty directory and no other; some of fsspec's remove all that is in it."""

_REPLACE_BY_RENAMING: Final = frozenset({"file", "local", "sftp", "ssh"})
"""File systems whose `mv` puts a file in the place of another in one step."""

_TRIES: Final = 100
"""How often a directory is made again that vanishes before anything stands in it."""


class Sink(Protocol):
    """An object that is written from its first byte to its last. One thread at a time."""

    def write(self, data: bytes | bytearray | memoryview) -> object:
        """Take the next bytes."""
        ...

    def finish(self) -> None:
        """Make the object, in the place of what is there."""
        ...

    def discard(self) -> None:
        """Forget what was written. May raise; may follow a failed `finish`."""
        ...


class Places(Protocol):
    """Where objects of one kind of file system come and go."""

    def put(self, path: str, data: bytes) -> None:
        """Write an object whole or not at all."""
        ...

    def begin(self, path: str) -> Sink:
        """Begin an object."""
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, and directories that become empty."""
        ...


def places_of(system: FileSystem, root: str) -> Places:
    """How objects come to be in a file system, below a directory of it."""
    if system.async_impl:
        return _StreamedPlaces(system)
    # Who renames has files, that can be seen half written; others put objects whole, from what they get in one call.
    return _SpooledPlaces(system) if type(system).mv is AbstractFileSystem.mv else _RenamedPlaces(system, root)


class _StreamedPlaces:
    """Of object stores whose file systems are asynchronous: nothing is there before a stream is closed."""

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
                    with suppress(*NOT_THERE):
                        await system._rm_file(path)

            await asyncio.gather(*map(delete_one, paths))

        if paths:
            sync(system.loop, delete_all)


class _Stream:
    """A file of fsspec that sends parts as they are full."""

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
            # It would send the rest when it is collected.
            if isinstance(self._file, AbstractBufferedFile):
                self._file.closed = True


class _SpooledPlaces:
    """Of other object stores, whose streams may show what is half written: a file on this machine holds it until it is whole."""

    def __init__(self, system: FileSystem) -> None:
        self._system = system

    def put(self, path: str, data: bytes) -> None:
        self._system.pipe_file(path, data)

    def begin(self, path: str) -> Sink:
        return _Spool(self._system, path)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(*NOT_THERE):
                if self._system.info(path).get("type") != "directory":
                    self._system.rm_file(path)


class _Spool:
    def __init__(self, system: FileSystem, path: str) -> None:
        self._system = system
        self._path = path
        self._file = tempfile.TemporaryFile(prefix="ckptcore-")  # noqa: SIM115  # it is closed with the object

    def write(self, data: bytes | bytearray | memoryview) -> object:
        return self._file.write(data)

    def finish(self) -> None:
        self._file.seek(0)
        # Not by `put_file`, which makes directories that nothing removes.
        with self._system.open(self._path, "wb") as target:
            shutil.copyfileobj(self._file, target, _PART_BYTES)
        self._file.close()

    def discard(self) -> None:
        self._file.close()


class _RenamedPlaces:
    """Of file systems with files and directories: an object is written beside its place, and renamed."""

    def __init__(self, system: FileSystem, root: str) -> None:
        self._system = system
        self._root = root

    def put(self, path: str, data: bytes) -> None:
        sink = self.begin(path)
        try:
            sink.write(data)
            sink.finish()
        except BaseException:
            with suppress(Exception):  # the error that is raised says more
                sink.discard()
            raise

    def begin(self, path: str) -> Sink:
        directory = posixpath.dirname(path)
        part = f"{directory}/.{uuid.uuid4().hex[:16]}.part"
        file = self._in_directory(directory, lambda: self._system.open(part, "wb"))
        return _Part(self._system, file, part, path, lambda: self._prune(directory))

    def _in_directory(self, directory: str, create: Callable[[], T]) -> T:
        """What `create` returns; the directory is made where there is none."""
        for tries_left in reversed(range(_TRIES)):
            try:
                return create()
            except NOT_THERE:
                if not tries_left:
                    raise
                with suppress(FileExistsError, *NOT_THERE):  # another thread makes or removes them, too
                    self._system.makedirs(directory, exist_ok=True)
        raise AssertionError("unreachable")

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(*NOT_THERE):
                if self._system.info(path).get("type") == "directory":
                    continue
                self._system.rm_file(path)
            self._prune(posixpath.dirname(path))

    def _prune(self, directory: str) -> None:
        """Remove a directory that is empty, and those above it that become so."""
        if not _is_one_of(self._system, _REFUSE_TO_REMOVE_MORE):
            return
        while directory.startswith(f"{self._root}/"):
            try:
                self._system.rmdir(directory)
            except NOT_THERE:
                pass  # somebody else did
            except OSError:
                return  # it holds something
            directory = posixpath.dirname(directory)


class _Part:
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
        if _is_one_of(system, _REPLACE_BY_RENAMING):
            system.mv(self._part, self._path)
            return
        with suppress(*NOT_THERE):
            system.rm_file(self._path)
        system.mv(self._part, self._path)
        with suppress(*NOT_THERE):  # WebHDFS says nothing where it did not rename
            system.info(self._part)
            raise FileExistsError(f"{self._part} was not renamed to {self._path}: something else stands there")

    def discard(self) -> None:
        try:
            self._file.close()
        finally:
            with suppress(*NOT_THERE):
                self._system.rm_file(self._part)
            self._prune()


def _is_one_of(system: FileSystem, protocols: frozenset[str]) -> bool:
    own = system.protocol
    return not protocols.isdisjoint((own,) if isinstance(own, str) else own)
