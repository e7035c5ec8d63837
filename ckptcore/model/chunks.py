"""Chunks: boxes of arrays that are stored by themselves, and where their bytes are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import Checksum

__all__ = ["Chunk", "ChunkPlaces"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of an array that is stored by itself, as the metadata describes it.

    Attributes:
        key: the object that holds it.
        offset: its first byte in the object; if the metadata does not tell that, a number that orders chunks.
        box: where it is in the array; may reach beyond the end of the array, if it is stored so.
        is_plain: whether any of its elements can be read, and verified, without the rest of the chunk.
        is_exact: whether its elements are known to be at this offset of this object, in C order, little endian,
            uncompressed, without a checksum behind them. Such chunks are read without `ChunkIndex.locate`.
        leaf: the number of the array in the tree.
        number: the index's own number of the chunk, unique within the array.
    """

    key: str
    offset: int
    box: Box
    is_plain: bool
    is_exact: bool = False
    leaf: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Where the chunks of a batch are. Columns and mappings have a row for each chunk, in the order of the batch.

    Attributes:
        keys: the object of each chunk; empty for chunks that are `inline` or have a `fill`.
        starts: the first byte in the object.
        stops: by row, where encoded chunks end in the object; None: at its end.
        encoded: rows of chunks that are passed to `ChunkIndex.decode`; all others are elements in C order, little
            endian, uncompressed.
        checksums: by row, the checksum right behind the bytes of a raw chunk.
        inline: by row, the bytes of a chunk that is stored with its key.
        fills: by row, the value of all elements of a chunk that is not stored.
    """

    keys: Sequence[str]
    starts: Sequence[int]
    stops: Mapping[int, int | None] = field(default_factory=dict)
    encoded: Collection[int] = frozenset()
    checksums: Mapping[int, Checksum] = field(default_factory=dict)
    inline: Mapping[int, bytes] = field(default_factory=dict)
    fills: Mapping[int, HostArray] = field(default_factory=dict)
