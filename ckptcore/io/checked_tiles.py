"""Chunks with checksums behind them: whether those or the blocks of the object are compared, and what is read for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.destinations import BoxDestination, Destination, RunDestination
from ckptcore.io.read_tasks import ObjectShape, ReadPart, ReadTask, destinations_of, group_tasks, plan_object, share
from ckptcore.io.tiles import ChunkCheck
from ckptcore.model import Checksum, ChunkRead

__all__ = ["ChunkShape", "plan_checked"]

_BLOCK_PRICE: Final = 50
_CHUNK_PRICE: Final = 51
"""What a byte costs, read for blocks and for chunks: whole chunks have to be more than 2 % fewer bytes."""

_SPARE_BLOCKS: Final = 2
"""So many blocks are read in vain before chunks are read by themselves. The checksums of blocks stand in the root and tell what
another save wrote from what this one did; those behind chunks only tell that they are what somebody wrote."""


@dataclass(frozen=True, slots=True)
class ChunkShape(ObjectShape):
    """How an object is read whose chunks are read whole: parts are cut between chunks, and count from where a chunk begins."""

    def keeps_elements(self, offset: int, itemsize: int) -> bool:
        """Whether no element of a chunk lies across the ends of what is read, wherever the chunk is."""
        return self.part_bytes % itemsize == 0


class _CheckedChunk:
    """Bytes `start` to `stop` of an object with a checksum behind them, that ends at `end`, and who wants of them."""

    __slots__ = ("checksum", "destinations", "end", "reads", "start", "stop")

    def __init__(self, start: int, stop: int, checksum: Checksum) -> None:
        self.start = start
        self.stop = stop
        self.end = stop + checksum.nbytes
        self.checksum = checksum
        self.reads: list[ChunkRead] = []
        self.destinations: list[Destination] = []


def plan_checked(shape: ObjectShape, chunk_shape: ChunkShape, reads: Sequence[ChunkRead]) -> list[ReadTask]:
    """Tasks that read chunks of one object, some or all of which have a checksum behind them.

    Args:
        shape: how the object is read without these checksums: by blocks that are verified, or by the byte.
        chunk_shape: how chunks are read that are compared with them.
        reads: of the object.

    Raises:
        CorruptCheckpointError: a chunk or its checksum does not lie within the object, a target does not fit its box, or
            chunks overlap.
    """
    recorded = shape.step > 1
    others: list[Destination] = []
    by_place: dict[tuple[int, int, str], _CheckedChunk] = {}
    for read in reads:
        checksum = read.checksum
        if checksum is None:
            others.extend(destinations_of(shape, read))
        elif destinations := list(destinations_of(shape if recorded else chunk_shape, read)):
            stop = read.offset + prod(map(int.__sub__, read.box.stop, read.box.start)) * read.itemsize
            place = read.offset, stop, checksum.name
            chunk = by_place.get(place)
            if chunk is None:
                chunk = by_place[place] = _CheckedChunk(read.offset, stop, checksum)
            chunk.reads.append(read)
            chunk.destinations.extend(destinations)
    chunks = sorted(by_place.values(), key=lambda chunk: chunk.start)
    _refuse_overlap(shape.key, chunks)
    if recorded:
        whole = _cheapest(shape, chunks)
        if not whole:
            others.extend([destination for chunk in chunks for destination in chunk.destinations])
            chunks = []
        else:
            others.extend(
                [
                    destination
                    for chunk, alone in zip(chunks, whole, strict=True)
                    if not alone
                    for destination in chunk.destinations
                ]
            )
            chunks = [chunk for chunk, alone in zip(chunks, whole, strict=True) if alone]
            for chunk in chunks:
                if any(
                    isinstance(destination, BoxDestination) for destination in chunk.destinations
                ):  # no block cuts their elements any more
                    chunk.destinations = [
                        destination for read in chunk.reads for destination in destinations_of(chunk_shape, read)
                    ]
    return [*plan_object(shape, others), *_plan_chunks(chunk_shape, chunks)]


def _refuse_overlap(key: str, chunks: Sequence[_CheckedChunk]) -> None:
    # Else a few bytes of a hostile checkpoint could have the same bytes summed any number of times.
    stop = 0
    for chunk in chunks:
        if chunk.start < stop:
            raise CorruptCheckpointError(
                f"what describes {key!r} is damaged: expected chunks of bytes that do not overlap, found one at bytes "
                f"{chunk.start} to {chunk.end} and another that ends at {stop}; restore it from a copy, or load another "
                "checkpoint",
                key=key,
                start=chunk.start,
                stop=stop,
            )
        stop = chunk.end


def _plan_chunks(shape: ChunkShape, chunks: Sequence[_CheckedChunk]) -> list[ReadTask]:
    """Tasks that read chunks whole, each byte once, and compare them."""
    windows: list[ReadPart] = []
    ranges: list[tuple[int, int, Destination]] = []
    most = shape.part_bytes
    for chunk in chunks:
        for destination in chunk.destinations:
            ranges.append((destination.start, destination.stop, destination))
        check = ChunkCheck(shape.key, chunk.start, chunk.stop, chunk.checksum)
        if windows and chunk.start - windows[-1].stop <= shape.gap_bytes and chunk.end - windows[-1].start <= most:
            windows[-1].stop = chunk.end
            windows[-1].checks.append(check)
            continue
        if chunk.stop - chunk.start > most:
            check.expect_pieces(sorted({destination.number for destination in chunk.destinations}))
        for begin in range(chunk.start, chunk.stop, most):
            # The checksum comes with the last bytes it is of.
            end = begin + most if begin + most < chunk.stop else chunk.end
            window = ReadPart(begin, end, None, [])
            window.checks.append(check)
            windows.append(window)
    share(shape, windows, ranges)
    return group_tasks(shape, windows)


def _cheapest(shape: ObjectShape, chunks: Sequence[_CheckedChunk]) -> list[bool]:
    """For each chunk whether it is read whole, rather than the blocks that hold what is wanted of it; empty if none is.

    Chunks share blocks with their neighbours, so this looks for the cheapest of all ways, from the first chunk to the last:
    the cheapest one that ends with blocks and the cheapest one that ends with a whole chunk are each the cheapest way
    before, of one kind or the other, and the chunk. Another request costs what a gap does that is cheaper read in vain.
    """
    blocks = [_blocks_of(shape, chunk.destinations) for chunk in chunks]
    wanted = nbytes = read_to = 0
    for chunk, run in zip(chunks, blocks, strict=True):
        # Who reads all of a chunk and goes on behind it reads its checksum too.
        wanted += chunk.end - chunk.start if run.wanted == chunk.stop - chunk.start else run.wanted
        nbytes += run.after(read_to)
        read_to = run.stop
    if nbytes * _BLOCK_PRICE <= wanted * _CHUNK_PRICE or nbytes - wanted <= _SPARE_BLOCKS * shape.step:
        return []
    request = shape.gap_bytes * _BLOCK_PRICE
    blocks_cost = chunk_cost = 0
    blocks_read = chunk_read = 0  # up to where blocks are read, on each of the two ways
    stop = chunks[0].start
    before: list[
        tuple[bool, bool]
    ] = []  # if the chunk is read by blocks, and if whole: whether the one before is whole
    for chunk, run in zip(chunks, blocks, strict=True):
        same = blocks_cost + run.after(blocks_read) * _BLOCK_PRICE
        other = chunk_cost + run.after(chunk_read) * _BLOCK_PRICE + request
        gap = chunk.start - stop
        price = (chunk.end - chunk.start) * _CHUNK_PRICE
        whole_same = chunk_cost + price + (gap * _CHUNK_PRICE if gap <= shape.gap_bytes else 0)
        whole_other = blocks_cost + price + request
        before.append((other < same, whole_same <= whole_other))
        if whole_same <= whole_other:
            chunk_cost = whole_same
        else:
            chunk_cost, chunk_read = whole_other, blocks_read
        blocks_cost, blocks_read = min(same, other), run.stop
        stop = chunk.end
    whole = chunk_cost < blocks_cost
    found: list[bool] = []
    for if_blocks, if_whole in reversed(before):
        found.append(whole)
        whole = if_whole if whole else if_blocks
    found.reverse()
    return found


class _Blocks:
    """The blocks that hold what is wanted of a chunk.

    Attributes:
        start, first_stop: the first of them that follow each other without a gap.
        stop: where the last one ends.
        nbytes: bytes in all of them.
        wanted: bytes that are wanted, at least.
    """

    __slots__ = ("first_stop", "nbytes", "start", "stop", "wanted")

    def __init__(self, start: int, first_stop: int, stop: int, nbytes: int, wanted: int) -> None:
        self.start = start
        self.first_stop = first_stop
        self.stop = stop
        self.nbytes = nbytes
        self.wanted = wanted

    def after(self, read_to: int) -> int:
        """Bytes of them that are not read yet, where all blocks up to `read_to` are."""
        if read_to <= self.start:
            return self.nbytes
        return self.nbytes - min(read_to, self.first_stop) + self.start


def _blocks_of(shape: ObjectShape, destinations: Sequence[Destination]) -> _Blocks:
    if len(destinations) == 1 and isinstance(destination := destinations[0], RunDestination):
        start, stop = destination.start // shape.step * shape.step, shape.above(destination.stop)
        return _Blocks(start, stop, stop, stop - start, destination.stop - destination.start)
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(_block_ranges(shape, destinations)):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    nbytes = sum([stop - start for start, stop in merged])
    return _Blocks(merged[0][0], merged[0][1], merged[-1][1], nbytes, 0)


def _block_ranges(shape: ObjectShape, destinations: Iterable[Destination]) -> Iterator[tuple[int, int]]:
    step = shape.step
    for destination in destinations:
        if isinstance(destination, BoxDestination):
            for start, stop in destination.spans(shape.gap_bytes):
                yield start // step * step, shape.above(stop)
        else:
            yield destination.start // step * step, shape.above(destination.stop)
