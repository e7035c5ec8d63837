"""Sizes that the engine works with, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptcore.model import BLOCK_BYTES

__all__ = ["SIZES", "Sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes; tests make them small.

    Attributes:
        block: what one checksum covers.
        task: what a thread moves before it looks for other work, where there is so much; a multiple of `block`.
        inline: objects and reads of fewer bytes are left to the calling thread alone.
        direct: from here on bytes that only one array wants, as they are, are read straight into it.
        run: from here on each run of elements of a box is read straight into its array, block by block.
    """

    block: int = BLOCK_BYTES
    task: int = 4 << 20
    inline: int = 1 << 20
    direct: int = 64 << 10
    run: int = 4 << 20


SIZES: Final = Sizes()
"""The sizes that suit memory and local disks."""
