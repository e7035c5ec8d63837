"""The file systems of fsspec that are open in this process."""

from __future__ import annotations

import functools
import json
import os
import threading
from asyncio import AbstractEventLoop
from collections.abc import Mapping
from typing import IO, Any, Protocol, cast

import fsspec  # type: ignore[import-untyped]  # it has no types
from fsspec.dircache import DirCache  # type: ignore[import-untyped]  # it has no types

from ckptcore.errors import CheckpointError, InvalidLocationError, PluginError, UnknownPluginError
from ckptcore.model.tree import JSON
from ckptcore.redaction import chainable
from ckptcore_fsspec.failures import failure, first_line

__all__ = ["Connection", "FileSystem"]


class FileSystem(Protocol):
    """What is used of `fsspec.AbstractFileSystem`, which has no types. Paths are without a scheme, but on the web."""

    async_impl: bool
    loop: AbstractEventLoop
    dircache: object
    protocol: str | tuple[str, ...]

    def cat_file(self, path: str, *, start: int | None, end: int | None) -> bytes: ...
    def find(self, path: str, *, detail: bool) -> Mapping[str, Mapping[str, Any]]: ...
    def info(self, path: str) -> Mapping[str, Any]: ...
    def invalidate_cache(self, path: str | None = None) -> None: ...
    def ls(self, path: str, detail: bool) -> list[Mapping[str, Any]]: ...
    def makedirs(self, path: str, exist_ok: bool) -> None: ...
    def mv(self, source: str, destination: str) -> None: ...
    def open(self, path: str, mode: str, **options: object) -> IO[bytes]: ...
    def pipe_file(self, path: str, value: bytes) -> None: ...
    def rm_file(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...


class Connection:
    """One file system, with its options; any thread and any process that was forked has it open for itself.

    fsspec's own file systems are not to be used after a fork, and those that are not asynchronous may not bear several threads.
    """

    def __init__(self, protocol: str, url: str, options: Mapping[str, JSON]) -> None:
        """Connect to what a URL names; nothing is asked of it yet.

        Args:
            protocol: as fsspec knows it.
            url: with this protocol.
            options: of the class of the file system, by name.

        Raises:
            InvalidLocationError: the URL is none of this protocol.
            UnknownPluginError: what the protocol needs is not installed.
        """
        try:
            self._type = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise UnknownPluginError(
                f"fsspec opens {protocol}:// with a package that is not installed: {first_line(error)}"
            ) from error
        try:
            self.path = str(self._type._strip_protocol(url))
            named = dict(self._type._get_kwargs_from_urls(url))
        except Exception as error:  # noqa: BLE001  # it is raised again, as one of ours
            # The message may contain a part of an unescaped password.
            raise InvalidLocationError(
                f"fsspec finds no path in {url!r} ({type(error).__name__}); write characters such as / and @ in a "
                "password as %2F and %40"
            ) from None
        named.pop("path", None)
        self.protocol = protocol
        self._options = json.dumps({**named, **options}, sort_keys=True)

    def get(self) -> FileSystem:
        """The file system, for this thread.

        Raises:
            StorageError
        """
        owner = _shared(os.getpid()) if getattr(self._type, "async_impl", False) else _of_this_thread()
        key = (self.protocol, self._options)
        found = owner.get(key)
        if found is None:
            found = owner.setdefault(key, self._open())
        return found

    def _open(self) -> FileSystem:
        options = json.loads(self._options)
        try:
            # An instance of our own: others rely on the listings that theirs keeps, and ours must keep none.
            system = self._type(**options, skip_instance_cache=True)
        except CheckpointError:
            raise
        except TypeError as error:
            raise PluginError(
                f"fsspec's {self._type.__name__} does not take the options {sorted(options)}: {first_line(error)}; "
                f"Context(storage={{{self.protocol!r}: {{...}}}}) gives what its documentation names"
            ) from chainable(error)
        except Exception as error:  # noqa: BLE001  # it is raised again, as one of ours
            raise failure(error, f"cannot open {self.protocol}://") from chainable(error)
        if isinstance(system.dircache, DirCache):
            system.dircache.use_listings_cache = False
        return cast(FileSystem, system)


@functools.lru_cache(maxsize=1)
def _shared(process: int) -> dict[tuple[str, str], FileSystem]:
    """Those that every thread of a process may use; of an earlier process nothing is kept."""
    return {}


class _ThreadSystems(threading.local):
    def __init__(self) -> None:
        self.process = os.getpid()
        self.systems: dict[tuple[str, str], FileSystem] = {}


@functools.cache
def _threads() -> _ThreadSystems:
    return _ThreadSystems()


def _of_this_thread() -> dict[tuple[str, str], FileSystem]:
    mine = _threads()
    if mine.process != os.getpid():
        mine.process, mine.systems = os.getpid(), {}
    return mine.systems
