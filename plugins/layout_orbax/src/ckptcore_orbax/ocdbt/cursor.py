"""Cursor that reads bytes of a database and checks each number against a limit, and the encoding of varints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptcore.errors import CorruptCheckpointError

_MAX_BYTES: Final = 10
"""Maximum length of a 64-bit number in bytes: nine groups of 7 bits, and one bit."""

_FEW: Final = 16
"""Up to this number of values, a loop is faster than NumPy."""


def decode_varints(data: npt.NDArray[np.uint8], position: int, count: int) -> tuple[npt.NDArray[np.uint64], int]:
    """Return `count` consecutive numbers, and the position after them.

    Accepts encodings with more bytes than necessary. Memory use depends on the available bytes, not
    on `count`.

    Raises:
        ValueError: the data ends too early, or a number has more than 64 bits.
    """
    if count > len(data) - position:
        raise ValueError(f"{count} numbers do not fit in {len(data) - position} bytes")
    if count <= _FEW:
        return _decode_few(data, position, count)
    window = data[position : position + count]
    if window.max() < 0x80:
        return window.astype(np.uint64), position + count
    # Find the ends of the numbers; assume short numbers first.
    for width in (2, 4, _MAX_BYTES):
        window = data[position : position + width * count]
        ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) == count:
            break
    else:
        raise ValueError(f"the bytes end, or a number has more than {_MAX_BYTES} bytes, within {count} numbers")
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest > _MAX_BYTES:
        raise ValueError(f"a number has {longest} bytes; at most {_MAX_BYTES} are expected")
    numbers = (window[starts] & 0x7F).astype(np.uint64)
    for digit in range(1, longest):
        longer = np.flatnonzero(sizes > digit)
        groups = (window[starts[longer] + digit] & 0x7F).astype(np.uint64)
        if digit == _MAX_BYTES - 1 and groups.max() > 1:
            raise ValueError("a number has more than 64 bits")
        numbers[longer] |= groups << np.uint64(7 * digit)
    return numbers, position + int(ends[-1]) + 1


def _decode_few(data: npt.NDArray[np.uint8], position: int, count: int) -> tuple[npt.NDArray[np.uint64], int]:
    text = data[position : position + _MAX_BYTES * count].tobytes()
    numbers = []
    at = 0
    for _ in range(count):
        number = shift = 0
        while True:
            if at == len(text):
                raise ValueError(f"the bytes end within {count} numbers")
            byte = text[at]
            at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift == 7 * _MAX_BYTES:
                raise ValueError(f"a number has more than {_MAX_BYTES} bytes")
        if number >> 64:
            raise ValueError("a number has more than 64 bits")
        numbers.append(number)
    return np.array(numbers, np.uint64), position + at


def encode_varint(number: int) -> bytes:
    """Return the encoding of a number of at most 64 bits."""
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def encode_varints(numbers: npt.NDArray[np.uint64]) -> bytes:
    """Return the shortest encoding of each number, concatenated."""
    if not len(numbers):
        return b""
    largest = int(numbers.max())
    if largest < 0x80:
        return numbers.astype(np.uint8).tobytes()
    longest = -(-largest.bit_length() // 7)
    sizes = np.ones(len(numbers), np.int64)
    for digit in range(1, longest):
        sizes += numbers >> np.uint64(7 * digit) > 0
    starts = np.cumsum(sizes) - sizes
    encoded = np.zeros(int(sizes.sum()), np.uint8)
    for digit in range(longest):
        longer = np.flatnonzero(sizes > digit)
        groups = (numbers[longer] >> np.uint64(7 * digit) & np.uint64(0x7F)).astype(np.uint8)
        groups[sizes[longer] > digit + 1] |= 0x80
        encoded[starts[longer] + digit] = groups
    return encoded.tobytes()


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A byte range, described for errors.

    Attributes:
        noun: the kind of object: ``manifest``, ``B+tree node``.
        key: key of the object.
        start, stop: half-open byte range in the object.
    """

    noun: str
    key: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"the OCDBT {self.noun} at bytes {self.start} to {self.stop} of {self.key}"

    def damage_error(self, what: str) -> CorruptCheckpointError:
        """Return an error that describes the damage."""
        return CorruptCheckpointError(
            f"{self} is damaged: {what}; restore the checkpoint from a copy, or load another one",
            key=self.key,
            start=self.start,
            stop=self.stop,
        )


class Cursor:
    """Reads bytes in sequence. Not thread-safe.

    Methods raise CorruptCheckpointError if the data ends too early or a number is not allowed. Their
    parameter `what` describes the part that they read, for errors.

    Attributes:
        byte_range: location of the data, for errors.
    """

    __slots__ = ("_array", "_data", "_position", "byte_range")

    def __init__(self, data: bytes, byte_range: ByteRange) -> None:
        self._data = data
        self._array = np.frombuffer(data, np.uint8)
        self._position = 0
        self.byte_range = byte_range

    @property
    def remaining(self) -> int:
        """Number of bytes left."""
        return len(self._data) - self._position

    def take(self, nbytes: int, what: str) -> bytes:
        """Return the next bytes."""
        if nbytes > self.remaining:
            raise self.byte_range.damage_error(f"{what} has {nbytes} bytes, but {self.remaining} are left")
        start = self._position
        self._position += nbytes
        return self._data[start : self._position]

    def byte(self, what: str) -> int:
        """Return a one-byte number."""
        return self.take(1, what)[0]

    def varint(self, what: str, limit: int) -> int:
        """Return a varint of at most `limit`."""
        return int(self.varints(1, what, limit)[0])

    def count(self, what: str) -> int:
        """Return the number of entries that follow. Each entry has at least one byte."""
        number = int(self.wide_varints(1, what)[0])
        if number > self.remaining:
            raise self.byte_range.damage_error(f"{what} is {number}, but {self.remaining} bytes are left")
        return number

    def varints(self, count: int, what: str, limit: int) -> npt.NDArray[np.int64]:
        """Return a column of varints, each at most `limit`, which must be below 2**63."""
        numbers = self.wide_varints(count, what)
        if count and (largest := int(numbers.max())) > limit:
            raise self.byte_range.damage_error(f"{what} is {largest}, expected at most {limit}")
        return numbers.astype(np.int64)

    def wide_varints(self, count: int, what: str) -> npt.NDArray[np.uint64]:
        """Return a column of varints of up to 64 bits."""
        try:
            numbers, self._position = decode_varints(self._array, self._position, count)
        except ValueError as error:
            raise self.byte_range.damage_error(f"{what}: {error}") from error
        return numbers

    def bytes_column(self, count: int, what: str) -> npt.NDArray[np.uint8]:
        """Return a column of one-byte numbers."""
        return np.frombuffer(self.take(count, what), np.uint8)

    def fixed64(self, count: int, what: str) -> npt.NDArray[np.uint64]:
        """Return a column of 8-byte little-endian numbers."""
        return np.frombuffer(self.take(8 * count, what), "<u8").astype(np.uint64)

    def finish(self) -> None:
        """Raise an error if bytes are left."""
        if self.remaining:
            raise self.byte_range.damage_error(f"{self.remaining} bytes are left after its end")
