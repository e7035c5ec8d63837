"""The CRC-32 of a member of a zip, with the bytes that stand around it behind the member."""

from __future__ import annotations

from dataclasses import dataclass, field

from isal import isal_zlib

__all__ = ["DescriptorSum"]


@dataclass(frozen=True, slots=True)
class DescriptorSum:
    """What follows the bytes of a member and depends on their CRC-32: the data descriptor, or all up to the end. Any thread.

    Attributes:
        parts: the bytes between which the checksum stands, little endian; it stands there once less than there are
            parts.
        nbytes: of all of it.
    """

    parts: tuple[bytes, ...]
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(map(len, self.parts)) + 4 * (len(self.parts) - 1))

    @property
    def name(self) -> str:
        """CRC-32"""
        return "CRC-32"

    def of(self, data: memoryview) -> int:
        """The CRC-32 of zip and zlib."""
        return isal_zlib.crc32(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """The CRC-32 of two runs of bytes, one after the other."""
        return isal_zlib.crc32_combine(first, second, second_bytes)

    def encode(self, value: int) -> bytes:
        """The parts with the checksum between them."""
        return value.to_bytes(4, "little").join(self.parts)
