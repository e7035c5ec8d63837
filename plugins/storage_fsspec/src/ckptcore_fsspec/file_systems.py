"""Cache of fsspec file systems in this process."""

from __future__ import annotations

import functools
import json
import os
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Final, Protocol, TypeVar, cast

import fsspec  # type: ignore[import-untyped]  # it has no types
from fsspec.dircache import DirCache  # type: ignore[import-untyped]  # it has no types

from ckptcore.errors import CheckpointError, InvalidLocationError, PluginError, StorageError, UnknownPluginError
from ckptcore.model.tree import JSON
from ckptcore.redaction import chainable, redacted_location
from ckptcore_fsspec.failures import converted_errors, failure, first_line, is_about_credentials

T = TypeVar("T")

PREFIX: Final = "fsspec+"
"""Prefix of a scheme that selects fsspec even if another plugin opens the scheme."""


class FileSystem(Protocol):
    """The used methods of `fsspec.AbstractFileSystem`, because fsspec has no type annotations.

    Paths have no scheme, except for ``http`` and ``https``.
    """

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
    """One file system with its options. Thread-safe.

    Each process opens its own file system object, because these objects must not be used after a
    fork. If the file system is not asynchronous, each thread opens its own object, because it may
    not be thread-safe.
    """

    def __init__(self, url: str, options: Mapping[str, JSON]) -> None:
        """Prepare a file system, without a request.

        Args:
            url: ``SCHEME://...`` or ``fsspec+SCHEME://...``.
            options: arguments of the file system's class, by name.

        Raises:
            InvalidLocationError: if the URL is invalid for this protocol.
            UnknownPluginError: if a package for the protocol is not installed.
        """
        scheme, _, rest = url.partition("://")
        self._scheme = scheme.lower()
        self.protocol = protocol = self._scheme.removeprefix(PREFIX)
        try:
            self._type = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise UnknownPluginError(
                f"cannot open {protocol}://: a package that fsspec needs is not installed: {first_line(error)}"
            ) from error
        try:
            self.path = str(self._type._strip_protocol(f"{protocol}://{rest}"))
            named = dict(self._type._get_kwargs_from_urls(f"{protocol}://{rest}"))
        except Exception as error:  # noqa: BLE001  # raised again as a ckptcore error
            # The message may contain a part of an unescaped password.
            raise InvalidLocationError(
                f"cannot parse the path in {redacted_location(url)!r} ({type(error).__name__}); pass a password with "
                f"characters such as / as an option: Context(storage={{{self._scheme!r}: {{'password': ...}}}})"
            ) from None
        named.pop("path", None)
        self._options = json.dumps({**named, **options}, sort_keys=True)

    def get(self) -> FileSystem:
        """Return the file system for this thread.

        Raises:
            PluginError: if the file system does not accept the options.
            StorageError: if the file system cannot be opened.
        """
        owner, key = self._owner()
        system = owner.get(key)
        if system is None:
            system = owner.setdefault(key, self._open())
        return system

    def request(self, what: str, send: Callable[[FileSystem], T]) -> T:
        """Send a request, and convert its errors; see `converted_errors`.

        If the service refuses the credentials, open the file system again, and send the request
        once more. The new file system object reads the credentials again, because another program
        may have renewed them.
        """
        try:
            with self.forgetting(what):
                return send(self.get())
        except StorageError as error:
            if not is_about_credentials(error):
                raise
        with self.forgetting(what):
            return send(self.get())

    @contextmanager
    def forgetting(self, what: str) -> Iterator[None]:
        """Convert errors of the ``with`` block.

        If the service refuses the credentials, the next request opens the file system again.
        """
        try:
            with converted_errors(what):
                yield
        except StorageError as error:
            if is_about_credentials(error):
                owner, key = self._owner()
                owner.pop(key, None)
            raise

    def _owner(self) -> tuple[dict[tuple[str, str], FileSystem], tuple[str, str]]:
        """Return the cache that contains this file system, and its key in the cache."""
        is_shared = getattr(self._type, "async_impl", False)
        return _process_systems(os.getpid()) if is_shared else _thread_systems(), (self.protocol, self._options)

    def _open(self) -> FileSystem:
        options = json.loads(self._options)
        try:
            # Bypass fsspec's cache of instances. Other code relies on cached listings, but this
            # instance must not cache listings.
            system = self._type(**options, skip_instance_cache=True)
        except CheckpointError:
            raise
        except TypeError as error:
            raise PluginError(
                f"fsspec's {self._type.__name__} does not accept the options "
                f"{sorted(options)}: {first_line(error)}; set "
                f"Context(storage={{{self._scheme!r}: {{...}}}}) to options in its "
                "documentation"
            ) from chainable(error)
        except Exception as error:  # noqa: BLE001  # raised again as a ckptcore error
            raise failure(error, f"cannot open {self.protocol}://") from chainable(error)
        if isinstance(system.dircache, DirCache):
            system.dircache.use_listings_cache = False
        return cast(FileSystem, system)


@functools.lru_cache(maxsize=1)
def _process_systems(process: int) -> dict[tuple[str, str], FileSystem]:
    """Return the file systems that all threads of a process share. File systems of a parent process are dropped."""
    return {}


class _ThreadSystems(threading.local):
    def __init__(self) -> None:
        self.process = os.getpid()
        self.systems: dict[tuple[str, str], FileSystem] = {}


@functools.cache
def _thread_state() -> _ThreadSystems:
    return _ThreadSystems()


def _thread_systems() -> dict[tuple[str, str], FileSystem]:
    mine = _thread_state()
    if mine.process != os.getpid():
        mine.process, mine.systems = os.getpid(), {}
    return mine.systems
