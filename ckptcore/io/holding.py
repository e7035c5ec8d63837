"""Holding objects of a checkpoint open, in the way that suits each, with memory that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ckptcore.io.checksums import RecordedChecksums
from ckptcore.io.held_objects import HeldObject, KeptObject, NearObject, VerifiedBlocks
from ckptcore.io.marked_objects import LastBlock, MarkedObject
from ckptcore.io.sources import is_held_reader
from ckptcore.protocols import HeldReader, RangeReader

__all__ = ["Holding"]


class Holding:
    """Makes held objects of a checkpoint. Any thread."""

    def __init__(self, block_bytes: int, count: Callable[[int], None]) -> None:
        """Hold nothing yet.

        Args:
            block_bytes: what one checksum covers.
            count: is told how many bytes were read, each time.
        """
        self._count = count
        self._last = LastBlock(block_bytes)
        self._blocks = VerifiedBlocks(block_bytes)

    def of(self, key: str, reader: RangeReader, size: int, sums: RecordedChecksums | None) -> HeldObject:
        """An object to read parts of.

        Args:
            key: the object, for errors.
            reader: it, open.
            size: its bytes, as they are known; may be hostile.
            sums: the checksums of its blocks; None: what is read is not verified.
        """
        if is_held_reader(type(reader)):
            near = cast(HeldReader, reader)
            if sums is None:
                return NearObject(key, near, size, self._count)
            return MarkedObject(key, near, size, self._count, sums, self._last)
        if sums is None:
            return HeldObject(key, reader, size, self._count)
        return KeptObject(key, reader, size, self._count, sums, self._blocks)
