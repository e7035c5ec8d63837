"""The CRC-32 in a data descriptor of a zip, as a checksum that stands behind the bytes of a member."""

from __future__ import annotations

from dataclasses import dataclass

from isal import isal_zlib

__all__ = ["DescriptorSum"]


@dataclass(frozen=True, slots=True)
class DescriptorSum:
    """The data descriptor of a member, that whoever reads its bytes can compare. Any thread.

    Attributes:
        sizes: what stands behind the checksum in it: the size of the member, compressed and not.
    """

    sizes: bytes

    @property
    def name(self) -> str:
        """CRC-32"""
        return "CRC-32"

    @property
    def nbytes(self) -> int:
        """Of the whole descriptor."""
        return 8 + len(self.sizes)

    def of(self, data: memoryview) -> int:
        """The CRC-32 of zip and zlib."""
        return isal_zlib.crc32(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """The CRC-32 of two runs of bytes, one after the other."""
        return isal_zlib.crc32_combine(first, second, second_bytes)

    def encode(self, value: int) -> bytes:
        """The whole descriptor."""
        return b"PK\x07\x08" + value.to_bytes(4, "little") + self.sizes
