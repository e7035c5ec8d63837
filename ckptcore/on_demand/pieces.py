"""Pieces of arrays in storage order, and batches of pieces. Each batch is one read. Pure functions."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from ckptcore.io.elements import c_strides, flat_range
from ckptcore.model.arrays import Box
from ckptcore.model.transfer import Chunk
from ckptcore.planning.partition import boxes_of_range, cut_box
from ckptcore.records import dataclass

ALIGNMENT: Final = 64
"""Alignment of elements in a message, in bytes: enough for any dtype and for vector instructions."""


Order: TypeAlias = tuple[str, int, int, tuple[int, ...]]
"""Sort key of pieces in storage order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Sizes of batches, in bytes.

    Attributes:
        aim: target for the average size.
        most: maximum size, unless one element is larger.
        block: size of a block. In an object, batches end at multiples of this size, if possible.
    """

    aim: int
    most: int
    block: int


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of an array, and the location of its bytes.

    Attributes:
        leaf: the number of the array in the tree.
        box: a box of the array, within one chunk if chunks are known.
        itemsize: bytes per element.
        chunk: the chunk that contains the box; None if unknown.
        start, stop: the half-open range of its bytes in the object. If the chunk can only be read whole, both are the
            offset of the chunk; if the chunk is unknown, both are 0.
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
        """The sort key: the object, then the offset in it. Pieces with an unknown location come first.

        For chunks that are read whole: the object, then the leaf, then the offset.
        """
        chunk = self.chunk
        if chunk is not None and chunk.is_plain:
            return chunk.key, self.start, self.leaf, self.box.start
        return "" if chunk is None else chunk.key, self.leaf, self.start, self.box.start

    @property
    def nbytes(self) -> int:
        """Aligned size of the piece in a message, in bytes."""
        return -(-self.box.size * self.itemsize // ALIGNMENT) * ALIGNMENT

    def cut_at(self, position: int) -> tuple[list[StoredPiece], list[StoredPiece]] | None:
        """Cut the piece at an offset in the object. Returns the pieces before and after it; None if this is impossible.

        If the offset is inside an element, the element belongs to the second part.
        """
        chunk = self.chunk
        if chunk is None or not chunk.is_plain or not self.start < position < self.stop:
            return None
        if flat_range(chunk.box.shape, self.box.relative(chunk.box.start)) is None:
            return None  # its bytes are not contiguous
        first, middle, last = [(byte - chunk.offset) // self.itemsize for byte in (self.start, position, self.stop)]
        if middle <= first:
            return None
        return self._run(chunk, first, middle), self._run(chunk, middle, last)

    def _run(self, chunk: Chunk, first: int, last: int) -> list[StoredPiece]:
        """Return the pieces of a flat range of elements of a chunk, in C order."""
        corner = chunk.box.start
        return [
            StoredPiece.of(
                self.leaf,
                Box(tuple(map(int.__add__, corner, start)), tuple(map(int.__add__, corner, stop))),
                self.itemsize,
                chunk,
            )
            for start, stop in boxes_of_range(chunk.box.shape, first, last)
        ]


class ChunkLookup:
    """Finds the chunks of an array that intersect a box."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        """Index chunks that do not overlap."""
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
        """True if every chunk can be read in parts."""
        return all(chunk.is_plain for chunk in self._chunks)

    def parts(self, box: Box) -> Iterator[tuple[Box, Chunk]]:
        """Yield the intersection of a non-empty box with each chunk that it intersects, and this chunk."""
        chunks: Sequence[Chunk] = self._chunks
        if chunks and box.start:
            first = bisect.bisect_right(self._starts, box.start[self._axis] - self._longest)
            chunks = chunks[first : bisect.bisect_left(self._starts, box.stop[self._axis])]
        for chunk in chunks:
            common = chunk.box.intersect(box)
            if common is not None:
                yield common, chunk


def pieces_of(leaf: int, box: Box, itemsize: int, chunks: ChunkLookup) -> list[StoredPiece]:
    """Cut a box at chunk borders. Returns one piece with an unknown location if the chunks do not cover the box."""
    pieces = [StoredPiece.of(leaf, part, itemsize, chunk) for part, chunk in chunks.parts(box)]
    if sum([piece.box.size for piece in pieces]) != box.size:
        return [StoredPiece(leaf, box, itemsize)]
    return pieces


def batches_of(pieces: Iterable[StoredPiece], sizes: BatchSizes) -> Iterator[list[StoredPiece]]:
    """Sort pieces by storage order and divide them into batches. Each batch is one read.

    Batches end at block boundaries if possible: a block is read whole for its checksum, and would be read twice if two
    batches shared it. Pieces of a chunk that can only be read whole stay together if possible.

    Args:
        pieces: pieces that do not overlap.
        sizes: sizes of batches. If a batch differs from the aim, the next batches compensate for it.
    """
    queue = deque(_groups(pieces))
    batch: list[list[StoredPiece]] = []
    held = total = ended = 0
    while queue:
        group = queue.popleft()
        nbytes = sum([piece.nbytes for piece in group])
        room = min(sizes.most, max(1, (ended + 1) * sizes.aim - total)) - held
        if nbytes <= room:
            batch.append(group)
            held += nbytes
            continue
        near = group[0].start + min(room + sizes.block // 2, sizes.most - held - _slack(group[0]))
        border = near // sizes.block * sizes.block
        is_plain = group[0].chunk is not None and group[0].chunk.is_plain
        if is_plain and group[0].stop <= border:
            batch.append(group)  # it ends at or before the border where the batch should end
            held += nbytes
            continue
        if (parts := group[0].cut_at(border)) is not None:
            batch.extend([piece] for piece in parts[0])
            queue.extendleft([piece] for piece in reversed(parts[1]))
        elif not is_plain and held + nbytes <= sizes.most and (not batch or nbytes <= 2 * room):
            batch.append(group)  # the size is closer to the aim with this group
        elif batch:
            queue.appendleft(group)
            queue.extendleft(reversed(_take_back(batch, group[0], sizes.block)))
        else:
            smaller = [
                _smaller(piece, box) for piece in group for box in cut_box(piece.box, piece.itemsize, sizes.most)
            ]
            if len(smaller) > 1:
                queue.extendleft([piece] for piece in reversed(smaller))
                continue
            batch.append(group)
        yield [piece for group in batch for piece in group]
        total += sum([piece.nbytes for group in batch for piece in group])
        ended += 1
        batch, held = [], 0
    if batch:
        yield [piece for group in batch for piece in group]


def _groups(pieces: Iterable[StoredPiece]) -> Iterator[list[StoredPiece]]:
    """Yield pieces in order, in groups: pieces of a chunk that can only be read whole are one group."""

    def group_of(piece: StoredPiece) -> tuple[int, Box]:
        alone = piece.chunk is None or piece.chunk.is_plain
        return piece.leaf, piece.box if alone or piece.chunk is None else piece.chunk.box

    for _, together in itertools.groupby(sorted(pieces, key=lambda piece: piece.order), group_of):
        yield list(together)


def _smaller(piece: StoredPiece, box: Box) -> StoredPiece:
    if piece.chunk is None:
        return StoredPiece(piece.leaf, box, piece.itemsize)
    return StoredPiece.of(piece.leaf, box, piece.itemsize, piece.chunk)


def _slack(piece: StoredPiece) -> int:
    """Return the maximum padding in bytes that a cut adds.

    A cut makes at most two parts per axis on each side, and each part is aligned.
    """
    return 2 * ALIGNMENT * max(1, len(piece.box.start))


def _take_back(batch: list[list[StoredPiece]], following: StoredPiece, block_bytes: int) -> list[list[StoredPiece]]:
    """Remove and return pieces at the end of a batch that share a block with the next piece.

    Removes nothing if the batch would become empty.
    """
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
