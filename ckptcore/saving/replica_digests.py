"""Digests of arrays that several processes are assumed to have alike, to find processes whose elements differ."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from ckptcore.model.arrays import Box
from ckptcore.model.metadata import ArrayRecord
from ckptcore.protocols import LeafHandler
from ckptcore.saving.tree_descriptions import TreeDescription


def replica_digests(description: TreeDescription, rank: int, size: int) -> Mapping[str, int]:
    """Return the digests of the arrays that this process is assumed to have as other processes do.

    Only of arrays that any of these processes may write: of none in a layout where one process writes what all have,
    of none that know which processes hold their boxes, and of no values that may differ between processes.

    Args:
        description: the tree of this process.
        rank, size: the rank of this process, and the number of processes of the job.

    Returns:
        The digests of boxes, by the number of their leaf. For a part of an array, the number is followed by its box.
    """
    shares, tree = description.shares, description.tree
    if shares is None or description.own or size == 1:
        return {}
    digests: dict[str, int] = {}
    for number, boxes in description.holders.local.items():
        record = tree.leaves[number]
        leaf, handler, _ = description.boxes(number)
        if shares.replicas.get(number, size) != size or not isinstance(record, ArrayRecord):
            continue
        if any(shard.replicas != size for shard in boxes) or not _is_assumed_equal(handler, leaf, rank, size):
            continue
        for shard in boxes:
            digest = _digest(handler, leaf, record, shard.box)
            if digest is not None:
                digests[f"{number}" if shard.box.shape == record.spec.shape else f"{number} {shard.box}"] = digest
    return digests


def _is_assumed_equal(handler: LeafHandler, leaf: object, rank: int, size: int) -> bool:
    """Return True if an array does not know which processes hold it: it would be a replica of any number of them."""
    found = handler.shards_of(leaf, None, rank, size + 1)
    return found is not None and all(shard.replicas == size + 1 for shard in found)


def _digest(handler: LeafHandler, leaf: object, record: ArrayRecord, box: Box) -> int | None:
    sample = handler.sample(leaf, record, box)
    if sample is None:
        return None
    hasher = xxhash.xxh3_64()
    for part in sample:
        elements = part.result()
        if not elements.dtype.isnative:  # ranks may have other byte orders
            elements = elements.astype(elements.dtype.newbyteorder("="))
        hasher.update(elements.tobytes())
    return hasher.intdigest()
