"""CRC32C, the checksum of zarr 3's codec ``crc32c``: of bytes, and of two runs of bytes from those of each."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import google_crc32c
import numpy as np

from ckptcore.model import Checksum

__all__ = ["CRC32C", "crc32c_of"]

_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli's, bit-reversed as in RFC 3720 appendix B.4: bit 31 stands for x^0, bit 0 for x^31."""

_NIBBLES: Final = 8
"""Of 4 bits each, in a checksum of 32."""


def crc32c_of(data: bytes | bytearray | memoryview) -> int:
    """The CRC32C of bytes, contiguous in memory and not copied. Any thread."""
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


class _Crc32c:
    """The one object that is `CRC32C`."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """As zarr 3 names the codec."""
        return "crc32c"

    @property
    def nbytes(self) -> int:
        """Bytes of a checksum in a file."""
        return 4

    def of(self, data: memoryview) -> int:
        """The checksum of bytes that are contiguous in memory. Any thread."""
        return int(google_crc32c.value(np.frombuffer(data, np.uint8)))

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """The checksum of two runs of bytes, one right behind the other, from the checksum of each.

        Takes a few microseconds.
        """
        # What a checksum begins and ends with cancels out, so appending bytes multiplies by x^(8 n), and adds theirs.
        # Byte by byte of the length, of which there are few: a table is 100 times dearer to make than to use.
        shift = 0
        while second_bytes >> shift:
            if part := second_bytes >> shift & 0xFF:
                first = self._appended(first, part << shift)
            shift += 8
        return first ^ second

    def _appended(self, first: int, nbytes: int) -> int:
        """The checksum of a run of bytes and so many zeros, but for what it begins and ends with."""
        low, high = first & 0xFFFF, first >> 16
        table = _appending(nbytes)
        return (
            table[low & 15]
            ^ table[16 + (low >> 4 & 15)]
            ^ table[32 + (low >> 8 & 15)]
            ^ table[48 + (low >> 12)]
            ^ table[64 + (high & 15)]
            ^ table[80 + (high >> 4 & 15)]
            ^ table[96 + (high >> 8 & 15)]
            ^ table[112 + (high >> 12)]
        )

    def encode(self, value: int) -> bytes:
        """A checksum as it stands in a file: little endian, as the zarr 3 codec ``crc32c`` says."""
        return value.to_bytes(4, "little")

    def __reduce__(self) -> str:
        return "CRC32C"


CRC32C: Final[Checksum] = _Crc32c()
"""The checksum that stands behind each chunk."""


@lru_cache(maxsize=1024)
def _appending(nbytes: int) -> tuple[int, ...]:
    """What appending bytes makes of a checksum: for each of its nibbles, lowest first, a table of 16 products."""
    factor = _power(nbytes)
    # The products of the 32 single bits; x^0 is bit 31.
    bits = [factor] * 32
    for bit in range(30, -1, -1):
        bits[bit] = _times_x(bits[bit + 1])
    table = [0] * (16 * _NIBBLES)
    for entry in range(16 * _NIBBLES):
        nibble, value = divmod(entry, 16)
        for bit in range(4):
            if value >> bit & 1:
                table[entry] ^= bits[4 * nibble + bit]
    return tuple(table)


def _power(nbytes: int) -> int:
    """``x ** (8 * nbytes)``, modulo the polynomial."""
    power = 1 << 31
    square = 1 << 23
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        nbytes >>= 1
        if nbytes:
            square = _product(square, square)
    return power


def _product(first: int, second: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = _times_x(second)
    return product


def _times_x(value: int) -> int:
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
