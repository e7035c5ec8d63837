"""Regular chunk grids: chooses the grid of an array, and enumerates its chunks.

Sizes are in elements unless a name says bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import ArraySpec, Box

MAX_CHUNKS: Final = 1 << 24
"""Limit for the number of chunks of one array that are read at a time. A hostile shape may state any number.

An array of 1 GB with a chunk for each row of 64 bytes is valid, so code that enumerates chunks works in small batches.
"""


def check_chunk_count(box: Box, step: Sequence[int], name: str) -> None:
    """Reject a box with more than `MAX_CHUNKS` chunks, before they are enumerated.

    Raises:
        CorruptCheckpointError: the box has too many chunks.
    """
    cells = prod(
        [-(-stop // extent) - start // extent for start, stop, extent in zip(box.start, box.stop, step, strict=True)]
    )
    if cells > MAX_CHUNKS:
        raise CorruptCheckpointError(
            f"{name!r} states {cells} chunks, of which at most {MAX_CHUNKS} are read at a time. Load a part of it. If "
            "its shape is wrong, its metadata is damaged: restore it from a copy, or load another checkpoint"
        )


def flatten_index(index: tuple[int, ...], grid: Sequence[int]) -> int:
    """Return the number of a chunk in C order."""
    number = 0
    for position, extent in zip(index, grid, strict=True):
        number = number * extent + position
    return number


def unflatten_index(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse of `flatten_index`."""
    index = []
    for extent in reversed(grid):
        number, position = divmod(number, extent)
        index.append(position)
    return tuple(reversed(index))


_MAX_PIECES: Final = 64
"""Maximum pieces along a sharded axis before other axes are divided: meshes rarely grow more along one axis."""


def write_chunk_shape(spec: ArraySpec, cuts: Sequence[Sequence[int]] | None, size: int) -> tuple[int, ...]:
    """Return the regular chunk shape in which no two processes write one chunk; at least 1 along each axis.

    If all shards have equal length along an axis (the last may be shorter), this is the chunk
    length. Otherwise, with one process, chunks have the length of the longest shard and cross shard
    boundaries. With several processes, chunks have the greatest common divisor of all boundaries,
    which may be 1: ten rows with boundaries 3, 5 and 8 become ten chunks of one row, each an object
    or a key of a few dozen bytes.

    Args:
        spec: the array.
        cuts: as in `ArrayRecord.cuts`: the sorted inner shard boundaries per axis, or None.
        size: number of processes that write.
    """
    if cuts is None:
        return tuple([max(1, extent) for extent in spec.shape])
    return tuple(
        [_write_chunk_extent(extent, boundaries, size) for extent, boundaries in zip(spec.shape, cuts, strict=True)]
    )


def _write_chunk_extent(extent: int, boundaries: Sequence[int], size: int) -> int:
    if not boundaries:
        return max(1, extent)
    shards = [stop - start for start, stop in itertools.pairwise([0, *boundaries, extent])]
    longest = max(shards)
    if size == 1 or (shards[-1] <= longest and all(shard == longest for shard in shards[:-1])):
        return longest
    return gcd(*boundaries)


def read_chunk_shape(
    spec: ArraySpec, write_chunk_shape: tuple[int, ...], cuts: Sequence[Sequence[int]] | None, chunk_bytes: int
) -> tuple[int, ...]:
    """Return the shape of read chunks, so that a reader of other boxes reads few additional bytes.

    A write chunk of up to `chunk_bytes` is not divided. A larger one is first divided along the
    axis with most shards, into up to 64 pieces, because another mesh is most likely to divide that
    axis further. The other sharded axes follow. If that is not enough, all axes are divided without the limit of 64, in
    the same order. Among axes with equally many shards, leading axes are divided first, so that rows stay contiguous.
    Pieces have at most `chunk_bytes`, and usually more than half of that. Their number is a
    multiple of a high power of two, because the sizes of meshes are usually doubled.

    Args:
        spec: the array.
        write_chunk_shape: result of the function `write_chunk_shape`.
        cuts: as in `ArrayRecord.cuts`.
        chunk_bytes: maximum bytes of a piece, unless one element is larger; above 0.
    """
    target = max(1, chunk_bytes // spec.numpy_dtype.itemsize)
    chunk = list(write_chunk_shape)
    counts = [len(boundaries) for boundaries in cuts] if cuts is not None else [0] * len(chunk)
    order = sorted(range(len(chunk)), key=lambda axis: -counts[axis])
    for axis in order:
        if counts[axis]:
            chunk[axis] //= _piece_count(chunk[axis], prod(chunk), target, _MAX_PIECES)
    for axis in order:
        chunk[axis] //= _piece_count(chunk[axis], prod(chunk), target, chunk[axis])
    if prod(chunk) > target:
        _divide_further(chunk, write_chunk_shape, order, target)
    return tuple(chunk)


def _divide_further(chunk: list[int], write_chunk_shape: tuple[int, ...], order: Sequence[int], target: int) -> None:
    """Divide a chunk further if no number of pieces is near the target; then undo unnecessary divisions."""
    for axis in order:
        if prod(chunk) > target:
            enough = (pieces for pieces in _divisors(chunk[axis]) if prod(chunk) <= pieces * target)
            chunk[axis] //= min(enough, default=chunk[axis])
    # Divisions that were made before the last axis was divided may no longer be needed.
    for axis in reversed(order):
        room = target // prod(chunk)
        chunk[axis] *= max(pieces for pieces in _divisors(write_chunk_shape[axis] // chunk[axis]) if pieces <= room)


def _piece_count(extent: int, elements: int, target: int, max_pieces: int) -> int:
    """Return the number of pieces along an axis for a chunk with `elements` elements.

    Prefers pieces with more than half the target and at most the target. If no number of pieces gives
    such pieces, returns the largest number of pieces that are still larger than the target.
    """
    if elements <= target:
        return 1
    divisors = [pieces for pieces in _divisors(extent) if pieces <= max_pieces]
    fitting = [pieces for pieces in divisors if target < 2 * (elements // pieces) and elements <= pieces * target]
    if fitting:
        return max(fitting, key=lambda pieces: (pieces & -pieces, -pieces))
    return max(pieces for pieces in divisors if elements > pieces * target or pieces == 1)


def _divisors(extent: int) -> list[int]:
    """Return the divisors of an extent, ascending."""
    factors: list[int] = []
    rest, factor = extent, 2
    while factor * factor <= rest:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1
    if rest > 1:
        factors.append(rest)
    divisors = {1}
    for factor in factors:
        divisors |= {divisor * factor for divisor in divisors}
    return sorted(divisors)


def iter_chunks(chunk: tuple[int, ...], box: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Yield the index and the box of each chunk of a regular grid that intersects a box, in C order.

    Boxes are whole chunks, which may exceed the array, as they do in storage.
    """
    if box.size == 0:
        return
    ranges = [
        range(start // size, -(-stop // size)) for start, stop, size in zip(box.start, box.stop, chunk, strict=True)
    ]
    for index in itertools.product(*ranges):
        start = tuple(map(int.__mul__, index, chunk))
        yield index, Box(start, tuple(map(int.__add__, start, chunk)))
