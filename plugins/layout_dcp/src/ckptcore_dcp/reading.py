"""Reading boxes of arrays out of the chunks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, HostArray, ReadPlan, TileRead, TreeMetadata, format_path
from ckptcore.protocols import ReadStore
from ckptcore_dcp.chunk_targets import ChunkTargets
from ckptcore_dcp.item_reading import read_items
from ckptcore_dcp.state import ChunkTable

__all__ = ["expect_whole", "read_boxes"]


def read_boxes(plan: ReadPlan, buffers: Sequence[HostArray], store: ReadStore, table: ChunkTable) -> Iterator[int]:
    """Fill ``buffers[i]`` with the box of ``plan.items[i]``; yields `i` once it is there and verified.

    Raises:
        CorruptCheckpointError: chunks do not make up an array, or bytes are missing or wrong.
        UnsupportedLeafError: an array is within a value that was stored compressed.
    """
    wanted: dict[tuple[int, str, int], ChunkTargets] = {}
    expect_whole(plan.tree, {item.leaf for item in plan.items}, table)
    for number, (item, buffer) in enumerate(zip(plan.items, buffers, strict=True)):
        if not item.box.size:
            yield number
            continue
        for chunk in table.chunks(item.leaf, item.box):
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


def expect_whole(tree: TreeMetadata, leaves: Iterable[int], table: ChunkTable) -> None:
    """Refuse arrays whose chunks do not cover them exactly.

    Raises:
        CorruptCheckpointError: names the first such array.
        UnsupportedLeafError: an array has no chunks.
    """
    for leaf in leaves:
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # values are in no chunks
        reason = table.uncovered(leaf, record.spec)
        if reason is None:
            continue
        if table.content == "items" and not table.chunks(leaf):
            raise UnsupportedLeafError(
                f"{format_path(tree.paths[leaf])} ({record.spec}) cannot be located: it is in a tuple or another value "
                "that torch.distributed.checkpoint stored whole and compressed, or the metadata names no file for it; "
                "pass a PLACEHOLDER for it, or load it with torch"
            )
        raise CorruptCheckpointError(
            f"{format_path(tree.paths[leaf])} ({record.spec}) is not stored whole: {reason}; restore the checkpoint "
            "from a copy, or load another one"
        )
