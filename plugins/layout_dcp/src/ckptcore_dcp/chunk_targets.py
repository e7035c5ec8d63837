"""A chunk that is read, and the arrays that want elements of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ckptcore.model import Box, HostArray
from ckptcore_dcp.state import Chunk

__all__ = ["ChunkTargets", "Target"]

Target: TypeAlias = tuple[int, Box, HostArray]
"""The number of an array, its box and its memory."""


@dataclass(slots=True)
class ChunkTargets:
    """A chunk, and the arrays that want elements of it.

    Attributes:
        leaf: the array that it is of.
        chunk: where it is.
        targets: the number, box and buffer of each.
    """

    leaf: int
    chunk: Chunk
    targets: list[Target] = field(default_factory=list)
