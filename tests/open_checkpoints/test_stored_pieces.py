"""Pieces of arrays in the order of their storage. Batches of pieces end at the ends of blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ckptcore_testing import strategies
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.model import ArraySpec, Box, Chunk
from ckptcore.on_demand.pieces import BatchSizes, ChunkLookup, StoredPiece, batches_of, pieces_of


def _file(shapes: list[tuple[int, ...]], offset: int = 24) -> list[StoredPiece]:
    """Return the pieces of consecutive arrays of float32 in a file."""
    pieces = []
    for leaf, shape in enumerate(shapes):
        box = Box.whole(shape)
        pieces += pieces_of(leaf, box, 4, ChunkLookup([Chunk("file", offset, box, True)]))
        offset += box.size * 4
    return pieces


def test_batches_end_at_the_ends_of_blocks() -> None:
    shapes = [(100, 30), (5,), (7, 11, 13), (1,), (3000,), (64, 64)] * 3
    batches = list(batches_of(_file(shapes), BatchSizes(aim=8000, most=12000, block=1024)))
    assert len(batches) > 10
    for before, after in itertools.pairwise(batches):
        assert before[-1].stop == after[0].start and before[-1].stop % 1024 == 0
    lengths = [batch[-1].stop - batch[0].start for batch in batches[:-1]]
    assert max(lengths) <= 12000 and abs(sum(lengths) / len(lengths) - 8000) < 600


@pytest.mark.parametrize("shapes", [[(10,)] * 200, [(1 << 16,)]])
def test_batches_of_small_and_large_arrays_start_at_blocks(shapes: list[tuple[int, ...]]) -> None:
    batches = list(batches_of(_file(shapes, offset=0), BatchSizes(aim=4096, most=1 << 20, block=512)))
    assert len(batches) > 1 and all(batch[0].start % 512 == 0 for batch in batches)


def test_batches_of_pieces_without_an_offset_end_anywhere() -> None:
    pieces = [piece for leaf in range(9) for piece in pieces_of(leaf, Box.whole((10, 16)), 4, ChunkLookup(()))]
    batches = list(batches_of(pieces, BatchSizes(aim=1000, most=1000, block=1 << 20)))
    assert max(sum(piece.nbytes for piece in batch) for batch in batches) <= 1000
    assert sum(piece.box.size for batch in batches for piece in batch) == 9 * 160


def test_pieces_of_an_indivisible_chunk_stay_in_one_batch() -> None:
    tiles = ChunkLookup([Chunk("file", number, Box((10 * number,), (10 * number + 10,)), False) for number in range(5)])
    halves = [Box((5 * number,), (5 * number + 5,)) for number in range(10)]
    pieces = [piece for box in halves for piece in pieces_of(0, box, 64, tiles)]
    batches = list(batches_of(pieces, BatchSizes(aim=700, most=2000, block=16)))
    assert [[piece.box.start[0] for piece in batch] for batch in batches] == [[10 * n, 10 * n + 5] for n in range(5)]


@given(st.data())
def test_a_piece_cut_at_a_byte_consists_of_its_two_parts(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    box = data.draw(strategies.boxes(shape))
    tile = Chunk("file", data.draw(st.integers(0, 9)), Box.whole(shape), True)
    piece = StoredPiece.of(0, box, 4, tile)
    position = data.draw(st.integers(0, tile.offset + 4 * tile.box.size))
    places = tile.offset + 4 * np.arange(tile.box.size).reshape(shape)
    assert (piece.start, piece.stop) == (places[box.slices].min(), places[box.slices].max() + 4)
    parts = piece.cut_at(position)
    if parts is None:
        return
    before, behind = parts
    counts = np.zeros(shape, int)
    for part in [*before, *behind]:
        counts[part.box.slices] += 1
    assert (counts[box.slices] == 1).all() and counts.sum() == box.size
    assert before[-1].stop <= position < behind[0].start + 4
    assert [part.start for part in [*before, *behind]] == sorted(part.start for part in [*before, *behind])


def test_chunks_that_do_not_fill_a_box_are_ignored() -> None:
    tiles = ChunkLookup([Chunk("file", 0, Box((0, 0), (3, 4)), True)])
    (piece,) = pieces_of(2, Box.whole((4, 4)), 4, tiles)
    assert piece.chunk is None and piece.box == Box.whole((4, 4))
    assert ArraySpec((4, 4), "int32").nbytes == piece.nbytes
