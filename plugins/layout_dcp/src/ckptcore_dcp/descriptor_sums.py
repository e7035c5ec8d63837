"""The CRC-32 of a zip member, with the bytes that surround it after the member."""

from __future__ import annotations

from dataclasses import dataclass, field

from isal import isal_zlib

__all__ = ["DescriptorSum"]


@dataclass(frozen=True, slots=True)
class DescriptorSum:
    """Bytes after a zip member that contain its CRC-32: the data descriptor, or the rest of the zip. Thread-safe.

    Attributes:
        parts: the bytes between which the checksum is inserted, little endian. The checksum occurs
            ``len(parts) - 1`` times.
        nbytes: total length, with the checksums.
    """

    parts: tuple[bytes, ...]
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(map(len, self.parts)) + 4 * (len(self.parts) - 1))

    @property
    def name(self) -> str:
        """The name "CRC-32"."""
        return "CRC-32"

    def of(self, data: memoryview) -> int:
        """Return the CRC-32 of zip and zlib."""
        return isal_zlib.crc32(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """Return the CRC-32 of two consecutive byte ranges."""
        return isal_zlib.crc32_combine(first, second, second_bytes)

    def encode(self, value: int) -> bytes:
        """Return the parts joined by the checksum."""
        return value.to_bytes(4, "little").join(self.parts)
