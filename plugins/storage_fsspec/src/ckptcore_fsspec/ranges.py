"""Reads several ranges of one object into buffers, with few requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.errors import CorruptCheckpointError

_MAX_GAP_BYTES: Final = 64 << 10
"""Largest gap between two ranges that one request reads."""

_REQUEST_BYTES: Final = 16 << 20
"""Maximum size of a request, because fsspec allocates memory for the result."""


@dataclass(frozen=True, slots=True)
class _BufferRange:
    start: int
    buffer: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.buffer)


def fill(
    key: str,
    url: str,
    ranges: Sequence[tuple[int, memoryview]],
    read: Callable[[int, int], bytes],
    size: Callable[[], int],
) -> None:
    """Fill each buffer from its offset. One request reads ranges with small gaps between them.

    Args:
        key, url: the object and its directory, for errors.
        ranges: offsets and buffers.
        read: reads a range; returns fewer bytes at the end of the object.
        size: returns the size of the object in bytes. Called only if all buffers are empty, to
            check that the object exists, or if `read` returns no bytes.

    Raises:
        CorruptCheckpointError: if the object is too short.
    """
    pieces = [piece for offset, buffer in ranges for piece in _cut(offset, buffer)]
    if not pieces:
        size()
    for run in _requests(pieces):
        start = run[0].start
        data = memoryview(read(start, max(piece.stop for piece in run)))
        for piece in run:
            if piece.stop > start + len(data):
                found = start + len(data) if len(data) else size()
                raise CorruptCheckpointError(
                    f"the object {key!r} in {url} is too short: expected bytes {piece.start} "
                    f"to {piece.stop}, found {found} bytes in total. Load another checkpoint",
                    key=key,
                    start=min(piece.start, found),
                    stop=piece.stop,
                )
            piece.buffer[:] = data[piece.start - start : piece.stop - start]


def _cut(offset: int, buffer: memoryview) -> Iterator[_BufferRange]:
    for start in range(0, len(buffer), _REQUEST_BYTES):
        yield _BufferRange(offset + start, buffer[start : start + _REQUEST_BYTES])


def _requests(pieces: Sequence[_BufferRange]) -> Iterator[Sequence[_BufferRange]]:
    """Group pieces into requests, sorted by offset."""
    run: list[_BufferRange] = []
    stop = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if run and (piece.start > stop + _MAX_GAP_BYTES or piece.stop > run[0].start + _REQUEST_BYTES):
            yield run
            run = []
        stop = max(stop, piece.stop) if run else piece.stop
        run.append(piece)
    if run:
        yield run
