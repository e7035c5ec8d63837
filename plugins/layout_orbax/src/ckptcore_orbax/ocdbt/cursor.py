"""A read position in bytes of a database. Checks each number against a limit before use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptcore.errors import CorruptCheckpointError
from ckptcore_orbax.ocdbt.varints import decode_varints


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
        found = int(self.wide_varints(1, what)[0])
        if found > self.remaining:
            raise self.byte_range.damage_error(f"{what} is {found}, but {self.remaining} bytes are left")
        return found

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
