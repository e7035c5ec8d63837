"""CRC-32, the checksum that follows each encoded chunk, so that a chunk can be read without its neighbours."""

from __future__ import annotations

from typing import Final

from isal import isal_zlib

from ckptcore.model import Checksum


class _Crc32:
    """The type of `CRC32`."""

    __slots__ = ()

    name = "CRC-32"

    nbytes = 4

    is_enough = True

    def of(self, data: memoryview) -> int:
        """Return the checksum of contiguous bytes."""
        return isal_zlib.crc32(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """Return the checksum of two adjacent runs of bytes."""
        return isal_zlib.crc32_combine(first, second, second_bytes)

    def encode(self, value: int) -> bytes:
        """Return the stored form, little endian."""
        return value.to_bytes(4, "little")


CRC32: Final[Checksum] = _Crc32()
"""The checksum that follows each encoded chunk."""
