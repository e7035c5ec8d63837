"""Requests to a web server.

fsspec's own requests confuse a range with the whole object, which servers without range support
send (Python's ``http.server``), and an unreachable server with a missing object. These requests use
fsspec's session and options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fsspec.asyn import sync  # type: ignore[import-untyped]  # it has no types

from ckptcore.errors import StorageError
from ckptcore.temporary import TemporaryFile
from ckptcore_fsspec.file_systems import FileSystem

_SECONDS_TO_CONNECT: Final = 30.0
_SECONDS_BETWEEN_BYTES: Final = 60.0
_PIECE_BYTES: Final = 1 << 20
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)")
"""RFC 9110, section 14.4."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response of a server.

    Attributes:
        data: the requested bytes, or fewer at the end of the object.
        size: size of the object in bytes; None if unknown.
        takes_ranges: True if the server sent only the requested range. False if it sent the whole
            object, of which only the bytes up to the end of the range were read.
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
    # Ranges of a compressed response would be different.
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
    """Return the start of the range and the size of the object; None if unknown."""
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
    """Read up to the end or a limit, and return the data or write it to a file."""
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
