"""Tiles with checksums behind them: whether those or the blocks of the object are compared, and what is read for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.read_tasks import ObjectShape, ReadPart, ReadTask, group_tasks, plan_object, share, takers_of
from ckptcore.io.takers import BoxTaker, RunTaker, Taker
from ckptcore.io.tiles import TileCheck
from ckptcore.model import Checksum, TileRead

__all__ = ["TileShape", "plan_checked"]

_BLOCK_PRICE: Final = 50
_TILE_PRICE: Final = 51
"""What a byte costs, read for blocks and for tiles: whole tiles have to be more than 2 % fewer bytes."""

_SPARE_BLOCKS: Final = 2
"""So many blocks are read in vain before tiles are read by themselves. The checksums of blocks stand in the root and tell what
another save wrote from what this one did; those behind tiles only tell that they are what somebody wrote."""


@dataclass(frozen=True, slots=True)
class TileShape(ObjectShape):
    """How an object is read whose tiles are read whole: parts are cut between tiles, and count from where a tile begins."""

    def keeps_elements(self, offset: int, itemsize: int) -> bool:
        """Whether no element of a tile lies across the ends of what is read, wherever the tile is."""
        return self.part_bytes % itemsize == 0


class _Tile:
    """Bytes `start` to `stop` of an object with a checksum behind them, that ends at `end`, and who wants of them."""

    __slots__ = ("checksum", "end", "reads", "start", "stop", "takers")

    def __init__(self, start: int, stop: int, checksum: Checksum) -> None:
        self.start = start
        self.stop = stop
        self.end = stop + checksum.nbytes
        self.checksum = checksum
        self.reads: list[TileRead] = []
        self.takers: list[Taker] = []


def plan_checked(shape: ObjectShape, tile_shape: TileShape, reads: Sequence[TileRead]) -> list[ReadTask]:
    """Tasks that read tiles of one object, some or all of which have a checksum behind them.

    Args:
        shape: how the object is read without these checksums: by blocks that are verified, or by the byte.
        tile_shape: how tiles are read that are compared with them.
        reads: of the object.

    Raises:
        CorruptCheckpointError: a tile or its checksum does not lie within the object, a target does not fit its box, or
            tiles overlap.
    """
    recorded = shape.step > 1
    others: list[Taker] = []
    by_place: dict[tuple[int, int, str], _Tile] = {}
    for read in reads:
        checksum = read.checksum
        if checksum is None:
            others.extend(takers_of(shape, read))
        elif takers := list(takers_of(shape if recorded else tile_shape, read)):
            stop = read.offset + prod(map(int.__sub__, read.box.stop, read.box.start)) * read.itemsize
            place = read.offset, stop, checksum.name
            tile = by_place.get(place)
            if tile is None:
                tile = by_place[place] = _Tile(read.offset, stop, checksum)
            tile.reads.append(read)
            tile.takers.extend(takers)
    tiles = sorted(by_place.values(), key=lambda tile: tile.start)
    _refuse_overlap(shape.key, tiles)
    if recorded:
        whole = _cheapest(shape, tiles)
        if not whole:
            others.extend([taker for tile in tiles for taker in tile.takers])
            tiles = []
        else:
            others.extend(
                [taker for tile, alone in zip(tiles, whole, strict=True) if not alone for taker in tile.takers]
            )
            tiles = [tile for tile, alone in zip(tiles, whole, strict=True) if alone]
            for tile in tiles:
                if any(isinstance(taker, BoxTaker) for taker in tile.takers):  # no block cuts their elements any more
                    tile.takers = [taker for read in tile.reads for taker in takers_of(tile_shape, read)]
    return [*plan_object(shape, others), *_plan_tiles(tile_shape, tiles)]


def _refuse_overlap(key: str, tiles: Sequence[_Tile]) -> None:
    # Else a few bytes of a hostile checkpoint could have the same bytes summed any number of times.
    stop = 0
    for tile in tiles:
        if tile.start < stop:
            raise CorruptCheckpointError(
                f"what describes {key!r} is damaged: expected chunks of bytes that do not overlap, found one at bytes "
                f"{tile.start} to {tile.end} and another that ends at {stop}; restore it from a copy, or load another "
                "checkpoint",
                key=key,
                start=tile.start,
                stop=stop,
            )
        stop = tile.end


def _plan_tiles(shape: TileShape, tiles: Sequence[_Tile]) -> list[ReadTask]:
    """Tasks that read tiles whole, each byte once, and compare them."""
    windows: list[ReadPart] = []
    ranges: list[tuple[int, int, Taker]] = []
    most = shape.part_bytes
    for tile in tiles:
        for taker in tile.takers:
            ranges.append((taker.start, taker.stop, taker))
        check = TileCheck(shape.key, tile.start, tile.stop, tile.checksum)
        if windows and tile.start - windows[-1].stop <= shape.gap_bytes and tile.end - windows[-1].start <= most:
            windows[-1].stop = tile.end
            windows[-1].checks.append(check)
            continue
        if tile.stop - tile.start > most:
            check.expect_pieces(sorted({taker.number for taker in tile.takers}))
        for begin in range(tile.start, tile.stop, most):
            # The checksum comes with the last bytes it is of.
            end = begin + most if begin + most < tile.stop else tile.end
            window = ReadPart(begin, end, None, [])
            window.checks.append(check)
            windows.append(window)
    share(shape, windows, ranges)
    return group_tasks(shape, windows)


def _cheapest(shape: ObjectShape, tiles: Sequence[_Tile]) -> list[bool]:
    """For each tile whether it is read whole, rather than the blocks that hold what is wanted of it; empty if none is.

    Tiles share blocks with their neighbours, so this looks for the cheapest of all ways, from the first tile to the last:
    the cheapest one that ends with blocks and the cheapest one that ends with a whole tile are each the cheapest way
    before, of one kind or the other, and the tile. Another request costs what a gap does that is cheaper read in vain.
    """
    blocks = [_blocks_of(shape, tile.takers) for tile in tiles]
    wanted = nbytes = read_to = 0
    for tile, run in zip(tiles, blocks, strict=True):
        # Who reads all of a tile and goes on behind it reads its checksum too.
        wanted += tile.end - tile.start if run.wanted == tile.stop - tile.start else run.wanted
        nbytes += run.after(read_to)
        read_to = run.stop
    if nbytes * _BLOCK_PRICE <= wanted * _TILE_PRICE or nbytes - wanted <= _SPARE_BLOCKS * shape.step:
        return []
    request = shape.gap_bytes * _BLOCK_PRICE
    blocks_cost = tile_cost = 0
    blocks_read = tile_read = 0  # up to where blocks are read, on each of the two ways
    stop = tiles[0].start
    before: list[tuple[bool, bool]] = []  # if the tile is read by blocks, and if whole: whether the one before is whole
    for tile, run in zip(tiles, blocks, strict=True):
        same = blocks_cost + run.after(blocks_read) * _BLOCK_PRICE
        other = tile_cost + run.after(tile_read) * _BLOCK_PRICE + request
        gap = tile.start - stop
        price = (tile.end - tile.start) * _TILE_PRICE
        whole_same = tile_cost + price + (gap * _TILE_PRICE if gap <= shape.gap_bytes else 0)
        whole_other = blocks_cost + price + request
        before.append((other < same, whole_same <= whole_other))
        if whole_same <= whole_other:
            tile_cost = whole_same
        else:
            tile_cost, tile_read = whole_other, blocks_read
        blocks_cost, blocks_read = min(same, other), run.stop
        stop = tile.end
    whole = tile_cost < blocks_cost
    found: list[bool] = []
    for if_blocks, if_whole in reversed(before):
        found.append(whole)
        whole = if_whole if whole else if_blocks
    found.reverse()
    return found


class _Blocks:
    """The blocks that hold what is wanted of a tile.

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


def _blocks_of(shape: ObjectShape, takers: Sequence[Taker]) -> _Blocks:
    if len(takers) == 1 and isinstance(taker := takers[0], RunTaker):
        start, stop = taker.start // shape.step * shape.step, shape.above(taker.stop)
        return _Blocks(start, stop, stop, stop - start, taker.stop - taker.start)
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(_block_ranges(shape, takers)):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    nbytes = sum([stop - start for start, stop in merged])
    return _Blocks(merged[0][0], merged[0][1], merged[-1][1], nbytes, 0)


def _block_ranges(shape: ObjectShape, takers: Iterable[Taker]) -> Iterator[tuple[int, int]]:
    step = shape.step
    for taker in takers:
        if isinstance(taker, BoxTaker):
            for start, stop in taker.spans(shape.gap_bytes):
                yield start // step * step, shape.above(stop)
        else:
            yield taker.start // step * step, shape.above(taker.stop)
