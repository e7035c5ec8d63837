"""Sizes that the engine works with, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ckptcore.model import BLOCK_BYTES

__all__ = ["SIZES", "Sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes; tests make them small.

    Attributes:
        block: what one checksum covers.
        task: what a thread reads before it looks for other work, where there is so much; a multiple of `block`.
        write: what a thread copies, checks and writes at a time; a multiple of `block`, small enough for a processor's
            cache.
        inline: objects and reads of fewer bytes are left to the calling thread alone.
        direct: from here on bytes that only one array wants, as they are, are read straight into it.
        run: from here on each run of elements of a box is read straight into its array, block by block.
    """

    block: int = BLOCK_BYTES
    task: int = 4 << 20
    write: int = BLOCK_BYTES
    inline: int = 1 << 20
    direct: int = 64 << 10
    run: int = 4 << 20

    def for_parts(self, part_bytes: int) -> Sizes:
        """The sizes that suit a storage of which a request carries so many bytes; 1: as they are."""
        if part_bytes == 1:
            return self
        return replace(self, write=-(-part_bytes // self.block) * self.block)

    def for_requests(self, request_bytes: int) -> Sizes:
        """The sizes that suit a storage of which many requests of so many bytes are under way: each is a task."""
        return replace(self, task=max(self.block, request_bytes // self.block * self.block))


SIZES: Final = Sizes()
"""The sizes that suit memory and local disks."""
