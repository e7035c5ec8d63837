"""Checksums that stand in an object behind the bytes they are of, while several threads move those."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.errors import PluginError
from ckptcore.model import Checksum, ChecksumSegment, Segment

__all__ = ["PiecedSum", "Trailer", "encoded", "first_covered", "trailers_of"]


class PiecedSum:
    """The checksum of bytes whose pieces are summed in any order. The caller holds a lock, or has all in one piece."""

    __slots__ = ("_missing", "_pieces", "checksum")

    def __init__(self, checksum: Checksum, nbytes: int) -> None:
        """Expect pieces of `nbytes` bytes in all."""
        self.checksum = checksum
        self._missing = nbytes
        self._pieces: list[tuple[int, int, int]] = []

    def add(self, start: int, nbytes: int, value: int) -> bool:
        """Take in the checksum of a piece that begins at `start`; whether it was the last one."""
        self._pieces.append((start, nbytes, value))
        self._missing -= nbytes
        return self._missing == 0

    def value(self) -> int:
        """The checksum of all bytes, once no piece is missing."""
        self._pieces.sort()
        join = self.checksum.join
        _, _, value = self._pieces[0]
        for _, nbytes, piece in self._pieces[1:]:
            value = join(value, piece, nbytes)
        return value


class Trailer:
    """A checksum that is written behind the bytes it is of.

    Attributes:
        checksum: which one.
        nbytes: how many bytes it is of.
        data: the checksum as it stands in the object, or None while some of the bytes are not summed.
    """

    __slots__ = ("_sum", "checksum", "data", "nbytes")

    def __init__(self, checksum: Checksum, nbytes: int) -> None:
        self.checksum = checksum
        self.nbytes = nbytes
        self.data: bytes | None = None
        self._sum: PiecedSum | None = None
        if nbytes == 0:
            self.complete(checksum.of(memoryview(b"")))

    def add(self, start: int, nbytes: int, value: int) -> None:
        """Take in the checksum of some of the bytes, that begin at `start` in the object; the caller holds a lock."""
        if self._sum is None:
            self._sum = PiecedSum(self.checksum, self.nbytes)
        if self._sum.add(start, nbytes, value):
            self.complete(self._sum.value())

    def complete(self, value: int) -> None:
        """Take in the checksum of all of the bytes.

        Raises:
            PluginError: the checksum does not have as many bytes as it said.
        """
        self.data = encoded(self.checksum, value)


def encoded(checksum: Checksum, value: int) -> bytes:
    """A checksum as it stands in an object.

    Raises:
        PluginError: it does not have as many bytes as it said.
    """
    data = checksum.encode(value)
    if len(data) != checksum.nbytes:
        raise PluginError(
            f"the checksum {checksum.name} says that it takes {checksum.nbytes} bytes, and {len(data)} bytes were found; "
            "the layout that gave it is wrong"
        )
    return data


def first_covered(segments: Sequence[Segment], number: int, segment: ChecksumSegment, before: int) -> int:
    """The number of the first segment that the checksum in segment `number` is of; the last is the one before it.

    `before` is the number of the checksum before it, or -1.

    Raises:
        PluginError: it is of no segment, of another checksum, or of more segments than there are.
    """
    first = number - segment.segments
    if not before < first < number:
        raise PluginError(
            f"segment {number} of {len(segments)} is the checksum of {segment.segments} segments before it: expected 1 to "
            f"{number - before - 1}, because it may not be of another checksum; the layout is wrong"
        )
    return first


def trailers_of(segments: Sequence[Segment], sizes: Sequence[int]) -> dict[int, Trailer]:
    """The checksum by number of segment, for the segments that hold one and for those that one is of.

    Raises:
        PluginError: one is of segments that it cannot be of.
    """
    found: dict[int, Trailer] = {}
    before = -1
    for number, segment in enumerate(segments):
        if not isinstance(segment, ChecksumSegment):
            continue
        first = first_covered(segments, number, segment, before)
        trailer = Trailer(segment.checksum, sizes[first] if number - first == 1 else sum(sizes[first:number]))
        for covered in range(first, number + 1):
            found[covered] = trailer
        before = number
    return found
