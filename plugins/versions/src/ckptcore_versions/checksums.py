"""CRC-32, the checksum that follows each encoded chunk, so that a chunk can be read without its neighbours."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Final

from ckptcore.model import Checksum

_POLYNOMIAL: Final = 0xEDB88320
"""The polynomial of zlib and Ethernet, bit-reversed: bit 31 is x^0."""


class _Crc32:
    """The type of `CRC32`."""

    __slots__ = ()

    name = "CRC-32"

    nbytes = 4

    is_enough = True

    def of(self, data: memoryview) -> int:
        """Return the checksum of contiguous bytes."""
        return zlib.crc32(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """Return the checksum of two adjacent runs of bytes."""
        # To append n bytes multiplies the first checksum by x^(8 n); initial and final XOR cancel out.
        return _product(first, _power(second_bytes)) ^ second

    def encode(self, value: int) -> bytes:
        """Return the stored form, little endian."""
        return value.to_bytes(4, "little")


CRC32: Final[Checksum] = _Crc32()
"""The checksum that follows each encoded chunk."""


@lru_cache(maxsize=1024)
def _power(nbytes: int) -> int:
    """Return x^(8 nbytes) modulo the polynomial."""
    power, square = 1 << 31, 1 << 23
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        nbytes >>= 1
        square = _product(square, square)
    return power


def _product(first: int, second: int) -> int:
    """Multiply polynomials modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product
