"""Tiles that are compared with the checksums that stand behind them, as their bytes are read."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

from ckptcore.errors import ChecksumError
from ckptcore.io.trailers import PiecedSum, encoded
from ckptcore.model import Checksum

__all__ = ["TileCheck"]


class TileCheck:
    """A tile to compare with its checksum; its bytes are read in one part or several. Any thread.

    Attributes:
        start, stop: where in the object the bytes are that the checksum is of; it begins at `stop`.
        end: where the checksum ends.
        numbers: the targets that wait for this, where several parts hold the tile; else none waits for it alone.
    """

    __slots__ = ("_checksum", "_key", "_lock", "_pieces", "_stored", "end", "numbers", "start", "stop")

    def __init__(self, key: str, start: int, stop: int, checksum: Checksum) -> None:
        self._key = key
        self._checksum = checksum
        self.start = start
        self.stop = stop
        self.end = stop + checksum.nbytes
        self.numbers: Sequence[int] = ()
        self._pieces: PiecedSum | None = None
        self._lock: threading.Lock | None = None
        self._stored = b""

    def expect_pieces(self, numbers: Sequence[int]) -> None:
        """Say that several parts hold the tile, the last all of the checksum, and which targets wait for it."""
        self.numbers = numbers
        self._pieces = PiecedSum(self._checksum, self.stop - self.start)
        self._lock = threading.Lock()

    def compare(self, start: int, stop: int, buffers: Sequence[tuple[int, memoryview]]) -> bool:
        """Take in a part of the object; compare and return True if it was the last part of the tile.

        Args:
            start: where the part begins.
            stop: where it ends; not within the checksum.
            buffers: (position in the object, bytes): where the part lies in memory, in order and without a gap.

        Raises:
            ChecksumError
        """
        low, high = max(start, self.start), min(stop, self.stop)
        checksum = self._checksum
        if len(buffers) == 1:
            position, buffer = buffers[0]
            value = checksum.of(buffer[low - position : high - position])
            stored = bytes(buffer[high - position : self.end - position]) if stop >= self.end else b""
        else:
            pieces = _between(buffers, low, high)
            value = checksum.of(pieces[0])
            for piece in pieces[1:]:
                value = checksum.join(value, checksum.of(piece), len(piece))
            stored = b"".join(_between(buffers, high, self.end)) if stop >= self.end else b""
        if self._pieces is None or self._lock is None:
            self._compare(value, stored)
            return True
        with self._lock:
            self._stored = self._stored or stored
            if not self._pieces.add(low, high - low, value):
                return False
        self._compare(self._pieces.value(), self._stored)
        return True

    def _compare(self, value: int, stored: bytes) -> None:
        found = encoded(self._checksum, value)
        if found != stored:
            name = self._checksum.name
            raise ChecksumError(
                f"{self._key!r} is damaged in bytes {self.start} to {self.end}: expected the {name} that stands there, "
                f"{stored.hex()}, found {found.hex()}; it changed after it was written, or the storage returned wrong "
                "bytes: restore it from a copy, or load another checkpoint",
                key=self._key,
                start=self.start,
                stop=self.end,
            )


def _between(buffers: Sequence[tuple[int, memoryview]], start: int, stop: int) -> list[memoryview]:
    """Where bytes `start` to `stop` of an object lie, of buffers as `TileCheck.compare` takes them."""
    place = bisect.bisect_right(buffers, start, key=_position) - 1
    position, buffer = buffers[place]
    found = [buffer[start - position : stop - position]]
    while (position := position + len(buffer)) < stop:
        place += 1
        buffer = buffers[place][1]
        found.append(buffer[: stop - position])
    return found


def _position(entry: tuple[int, memoryview]) -> int:
    return entry[0]
