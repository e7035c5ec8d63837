"""Tiles with checksums behind them: whether those or the blocks of the object are compared, and what is read for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from ckptcore.engine.read_tasks import ObjectShape, ReadPart, ReadTask, group_tasks, plan_object, share, takers_of
from ckptcore.engine.takers import BoxTaker, Taker
from ckptcore.engine.tile_checks import TileCheck
from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import Checksum, TileRead

__all__ = ["TileShape", "plan_checked"]

_BLOCK_PRICE: Final = 50
_TILE_PRICE: Final = 51
"""What a byte costs, read for blocks and for tiles: whole tiles have to be more than 2 % fewer bytes."""


@dataclass(frozen=True, slots=True)
class TileShape(ObjectShape):
    """How an object is read whose tiles are read whole: parts are cut between tiles, and count from where a tile begins."""

    def keeps_elements(self, offset: int, itemsize: int) -> bool:
        """Whether no element of a tile lies across the ends of what is read, wherever the tile is."""
        return self.part_bytes % itemsize == 0


@dataclass(frozen=True, slots=True)
class _Tile:
    """Bytes `start` to `stop` of an object with a checksum behind them, that ends at `end`, and who wants of them.

    Attributes:
        takers: as if the object were read by blocks; with another shape there are others.
    """

    start: int
    stop: int
    end: int
    checksum: Checksum
    reads: list[TileRead] = field(default_factory=list)
    takers: list[Taker] = field(default_factory=list)


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
    others: list[Taker] = []
    by_place: dict[tuple[int, int, int, str], _Tile] = {}
    for read in reads:
        takers = list(takers_of(shape, read))
        checksum = read.checksum
        if checksum is None:
            others.extend(takers)
        elif takers:
            stop = read.offset + prod(map(int.__sub__, read.box.stop, read.box.start)) * read.itemsize
            place = read.offset, stop, checksum.nbytes, checksum.name
            if (tile := by_place.get(place)) is None:
                tile = by_place[place] = _Tile(read.offset, stop, stop + checksum.nbytes, checksum)
            tile.reads.append(read)
            tile.takers.extend(takers)
    tiles = sorted(by_place.values(), key=lambda tile: tile.start)
    _refuse_overlap(shape.key, tiles)
    if shape.step == 1:
        whole = [True] * len(tiles)
    else:
        whole = _cheapest(shape, tiles)
        others.extend([taker for tile, alone in zip(tiles, whole, strict=True) if not alone for taker in tile.takers])
    return [
        *plan_object(shape, others),
        *_plan_tiles(tile_shape, [tile for tile, alone in zip(tiles, whole, strict=True) if alone]),
    ]


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
        takers = [taker for read in tile.reads for taker in takers_of(shape, read)]
        ranges.extend([(taker.start, taker.stop, taker) for taker in takers])
        check = TileCheck(shape.key, tile.start, tile.stop, tile.checksum)
        if windows and tile.start - windows[-1].stop <= shape.gap_bytes and tile.end - windows[-1].start <= most:
            windows[-1].stop = tile.end
            windows[-1].checks.append(check)
            continue
        if tile.stop - tile.start > most:
            check.expect_pieces(sorted({taker.number for taker in takers}))
        for begin in range(tile.start, tile.stop, most):
            # The checksum comes with the last bytes it is of.
            end = begin + most if begin + most < tile.stop else tile.end
            window = ReadPart(begin, end, None, [])
            window.checks.append(check)
            windows.append(window)
    share(shape, windows, ranges)
    return group_tasks(shape, windows)


def _cheapest(shape: ObjectShape, tiles: Sequence[_Tile]) -> list[bool]:
    """For each tile whether it is read whole, rather than the blocks that hold what is wanted of it.

    Tiles share blocks with their neighbours, so this looks for the cheapest of all ways, from the first tile to the last:
    the cheapest one that ends with blocks and the cheapest one that ends with a whole tile are each the cheapest way
    before, of one kind or the other, and the tile. Another request costs what a gap does that is cheaper read in vain.
    """
    request = shape.gap_bytes * _BLOCK_PRICE
    blocks_cost = tile_cost = 0
    blocks_read = tile_read = 0  # up to where the blocks are read, on each of the two ways
    stop = -1
    after_blocks: list[
        tuple[bool, bool]
    ] = []  # whether blocks come before a tile read by blocks, and before a whole one
    for tile in tiles:
        first, last, nbytes = _rounded(shape, tile.takers)
        same = blocks_cost + (nbytes - max(0, min(blocks_read, first[1]) - first[0])) * _BLOCK_PRICE
        other = tile_cost + (nbytes - max(0, min(tile_read, first[1]) - first[0])) * _BLOCK_PRICE + request
        whole = (tile.end - tile.start) * _TILE_PRICE
        gap = tile.start - stop
        whole_same = tile_cost + whole + (gap * _TILE_PRICE if 0 < gap <= shape.gap_bytes and stop >= 0 else 0)
        whole_other = blocks_cost + whole + request
        after_blocks.append((same <= other, whole_other < whole_same))
        before = blocks_read
        blocks_cost, blocks_read = min(same, other), last
        if whole_other < whole_same:
            tile_cost, tile_read = whole_other, before
        else:
            tile_cost = whole_same
        stop = tile.end
    blocks = blocks_cost <= tile_cost
    found: list[bool] = []
    for before_blocks, before_whole in reversed(after_blocks):
        found.append(not blocks)
        blocks = before_blocks if blocks else before_whole
    found.reverse()
    return found


def _rounded(shape: ObjectShape, takers: Iterable[Taker]) -> tuple[tuple[int, int], int, int]:
    """Of the blocks that hold what takers want: the first run of them, where the last ends, and how many bytes in all."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(_block_ranges(shape, takers)):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged[0], merged[-1][1], sum([stop - start for start, stop in merged])


def _block_ranges(shape: ObjectShape, takers: Iterable[Taker]) -> Iterator[tuple[int, int]]:
    step = shape.step
    for taker in takers:
        if isinstance(taker, BoxTaker):
            for start, stop in taker.spans(shape.gap_bytes):
                yield start // step * step, shape.above(stop)
        else:
            yield taker.start // step * step, shape.above(taker.stop)
