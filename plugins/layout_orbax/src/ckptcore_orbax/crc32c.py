"""CRC32C, the checksum of zarr 3's codec ``crc32c``, with concatenation of checksums."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import google_crc32c
import numpy as np

from ckptcore.model import Checksum

_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli polynomial, bit-reversed as in RFC 3720 appendix B.4: bit 31 is x^0, bit 0 is x^31."""

_NIBBLES: Final = 8
"""Number of 4-bit groups in a checksum."""


def crc32c_of(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC32C of contiguous bytes, without a copy. Thread-safe."""
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


class _Crc32c:
    """The type of `CRC32C`."""

    __slots__ = ()

    name = "crc32c"

    nbytes = 4

    is_enough = False

    def of(self, data: memoryview) -> int:
        """Return the checksum of contiguous bytes. Thread-safe."""
        return int(google_crc32c.value(np.frombuffer(data, np.uint8)))

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """Return the checksum of two consecutive byte ranges from their checksums.

        Takes a few microseconds.
        """
        # The initial and final XOR of the checksums cancel out, so appending n bytes multiplies
        # the first checksum by x^(8 n) and XORs it with the second.
        # Multiply once for each nonzero byte of the length: different lengths then share cached
        # tables. Building a table takes hundreds of times longer than using it.
        shift = 0
        while second_bytes >> shift:
            if part := second_bytes >> shift & 0xFF:
                first = self._appended(first, part << shift)
            shift += 8
        return first ^ second

    def _appended(self, first: int, nbytes: int) -> int:
        """Return ``first * x ** (8 * nbytes)`` modulo the polynomial."""
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
        """Return the stored form: little endian, as in the zarr 3 codec ``crc32c``."""
        return value.to_bytes(4, "little")

    def __reduce__(self) -> str:
        return "CRC32C"


CRC32C: Final[Checksum] = _Crc32c()
"""The checksum that follows each chunk."""


@lru_cache(maxsize=1024)
def _appending(nbytes: int) -> tuple[int, ...]:
    """Return ``x ** (8 * nbytes)`` times each value (0 to 15) of each nibble of a checksum, lowest nibble first."""
    factor = _power(nbytes)
    # Products of the 32 single bits; x^0 is bit 31.
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
    """Return ``x ** (8 * nbytes)`` modulo the polynomial."""
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
