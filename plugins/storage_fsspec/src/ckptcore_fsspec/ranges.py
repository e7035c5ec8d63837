"""Buffers that are filled from ranges of one object, with few requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.errors import CorruptCheckpointError

__all__ = ["fill"]

_NEAR_BYTES: Final = 64 << 10
"""Bytes between two ranges that are read in vain rather than by a request of its own."""

_RUN_BYTES: Final = 16 << 20
"""The most that one request asks for: fsspec returns it in memory of its own."""


@dataclass(frozen=True, slots=True)
class _Piece:
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
    """Fill each buffer from its offset on; ranges near each other are read together.

    Args:
        key, url: the object and the directory that it is in, for errors.
        ranges: offsets and buffers.
        read: gives a range; fewer bytes where the object ends before.
        size: of the object in bytes; asked where nothing is read, and where something is missing.

    Raises:
        CorruptCheckpointError: the object ends before a buffer is full.
    """
    pieces = [piece for offset, buffer in ranges for piece in _cut(offset, buffer)]
    if not pieces:
        size()
    for run in _runs(pieces):
        start = run[0].start
        data = memoryview(read(start, max(piece.stop for piece in run)))
        for piece in run:
            if piece.stop > start + len(data):
                found = start + len(data) if len(data) else size()
                raise CorruptCheckpointError(
                    f"the object {key!r} in {url} is too short: expected bytes {piece.start} to {piece.stop}, found {found} bytes "
                    "in all. Load another checkpoint",
                    key=key,
                    start=min(piece.start, found),
                    stop=piece.stop,
                )
            piece.buffer[:] = data[piece.start - start : piece.stop - start]


def _cut(offset: int, buffer: memoryview) -> Iterator[_Piece]:
    for start in range(0, len(buffer), _RUN_BYTES):
        yield _Piece(offset + start, buffer[start : start + _RUN_BYTES])


def _runs(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    """What is read by one request each, in the order of the offsets."""
    run: list[_Piece] = []
    stop = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if run and (piece.start > stop + _NEAR_BYTES or piece.stop > run[0].start + _RUN_BYTES):
            yield run
            run = []
        stop = max(stop, piece.stop) if run else piece.stop
        run.append(piece)
    if run:
        yield run
