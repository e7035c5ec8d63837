"""What a checkpoint says of the objects (files) it is made of: sizes and checksums of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["BLOCK_BYTES", "CHECKSUM_ALGORITHM", "CHECKSUM_BYTES", "ObjectRecord"]

BLOCK_BYTES: Final = 1 << 20
"""Bytes that one checksum covers; the last block of an object may be shorter."""

CHECKSUM_ALGORITHM: Final = "xxh3_64"
"""The name of the algorithm that new checksums use: XXH3 with 64 bits and seed 0."""

CHECKSUM_BYTES: Final = 8
"""Bytes of one checksum in `ObjectRecord.checksums`."""


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """An object of a checkpoint.

    Attributes:
        key: its name within the checkpoint, with ``/`` between directories.
        size: its bytes.
        checksums: the checksum of each block of `BLOCK_BYTES`, in order, each a little-endian uint64;
            empty where none were kept.
    """

    key: str
    size: int
    checksums: bytes = b""

    @property
    def blocks(self) -> int:
        """How many blocks the object has."""
        return -(-self.size // BLOCK_BYTES)
