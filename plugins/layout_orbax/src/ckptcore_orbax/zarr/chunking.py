"""Regular grids of chunks: the grid that an array is divided into, and its cells.

Amounts are in elements unless a name says bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import ArraySpec, Box

__all__ = [
    "MOST_CELLS",
    "chunks_of",
    "expect_countable",
    "flat_index",
    "is_aligned",
    "read_chunk",
    "unflat_index",
    "write_chunk",
]

MOST_CELLS: Final = 1 << 24
"""More chunks of one array than anybody writes; a hostile shape may state any number."""


def expect_countable(box: Box, step: Sequence[int], name: str) -> None:
    """Refuse a box that touches more cells than any array has, before they are listed.

    Raises:
        CorruptCheckpointError
    """
    cells = prod(
        [-(-stop // extent) - start // extent for start, stop, extent in zip(box.start, box.stop, step, strict=True)]
    )
    if cells > MOST_CELLS:
        raise CorruptCheckpointError(
            f"{name!r} is said to have {cells} chunks where at most {MOST_CELLS} are expected; what describes the "
            "arrays is damaged: restore it from a copy, or load another checkpoint"
        )


def flat_index(index: tuple[int, ...], grid: Sequence[int]) -> int:
    """The number of a cell in C order."""
    number = 0
    for position, extent in zip(index, grid, strict=True):
        number = number * extent + position
    return number


def unflat_index(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `flat_index`."""
    index = []
    for extent in reversed(grid):
        number, position = divmod(number, extent)
        index.append(position)
    return tuple(reversed(index))


_MOST_PIECES: Final = 64
"""Of an axis that is cut, before other axes are subdivided: a mesh seldom grows by more along one axis."""


def write_chunk(spec: ArraySpec, cuts: Sequence[Sequence[int]] | None, size: int) -> tuple[int, ...]:
    """The regular grid of chunks in which no two processes write one chunk; at least 1 along each axis.

    Where all shards are as long along an axis (the last may be shorter), a chunk is as long as a shard. Where they are
    not and there is one process, chunks are as long as the longest shard and cross the boundaries of shards. Where
    there are several, chunks are as long as the greatest common divisor of all boundaries. That may be 1: ten rows cut
    at 3, 5 and 8 become ten chunks of a row each, and a leaf costs an object, or a key of a few dozen bytes, for each.

    Args:
        spec: the array.
        cuts: as in `ArrayRecord.cuts`: per axis the sorted inner boundaries of shards, or None where nothing is cut.
        size: how many processes write.
    """
    if cuts is None:
        return tuple([max(1, extent) for extent in spec.shape])
    return tuple([_write_extent(extent, boundaries, size) for extent, boundaries in zip(spec.shape, cuts, strict=True)])


def _write_extent(extent: int, boundaries: Sequence[int], size: int) -> int:
    if not boundaries:
        return max(1, extent)
    shards = [stop - start for start, stop in itertools.pairwise([0, *boundaries, extent])]
    longest = max(shards)
    if size == 1 or (shards[-1] <= longest and all(shard == longest for shard in shards[:-1])):
        return longest
    return gcd(*boundaries)


def read_chunk(
    spec: ArraySpec, write_chunk: tuple[int, ...], cuts: Sequence[Sequence[int]] | None, chunk_bytes: int
) -> tuple[int, ...]:
    """The chunks into which a write chunk is subdivided, so that a reader of other boxes needs few bytes beside its own.

    A write chunk of up to `chunk_bytes` stays whole. A longer one is divided along the axis that is cut most often,
    into up to 64 pieces: that is the axis along which another mesh is most likely to cut it further. Then along the
    other axes that are cut, then along any, the leading one first, so that rows stay contiguous. Pieces get at most
    `chunk_bytes`, and more than half of that where the factors of the extents allow; their number is a multiple of a
    high power of two, since meshes double.

    Args:
        spec: the array.
        write_chunk: as the function of this name gives it.
        cuts: as in `ArrayRecord.cuts`.
        chunk_bytes: the most bytes of a piece, if one element has no more; above 0.
    """
    target = max(1, chunk_bytes // spec.numpy_dtype.itemsize)
    chunk = list(write_chunk)
    counts = [len(boundaries) for boundaries in cuts] if cuts is not None else [0] * len(chunk)
    order = sorted(range(len(chunk)), key=lambda axis: -counts[axis])
    for axis in order:
        if counts[axis]:
            chunk[axis] //= _pieces(chunk[axis], prod(chunk), target, _MOST_PIECES)
    for axis in order:
        chunk[axis] //= _pieces(chunk[axis], prod(chunk), target, chunk[axis])
    if prod(chunk) > target:
        _overshoot(chunk, write_chunk, order, target)
    return tuple(chunk)


def _overshoot(chunk: list[int], write_chunk: tuple[int, ...], order: Sequence[int], target: int) -> None:
    """Divide a chunk further where no number of pieces comes near the target: into too many, and not more than needed."""
    for axis in order:
        if prod(chunk) > target:
            enough = (pieces for pieces in _divisors(chunk[axis]) if prod(chunk) <= pieces * target)
            chunk[axis] //= min(enough, default=chunk[axis])
    # What was divided before the last axis was may have been in vain.
    for axis in reversed(order):
        room = target // prod(chunk)
        chunk[axis] *= max(pieces for pieces in _divisors(write_chunk[axis] // chunk[axis]) if pieces <= room)


def _pieces(extent: int, elements: int, target: int, most: int) -> int:
    """Into how many pieces to cut an axis of a chunk of so many elements, which is to have up to `target`.

    So many that pieces come between half the target and the target; if none do, as many as leave more than the target.
    """
    if elements <= target:
        return 1
    divisors = [pieces for pieces in _divisors(extent) if pieces <= most]
    fitting = [pieces for pieces in divisors if target < 2 * (elements // pieces) and elements <= pieces * target]
    if fitting:
        return max(fitting, key=lambda pieces: (pieces & -pieces, -pieces))
    return max(pieces for pieces in divisors if elements > pieces * target or pieces == 1)


def _divisors(extent: int) -> list[int]:
    """The numbers that divide an extent, ascending."""
    factors: list[int] = []
    rest, factor = extent, 2
    while factor * factor <= rest:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1
    if rest > 1:
        factors.append(rest)
    found = {1}
    for factor in factors:
        found |= {divisor * factor for divisor in found}
    return sorted(found)


def chunks_of(chunk: tuple[int, ...], box: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The index and the box of each chunk of a regular grid that holds elements of a box, in C order.

    Chunks are whole: those at the edge of an array may go beyond it, as they do where they are stored.
    """
    if box.size == 0:
        return
    ranges = [
        range(start // size, -(-stop // size)) for start, stop, size in zip(box.start, box.stop, chunk, strict=True)
    ]
    for index in itertools.product(*ranges):
        start = tuple(map(int.__mul__, index, chunk))
        yield index, Box(start, tuple(map(int.__add__, start, chunk)))


def is_aligned(shape: tuple[int, ...], chunk: tuple[int, ...], box: Box) -> bool:
    """Whether a box of an array of this shape is made of whole chunks; at its edge a chunk ends where the array does."""
    return all(
        start % size == 0 and (stop % size == 0 or stop == extent)
        for start, stop, size, extent in zip(box.start, box.stop, chunk, shape, strict=True)
    )
