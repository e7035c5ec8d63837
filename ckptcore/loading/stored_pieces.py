"""Pieces of arrays in the order in which they are stored, and batches of them that are read at once. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from ckptcore.io.elements import c_strides, flat_boxes, run_axis
from ckptcore.model.arrays import Box
from ckptcore.model.transfer import Chunk
from ckptcore.planning.partition import cut_box

__all__ = ["ALIGNMENT", "BatchSizes", "ChunkLookup", "Order", "StoredPiece", "batches_of", "pieces_of"]

ALIGNMENT: Final = 64
"""Alignment of elements in a message, in bytes: enough for any dtype and for vector instructions."""


Order: TypeAlias = tuple[str, int, int, tuple[int, ...]]
"""Sort key of pieces in the order in which they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Lengths of batches in bytes.

    Attributes:
        aim: the average.
        most: the maximum, unless one element is larger.
        block: batches end at multiples of it in an object.
    """

    aim: int
    most: int
    block: int


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of an array, and the place of its bytes.

    Attributes:
        leaf: the array.
        box: of the array, within one chunk if chunks are known.
        itemsize: bytes per element.
        chunk: that contains the box; None if unknown.
        start, stop: the range of its bytes in the object of the chunk, as far as known.
    """

    leaf: int
    box: Box
    itemsize: int
    chunk: Chunk | None = None
    start: int = 0
    stop: int = 0

    @classmethod
    def of(cls, leaf: int, box: Box, itemsize: int, chunk: Chunk) -> StoredPiece:
        """Return the piece of a box in a chunk."""
        if not chunk.is_plain:
            return cls(leaf, box, itemsize, chunk, chunk.offset, chunk.offset)
        strides = c_strides(chunk.box.shape)
        first = sum(
            [(at - corner) * step for at, corner, step in zip(box.start, chunk.box.start, strides, strict=True)]
        )
        last = sum(
            [(at - 1 - corner) * step for at, corner, step in zip(box.stop, chunk.box.start, strides, strict=True)]
        )
        return cls(leaf, box, itemsize, chunk, chunk.offset + first * itemsize, chunk.offset + (last + 1) * itemsize)

    @property
    def order(self) -> Order:
        """The sort key: object and place in it. Pieces without a known place come first."""
        chunk = self.chunk
        if chunk is not None and chunk.is_plain:
            return chunk.key, self.start, self.leaf, self.box.start
        return "" if chunk is None else chunk.key, self.leaf, self.start, self.box.start

    @property
    def nbytes(self) -> int:
        """Bytes of the piece in a message."""
        return -(-self.box.size * self.itemsize // ALIGNMENT) * ALIGNMENT

    def cut_at(self, position: int) -> tuple[list[StoredPiece], list[StoredPiece]] | None:
        """Return the pieces before a byte of the object and those behind it, in order; None if it cannot be cut there.

        An element that contains the byte belongs to the pieces behind.
        """
        chunk = self.chunk
        if chunk is None or not chunk.is_plain or not self.start < position < self.stop:
            return None
        shape, corner = chunk.box.shape, chunk.box.start
        inside = tuple(map(int.__sub__, self.box.start, corner)), tuple(map(int.__sub__, self.box.stop, corner))
        if prod(self.box.shape[: run_axis(shape, inside)]) != 1:
            return None  # its bytes do not follow each other
        first, middle, last = [(byte - chunk.offset) // self.itemsize for byte in (self.start, position, self.stop)]
        if middle <= first:
            return None
        return self._run(chunk, first, middle), self._run(chunk, middle, last)

    def _run(self, chunk: Chunk, first: int, last: int) -> list[StoredPiece]:
        """Return the pieces of a range of elements of a chunk, in C order."""
        corner = chunk.box.start
        return [
            StoredPiece.of(
                self.leaf,
                Box(tuple(map(int.__add__, corner, start)), tuple(map(int.__add__, corner, stop))),
                self.itemsize,
                chunk,
            )
            for start, stop in flat_boxes(chunk.box.shape, first, last)
        ]


class ChunkLookup:
    """The chunks of an array, found by boxes."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        """Take chunks that do not overlap."""
        self._chunks = list(chunks)
        self._axis = 0
        axes = range(len(self._chunks[0].box.start)) if self._chunks else ()
        counts = [len({chunk.box.start[axis] for chunk in self._chunks}) for axis in axes]
        if counts:
            self._axis = axis = counts.index(max(counts))
            self._chunks.sort(key=lambda chunk: (chunk.box.start[axis], chunk.box.start))
            self._starts = [chunk.box.start[axis] for chunk in self._chunks]
            self._longest = max([chunk.box.shape[axis] for chunk in self._chunks])

    @property
    def is_plain(self) -> bool:
        """True if every part of every chunk can be read alone."""
        return all(chunk.is_plain for chunk in self._chunks)

    def parts(self, box: Box) -> Iterator[tuple[Box, Chunk]]:
        """Yield the part of a non-empty box in each chunk, with the chunk."""
        chunks: Sequence[Chunk] = self._chunks
        if chunks and box.start:
            first = bisect.bisect_right(self._starts, box.start[self._axis] - self._longest)
            chunks = chunks[first : bisect.bisect_left(self._starts, box.stop[self._axis])]
        for chunk in chunks:
            common = chunk.box.intersect(box)
            if common is not None:
                yield common, chunk


def pieces_of(leaf: int, box: Box, itemsize: int, chunks: ChunkLookup) -> list[StoredPiece]:
    """Return the pieces of a box in chunks; one piece without a place if the chunks do not cover it."""
    pieces = [StoredPiece.of(leaf, part, itemsize, chunk) for part, chunk in chunks.parts(box)]
    if sum([piece.box.size for piece in pieces]) != box.size:
        return [StoredPiece(leaf, box, itemsize)]
    return pieces


def batches_of(pieces: Iterable[StoredPiece], sizes: BatchSizes) -> Iterator[list[StoredPiece]]:
    """Yield batches that are read at once, in the order in which they are stored.

    A batch ends at the end of a block of the object: a block is read whole for its checksum, and twice if it is in two
    batches. Pieces of one chunk that is only read whole stay together. If neither fits, a batch ends anywhere.

    Args:
        pieces: that do not overlap.
        sizes: of batches. If one is longer or shorter than the aim to end at a block, the next ones balance it.
    """
    queue = deque(_units(pieces))
    batch: list[list[StoredPiece]] = []
    held = given = ended = 0
    while queue:
        unit = queue.popleft()
        nbytes = sum([piece.nbytes for piece in unit])
        room = min(sizes.most, max(1, (ended + 1) * sizes.aim - given)) - held
        if nbytes <= room:
            batch.append(unit)
            held += nbytes
            continue
        near = unit[0].start + min(room + sizes.block // 2, sizes.most - held - _slack(unit[0]))
        border = near // sizes.block * sizes.block
        is_plain = unit[0].chunk is not None and unit[0].chunk.is_plain
        if is_plain and unit[0].stop <= border:
            batch.append(unit)  # the block ends behind it
            held += nbytes
            continue
        if (parts := unit[0].cut_at(border)) is not None:
            batch.extend([piece] for piece in parts[0])
            queue.extendleft([piece] for piece in reversed(parts[1]))
        elif not is_plain and held + nbytes <= sizes.most and (not batch or nbytes <= 2 * room):
            batch.append(unit)  # nearer to the aim than without it
        elif batch:
            queue.appendleft(unit)
            queue.extendleft(reversed(_take_back(batch, unit[0], sizes.block)))
        else:
            smaller = [_smaller(piece, box) for piece in unit for box in cut_box(piece.box, piece.itemsize, sizes.most)]
            if len(smaller) > 1:
                queue.extendleft([piece] for piece in reversed(smaller))
                continue
            batch.append(unit)
        yield [piece for unit in batch for piece in unit]
        given += sum([piece.nbytes for unit in batch for piece in unit])
        ended += 1
        batch, held = [], 0
    if batch:
        yield [piece for unit in batch for piece in unit]


def _units(pieces: Iterable[StoredPiece]) -> Iterator[list[StoredPiece]]:
    """Yield pieces in order; those of a chunk that is only read whole together."""

    def unit_of(piece: StoredPiece) -> tuple[int, Box]:
        alone = piece.chunk is None or piece.chunk.is_plain
        return piece.leaf, piece.box if alone or piece.chunk is None else piece.chunk.box

    for _, together in itertools.groupby(sorted(pieces, key=lambda piece: piece.order), unit_of):
        yield list(together)


def _smaller(piece: StoredPiece, box: Box) -> StoredPiece:
    if piece.chunk is None:
        return StoredPiece(piece.leaf, box, piece.itemsize)
    return StoredPiece.of(piece.leaf, box, piece.itemsize, piece.chunk)


def _slack(piece: StoredPiece) -> int:
    """Return the bytes that the parts of a run need for their alignment: two parts for each axis at most."""
    return 2 * ALIGNMENT * max(1, len(piece.box.start))


def _take_back(batch: list[list[StoredPiece]], following: StoredPiece, block_bytes: int) -> list[list[StoredPiece]]:
    """Remove pieces at the end of a batch that share a block with the next one, unless these are all; return them."""
    border = following.start // block_bytes * block_bytes
    kept = list(batch)
    taken: list[list[StoredPiece]] = []
    while kept:
        *_, last = kept[-1]
        same = last.chunk is not None and following.chunk is not None and last.chunk.key == following.chunk.key
        if not same or last.stop <= border or not last.chunk or not last.chunk.is_plain:
            break
        kept.pop()
        if (parts := last.cut_at(border)) is not None:
            kept.extend([piece] for piece in parts[0])
            taken.extend([piece] for piece in reversed(parts[1]))
            break
        if last.start < border:
            kept.append([last])
            break
        taken.append([last])
    if not kept:
        return []
    batch[:] = kept
    return taken[::-1]
