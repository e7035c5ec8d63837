"""Fragments: objects in pieces of an erasure code, of which any `needed` give the object back.

An object is divided into segments. Each segment becomes one piece of each fragment, so that a piece is a message. The
pieces of the first fragments have the bytes of the segment themselves, each after a header.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ckptcore.errors import MissingDistributionError, StorageError
from ckptcore_recovery.peers.messages import PIECE_BYTES

_HEADER_BYTES: Final = 80
"""The header that liberasurecode puts before each piece of a fragment."""

_MAX_FRAGMENTS: Final = 32
"""The limit of liberasurecode."""


@dataclass(frozen=True, slots=True)
class ErasureCode:
    """Fragments instead of copies: any `parity` failure domains may be lost, for less memory.

    Each object is in `data + parity` fragments of ``1 / data`` of its size, in as many failure domains.

    Attributes:
        data: the number of fragments that are needed to read an object.
        parity: the number of other fragments.
    """

    data: int
    parity: int

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a number is not valid.
            MissingDistributionError: pyeclib is not installed.
        """
        if self.data < 2 or self.parity < 1 or self.data + self.parity > _MAX_FRAGMENTS:
            raise ValueError(
                f"{self}: expected at least 2 fragments of data, 1 of parity, and at most {_MAX_FRAGMENTS} in all"
            )
        Fragments(1, self.data, self.data + self.parity)


class FragmentPart(NamedTuple):
    """Consecutive bytes of an object in one fragment.

    Attributes:
        segment: the number of the segment.
        place: the number of the fragment.
        offset: where the bytes begin in the fragment.
        of_segment: the bytes of the segment that they are.
        of_range: the bytes of the requested range that they are.
    """

    segment: int
    place: int
    offset: int
    of_segment: slice
    of_range: slice


class Fragments:
    """The fragments of an object of some size. Thread-safe.

    Attributes:
        needed: the number of fragments that give the object back.
        count: the number of all fragments.
        nbytes: the size of each fragment in bytes.
    """

    def __init__(self, size: int, needed: int, count: int) -> None:
        """Prepare the code.

        Args:
            size: the bytes of the object.
            needed, count: see the attributes.

        Raises:
            MissingDistributionError: pyeclib is not installed.
            StorageError: there is no such code.
        """
        try:
            from pyeclib.ec_iface import ECDriver  # an optional distribution, which loads a library
        except ImportError as error:
            raise MissingDistributionError(
                "fragments of steps in memory need pyeclib: run pip install 'ckptcore-recovery[erasure]'"
            ) from error
        if not 2 <= needed < count <= _MAX_FRAGMENTS:
            raise StorageError(f"no erasure code has {needed} of {count} fragments")
        self.needed = needed
        self.count = count
        self._size = size
        self._segment_bytes = needed * (PIECE_BYTES - _HEADER_BYTES)
        self._driver = ECDriver(k=needed, m=count - needed, ec_type="isa_l_rs_cauchy")
        last = len(self.segments) - 1
        self.nbytes = last * PIECE_BYTES + self.piece_bytes(last) if size else 0

    @property
    def segments(self) -> range:
        """The numbers of the segments."""
        return range(-(-self._size // self._segment_bytes))

    def segment(self, number: int) -> slice:
        """Return the bytes of the object that are in a segment."""
        return slice(number * self._segment_bytes, min(self._size, (number + 1) * self._segment_bytes))

    def piece_bytes(self, number: int) -> int:
        """Return the size of the piece of a segment in each fragment. The piece begins at ``number * PIECE_BYTES``."""
        nbytes = min(self._size - number * self._segment_bytes, self._segment_bytes)
        return _HEADER_BYTES + -(-nbytes // self.needed)

    def parts(self, offset: int, nbytes: int) -> Iterator[FragmentPart]:
        """Yield where the bytes of a range of the object are: one after the other in the first `needed` fragments."""
        begin, stop = offset, offset + nbytes
        while begin < stop:
            segment = begin // self._segment_bytes
            inside = begin - segment * self._segment_bytes
            payload = self.piece_bytes(segment) - _HEADER_BYTES
            place, skipped = divmod(inside, payload)
            last = min(stop, begin + payload - skipped, self.segment(segment).stop)
            yield FragmentPart(
                segment, place, segment * PIECE_BYTES + _HEADER_BYTES + skipped,
                slice(inside, inside + last - begin), slice(begin - offset, last - offset),
            )  # fmt: skip
            begin = last

    def encode(self, segment: memoryview) -> Sequence[bytes]:
        """Return the piece of each fragment for a segment."""
        pieces: Sequence[bytes] = self._driver.encode(bytes(segment))
        return pieces

    def decode(self, pieces: Sequence[bytes]) -> bytes:
        """Return a segment, given the verified pieces of `needed` fragments.

        Raises:
            StorageError: they do not belong together.
        """
        from pyeclib.ec_iface import ECDriverError

        try:
            segment: bytes = self._driver.decode(list(pieces))
        except ECDriverError as error:
            raise StorageError(f"fragments cannot be decoded: {error}") from error
        return segment

    def rebuild(self, pieces: Sequence[bytes], place: int) -> bytes:
        """Return the piece of one fragment, given the verified pieces of `needed` others.

        Raises:
            StorageError: they do not belong together.
        """
        from pyeclib.ec_iface import ECDriverError

        try:
            (piece,) = self._driver.reconstruct(list(pieces), [place])
        except ECDriverError as error:
            raise StorageError(f"a fragment cannot be made again: {error}") from error
        return bytes(piece)
