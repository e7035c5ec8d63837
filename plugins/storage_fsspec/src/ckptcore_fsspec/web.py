"""Storage of ``http://`` and ``https://`` URLs, with or without range requests.

This module sends its own requests, with fsspec's session and options. fsspec's requests have two
defects. If a server without range support sends the whole object (such as Python's
``http.server``), fsspec takes it for the range. And fsspec takes an unreachable server for a
missing object.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

from fsspec.asyn import sync  # type: ignore[import-untyped]  # it has no types

from ckptcore.errors import InvalidLocationError, StorageError
from ckptcore.events import logger_named
from ckptcore.model import check_directory_key, check_key
from ckptcore.protocols import RangeReader
from ckptcore.redaction import redacted_location
from ckptcore.temporary import TemporaryFile
from ckptcore_fsspec.failures import converted_errors
from ckptcore_fsspec.file_systems import Connection, FileSystem
from ckptcore_fsspec.storage import ReadOnlyStorage, fill

_SECONDS_TO_CONNECT: Final = 30.0
_SECONDS_BETWEEN_BYTES: Final = 60.0
_PIECE_BYTES: Final = 1 << 20
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)")
"""The header ``Content-Range`` (RFC 9110, section 14.4)."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response of a server.

    Attributes:
        data: the requested bytes, or fewer at the end of the object.
        size: size of the object in bytes; None if unknown.
        takes_ranges: True if the server sent only the requested range. False if it sent the whole
            object. In this case only the bytes up to the end of the range were read.
        version: strong ETag for later conditional requests, or None.
    """

    data: bytes
    size: int | None
    takes_ranges: bool
    version: str | None


def fetch(system: FileSystem, url: str, start: int, stop: int | None, version: str | None = None) -> Response:
    """Read bytes `start` to `stop` of the object at a URL. Blocks.

    If `version` is given, the request fails if the object no longer has this ETag.

    Raises:
        FileNotFoundError: for a missing object or a directory.
        StorageError: if the server sent a different range or an unexpected status.
        aiohttp.ClientError: for other failures.
    """
    response: Response = sync(system.loop, _fetch, system, url, start, stop, version, None)
    return response


def fetch_to_file(system: FileSystem, url: str, file: TemporaryFile) -> Response:
    """Copy the object at a URL to a file. Blocks. Raises the same errors as `fetch`."""
    response: Response = sync(system.loop, _fetch, system, url, 0, None, None, file)
    return response


async def _fetch(
    system: Any, url: str, start: int, stop: int | None, version: str | None, file: TemporaryFile | None
) -> Response:
    import aiohttp

    options = dict(system.kwargs)
    # Request an uncompressed response, because ranges would count compressed bytes.
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    if version is not None:
        headers["If-Match"] = version
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS_TO_CONNECT, sock_read=_SECONDS_BETWEEN_BYTES)
    session = await system.set_session()
    async with session.get(system.encode_url(url), **{"timeout": timeout, **options, "headers": headers}) as response:
        if response.status in (404, 410):
            raise FileNotFoundError(url)
        if response.url.path.endswith("/"):
            raise FileNotFoundError(f"{url} is a directory")  # servers redirect the name of a directory to its index
        given = _content_range(response.headers)
        if response.status == 416:
            return Response(b"", given[1], True, _version(response.headers))
        response.raise_for_status()
        if response.status == 206:
            if given[0] != start:
                raise StorageError(f"{url}: the server sent a range from byte {given[0]} instead of {start}")
            size, skipped = given[1], 0
        elif response.status == 200:
            size, skipped = response.content_length, start
        else:
            raise StorageError(f"{url}: the server answered with status {response.status} instead of 200 or 206")
        await _skip(response.content, skipped)
        data = await _read(response.content, None if stop is None else stop - start, file)
        return Response(data, size, response.status == 206, _version(response.headers))


def _content_range(headers: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the start of the range and the size of the object. Each is None if unknown."""
    matched = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if matched is None:
        return None, None
    return (
        None if matched[1] is None else int(matched[1]),
        None if matched[3] == "*" else int(matched[3]),
    )


def _version(headers: Mapping[str, str]) -> str | None:
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else None  # a weak ETag does not identify bytes


async def _skip(content: Any, nbytes: int) -> None:
    while nbytes:
        piece = await content.read(min(nbytes, _PIECE_BYTES))
        if not piece:
            return
        nbytes -= len(piece)


async def _read(content: Any, limit: int | None, file: TemporaryFile | None) -> bytes:
    """Read up to the end or a limit. Return the data, or write it to `file`."""
    pieces: list[bytes] = []
    left = limit
    while left is None or left:
        piece = await content.read(_PIECE_BYTES if left is None else min(left, _PIECE_BYTES))
        if not piece:
            break
        if left is not None:
            left -= len(piece)
        if file is None:
            pieces.append(piece)
        else:
            file.write(piece)
    return b"".join(pieces)


logger = logger_named("ckptcore_fsspec.web")

_MAX_DIRECTORIES: Final = 10_000
"""Maximum number of listed directories, because a server can generate directories endlessly."""


class WebStorage(ReadOnlyStorage):
    """Objects below a URL. Thread-safe.

    Lists work only if the server shows directories as pages with links. Loading a ckptcore
    checkpoint needs no lists.
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
        keys: list[str] = []
        for looked_into in range(_MAX_DIRECTORIES + 1):  # noqa: B007  # used in the error
            if not left:
                return iter(sorted(keys))
            directory = left.pop()
            for name in self.list_names(directory):
                key = f"{directory}/{name}" if directory else name
                (left if name.endswith("/") else keys).append(key.removesuffix("/"))
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

    If the server sends a strong ETag, reads fail if the object has changed on the server.
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
