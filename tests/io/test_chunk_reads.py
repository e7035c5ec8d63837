"""Reads of boxes through a chunk index, which fetch encoded chunks together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads
from ckptcore.model import ArraySpec, Box, Chunk, ChunkLocations, HostArray, Pending, ReadItem
from ckptcore.planning import uncovered
from ckptcore.protocols import ChunkIndex, ReadStore
from tests.io.watched_storage import memory_storage

CHUNK = Box((0,), (4,))


class EncodedChunks(ChunkIndex):
    """An index with one encoded chunk of four bytes per array, at the given offsets of one object."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = offsets

    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        return [Chunk("x", self.offsets[leaf], CHUNK, False, leaf=leaf)]

    def extents(self, leaf: int) -> Iterable[tuple[str, int, int]]:
        return [("x", self.offsets[leaf], self.offsets[leaf] + 4)]

    def locate(self, chunks: Sequence[Chunk], store: ReadStore) -> ChunkLocations:
        return ChunkLocations(
            ["x"] * len(chunks),
            [chunk.offset for chunk in chunks],
            stops={row: chunk.offset + 4 for row, chunk in enumerate(chunks)},
            encoded=range(len(chunks)),
        )

    def decode(self, chunk: Chunk, data: bytes) -> Pending[HostArray]:
        assert len(data) == 4
        decoded: Future[HostArray] = Future()
        decoded.set_result(np.frombuffer(data, np.uint8))
        return decoded


@pytest.mark.parametrize("offsets", [(0, 4, 8), (8, 4, 0), (8, 0, 4), (4, 8, 0)])
def test_chunks_are_fetched_together_in_any_order(offsets: Sequence[int]) -> None:
    stored = np.arange(12, dtype=np.uint8)
    storage = memory_storage()
    storage.put("x", stored.tobytes())
    buffers = [np.empty(4, np.uint8) for _ in offsets]
    items = [ReadItem(leaf, CHUNK) for leaf in range(len(offsets))]
    store = ObjectReader(storage, {}, IOThreads())
    assert sorted(store.read_boxes(EncodedChunks(offsets), items, buffers)) == [0, 1, 2]
    for offset, buffer in zip(offsets, buffers, strict=True):
        assert buffer.tolist() == stored[offset : offset + 4].tolist()


def test_boxes_that_stop_before_they_start_cover_nothing() -> None:
    inverted = Box((10, 10), (0, 5))
    assert inverted.size == 50
    half = Box((0, 0), (10, 5))
    assert "are in no box" in str(uncovered(ArraySpec((10, 10), "uint8"), [half, inverted]))
