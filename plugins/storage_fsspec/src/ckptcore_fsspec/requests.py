"""What is asked of a web server.

fsspec's own requests do not tell a part from the whole, which servers send that take no ranges (Python's ``http.server``), nor
a server that cannot be reached from an object that is not there. These go out over its session, with what it was opened with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

from fsspec.asyn import sync  # type: ignore[import-untyped]  # it has no types

from ckptcore.errors import StorageError
from ckptcore_fsspec.file_systems import FileSystem

__all__ = ["Answer", "fetch", "fetch_to_file"]

_SECONDS_TO_CONNECT: Final = 30.0
_SECONDS_BETWEEN_BYTES: Final = 60.0
_PIECE_BYTES: Final = 1 << 20
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)")
"""RFC 9110, section 14.4."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sent.

    Attributes:
        data: the bytes that were asked for; fewer where the object ends before.
        size: of the whole object in bytes, or None where the server does not say.
        takes_ranges: whether it sent the range only; False where it sent all, and the rest was left.
        version: the strong ETag of the object, which a later request can insist on, or None.
    """

    data: bytes
    size: int | None
    takes_ranges: bool
    version: str | None


def fetch(system: FileSystem, url: str, start: int, stop: int | None, version: str | None = None) -> Answer:
    """Bytes `start` to `stop` of what a URL names; with a version, of that one or none. Blocks.

    Raises:
        FileNotFoundError: there is nothing, or a directory.
        StorageError: the server sent other bytes than were asked for.
    """
    answer: Answer = sync(system.loop, _fetch, system, url, start, stop, version, None)
    return answer


def fetch_to_file(system: FileSystem, url: str, file: IO[bytes]) -> Answer:
    """Write all of what a URL names to a file. Blocks; raises what `fetch` does."""
    answer: Answer = sync(system.loop, _fetch, system, url, 0, None, None, file)
    return answer


async def _fetch(
    system: Any, url: str, start: int, stop: int | None, version: str | None, file: IO[bytes] | None
) -> Answer:
    import aiohttp

    options = dict(system.kwargs)
    # What is compressed on the way has other ranges.
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
            raise FileNotFoundError(f"{url} is a directory")  # servers lead from its name to its index
        given = _content_range(response.headers)
        if response.status == 416:
            return Answer(b"", given[1], True, _version(response.headers))
        response.raise_for_status()
        if response.status == 206:
            if given[0] != start:
                raise StorageError(
                    f"the server of {url} sent a range from {given[0]}, where one from {start} was asked for"
                )
            size, skipped = given[1], 0
        elif response.status == 200:
            size, skipped = response.content_length, start
        else:
            raise StorageError(f"the server of {url} answered {response.status}, where 200 or 206 is expected")
        await _skip(response.content, skipped)
        data = await _read(response.content, None if stop is None else stop - start, file)
        return Answer(data, size, response.status == 206, _version(response.headers))


def _content_range(headers: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Where the bytes sent begin, and the size of the whole; None for what is not said."""
    matched = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if matched is None:
        return None, None
    return (
        None if matched[1] is None else int(matched[1]),
        None if matched[3] == "*" else int(matched[3]),
    )


def _version(headers: Mapping[str, str]) -> str | None:
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else None  # a weak one says nothing of bytes


async def _skip(content: Any, nbytes: int) -> None:
    while nbytes:
        piece = await content.read(min(nbytes, _PIECE_BYTES))
        if not piece:
            return
        nbytes -= len(piece)


async def _read(content: Any, limit: int | None, file: IO[bytes] | None) -> bytes:
    """The next bytes, to the end or a limit; to a file where there is one."""
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
