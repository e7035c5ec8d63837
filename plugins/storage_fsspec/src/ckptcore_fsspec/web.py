"""Storage of ``http://`` and ``https://`` URLs, with or without range requests."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from urllib.parse import quote, unquote

from ckptcore.errors import InvalidLocationError, StorageError
from ckptcore.events import logger_named
from ckptcore.model import check_directory_key, check_key
from ckptcore.protocols import RangeReader
from ckptcore.redaction import redacted_location
from ckptcore.temporary import TemporaryFile
from ckptcore_fsspec.failures import converted_errors
from ckptcore_fsspec.file_systems import Connection
from ckptcore_fsspec.ranges import fill
from ckptcore_fsspec.requests import Response, fetch, fetch_to_file
from ckptcore_fsspec.storage import ReadOnlyStorage

logger = logger_named("ckptcore_fsspec.web")

_MAX_DIRECTORIES: Final = 10_000
"""Limit of directories, because a server can generate them endlessly."""


class WebStorage(ReadOnlyStorage):
    """Objects below a URL. Thread-safe.

    Listing needs a server that shows directories as pages with links. Loading a ckptcore checkpoint
    does not list.
    """

    def __init__(self, connection: Connection, url: str) -> None:
        """Open a URL.

        Raises:
            InvalidLocationError: if the URL has a query or a fragment.
        """
        super().__init__(connection, url)
        if {"?", "#"} & set(self._root):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: it has a query or a fragment; write %3F and %23 for ? "
                f"and # in names, and pass credentials as Context(storage={{{self._scheme!r}: "
                "{'headers': {...}}})"
            )

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read bytes `start` to `stop` of an object, or fewer at its end."""
        if stop is not None and start >= stop:
            self.size(key)
            return b""
        return self._fetch(key, start, stop).data

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        response = self._fetch(key, 0, 1)
        return len(self._fetch(key, 0, None).data) if response.size is None else response.size

    def open_reader(self, key: str) -> RangeReader:
        """Open an object.

        If the server does not support ranges, the whole object is copied to an anonymous local
        file.
        """
        response = self._fetch(key, 0, 1)
        if response.takes_ranges:
            return _RangedObject(
                key,
                self._url,
                lambda start, stop: self._fetch(key, start, stop, response.version),
                lambda: self.size(key),
            )
        file = TemporaryFile(f"of {key!r} in {self._url}, whose server does not support ranges")
        try:
            with converted_errors(f"cannot read {key!r} in {self._url}"):
                fetch_to_file(self._connection.get(), self._path(key), file)
        except BaseException:
            file.close()
            raise
        logger.info("the server of %s does not support ranges: read all of %s", self._url, key)
        return _FetchedObject(key, self._url, file)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset."""
        self.open_reader(key).get_into(ranges)

    def list(self, prefix: str = "") -> Iterator[str]:
        """List the keys of all objects in a directory, sorted. The server must show directories."""
        left = [check_directory_key(prefix)]
        found: list[str] = []
        for looked_into in range(_MAX_DIRECTORIES + 1):  # noqa: B007  # the error has it
            if not left:
                return iter(sorted(found))
            directory = left.pop()
            for name in self.list_names(directory):
                key = f"{directory}/{name}" if directory else name
                (left if name.endswith("/") else found).append(key.removesuffix("/"))
        raise StorageError(
            f"{self._url}: the server shows more than {looked_into} directories; load from a subdirectory"
        )

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """List the names in a directory, sorted. The server must show directories."""
        names = set()
        for name in super().list_names(prefix):
            plain = unquote(name, errors="surrogateescape")
            try:
                check_directory_key(plain)
            except InvalidLocationError:
                continue  # the link does not name an entry
            if "/" not in plain.removesuffix("/") and not {"?", "#"} & set(name):
                names.add(plain)
        return sorted(names)

    def _path(self, key: str) -> str:
        return f"{self._root}/{_quoted(check_key(key))}"

    def _directory(self, prefix: str) -> str:
        directory = check_directory_key(prefix)
        return f"{self._root}/{_quoted(directory)}" if directory else self._root

    def _fetch(self, key: str, start: int, stop: int | None, version: str | None = None) -> Response:
        path = self._path(key)
        with converted_errors(f"cannot read {key!r} in {self._url}"):
            return fetch(self._connection.get(), path, start, stop, version)


class _RangedObject:
    """An object on a server with range requests. Thread-safe.

    If the server sends a strong ETag, reads fail after the object was changed on the server.
    """

    def __init__(self, key: str, url: str, read: Callable[[int, int], Response], size: Callable[[], int]) -> None:
        self._key = key
        self._url = url
        self._read = read
        self._size = size

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset."""
        fill(self._key, self._url, ranges, lambda start, stop: self._read(start, stop).data, self._size)


class _FetchedObject:
    """An object in a local file. Thread-safe."""

    def __init__(self, key: str, url: str, file: TemporaryFile) -> None:
        self._key = key
        self._url = url
        self._file = file
        weakref.finalize(self, file.close)  # readers have no close method

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset."""
        descriptor = self._file.fileno()
        fill(
            self._key,
            self._url,
            ranges,
            lambda start, stop: os.pread(descriptor, stop - start, start),
            lambda: os.fstat(descriptor).st_size,
        )


def _quoted(key: str) -> str:
    return quote(key.encode("utf-8", "surrogateescape"))
