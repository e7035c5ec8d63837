"""Reading boxes of arrays out of the chunks that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, HostArray, ReadPlan, TileRead, format_path
from ckptcore.planning import uncovered
from ckptcore.protocols import ReadStore
from ckptcore_dcp.chunk_targets import ChunkTargets
from ckptcore_dcp.item_reading import read_items
from ckptcore_dcp.state import Chunk, ChunkTable

__all__ = ["read_boxes"]


def read_boxes(plan: ReadPlan, buffers: Sequence[HostArray], store: ReadStore, table: ChunkTable) -> Iterator[int]:
    """Fill ``buffers[i]`` with the box of ``plan.items[i]``; yields `i` once it is there and verified.

    Raises:
        CorruptCheckpointError: chunks do not make up an array, or bytes are missing or wrong.
        UnsupportedLeafError: an array is within a value that was stored compressed.
    """
    wanted: dict[tuple[int, str, int], ChunkTargets] = {}
    checked: dict[int, Sequence[Chunk]] = {}
    for number, (item, buffer) in enumerate(zip(plan.items, buffers, strict=True)):
        chunks = checked.get(item.leaf)
        if chunks is None:
            chunks = checked[item.leaf] = _whole(plan, item.leaf, table)
        if not item.box.size:
            yield number
            continue
        for chunk in chunks if len(chunks) == 1 else table.chunks(item.leaf, item.box):
            place = item.leaf, chunk.key, chunk.offset
            found = wanted.get(place)
            if found is None:
                found = wanted[place] = ChunkTargets(item.leaf, chunk)
            found.targets.append((number, item.box, buffer))
    if table.content == "items":
        yield from read_items(plan.tree, list(wanted.values()), store)
    else:
        yield from store.read_tiles([_tile(found) for found in wanted.values()])


def _tile(found: ChunkTargets) -> TileRead:
    chunk = found.chunk
    return TileRead(chunk.key, chunk.offset, chunk.box, found.targets[0][2].itemsize, tuple(found.targets))


def _whole(plan: ReadPlan, leaf: int, table: ChunkTable) -> Sequence[Chunk]:
    """The chunks of an array, which make it up."""
    record = plan.tree.leaves[leaf]
    assert isinstance(record, ArrayRecord)  # a plan has no other items
    chunks = table.chunks(leaf)
    if not chunks and record.spec.size and table.content == "items":
        raise UnsupportedLeafError(
            f"{format_path(plan.tree.paths[leaf])} ({record.spec}) has no place: it is in a tuple, or another value that "
            "torch.distributed.checkpoint stored whole and compressed, or the metadata names no file for it; give a PLACEHOLDER in its "
            "place, or load it with torch"
        )
    reason = uncovered(record.spec, [chunk.box for chunk in chunks])
    if reason is not None:
        path = format_path(plan.tree.paths[leaf])
        raise CorruptCheckpointError(
            f"{path} ({record.spec}) is not stored whole: {reason}; restore the checkpoint from a copy, or load another one"
        )
    return chunks
