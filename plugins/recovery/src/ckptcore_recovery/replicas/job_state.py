"""The state of a running job: one tree, and the boxes that each process holds, as a checkpoint that can be loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from ckptcore.builtin.memory import MemoryStorages
from ckptcore.commit.location import Location
from ckptcore.commit.root import Root, containers_and_leaves, new_save_id
from ckptcore.commit.stored_root import LocationVersion
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, TreeMismatchError
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.model.arrays import Box
from ckptcore.model.metadata import ArrayRecord, ObjectRecord, TreeMetadata
from ckptcore.model.transfer import Chunk
from ckptcore.model.tree import JSON, Node, format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.protocols import ChunkIndex, StorageOptions
from ckptcore.runtime import runtime_of
from ckptcore.saving.common_trees import refuse_per_process_objects, tree_digest
from ckptcore.saving.descriptions import TreeDescription, describe_part
from ckptcore.saving.requests import save_created
from ckptcore.tree.flattening import PER_PROCESS, per_process_leaves
from ckptcore.tree.merge import merge_trees
from ckptcore_recovery.replicas.transfers import Held, HeldBox

PLACE: Final = "the memory of this job"
"""The location of the state, for messages."""

_LAYOUT: Final = "safetensors"
"""The layout whose rules the state follows: that of a save by default. Nothing is stored with it."""


class NoReplicaError(CheckpointError, LookupError):
    """No process of the job holds a part of the state that another process lost. Load a checkpoint."""


class ReplicasDifferError(CheckpointError, ValueError):
    """Processes that should hold the same elements or values hold different ones."""


def describe_state(state: object, context: Context, *, rank: int, size: int) -> TreeDescription:
    """Describe the state of this process, as a save would. Copies nothing.

    Raises:
        UnsupportedLeafError: it has values that cannot be saved, or objects of which every process has its own.
    """
    registry = runtime_of(context).registry
    described = describe_part("", state, registry.layout(_LAYOUT), registry, rank=rank, size=size)
    assert isinstance(described, TreeDescription)  # only named checkpointables can be files
    refuse_per_process_objects(described, size, context)
    # Arrays that share memory in this process may be separate arrays, with other boxes, in others.
    local = dict(described.holders.local)
    for alias in described.tree.aliases.keys() - described.holders.remote_leaves:
        leaf, handler, _ = described.boxes(alias)
        local[alias] = handler.shards(leaf, rank, size) or ()
    return described._replace(holders=described.holders._replace(local=local))


def report_of(description: TreeDescription) -> JSON:
    """Return what the leader needs to know about the state of this process."""
    return {
        "tree": description.tree.to_json(),
        "remote": sorted(description.holders.remote_leaves),
        "may_differ": sorted(per_process_leaves(description.flat)),
        "boxes": _boxes_json(description),
    }


def report_digest(description: TreeDescription) -> str:
    """Return a digest that is equal for two processes only if they hold the same boxes of the same tree."""
    held = [_boxes_json(description), sorted(per_process_leaves(description.flat))]
    return tree_digest(description) + xxhash.xxh3_128_hexdigest(json.dumps(held).encode())


def _boxes_json(description: TreeDescription) -> JSON:
    return [
        [leaf, [[list(shard.box.start), list(shard.box.stop)] for shard in shards]]
        for leaf, shards in description.holders.local.items()
    ]


def placed_in(description: TreeDescription, tree: TreeMetadata) -> TreeDescription:
    """Return the description of this process with the numbers of leaves of the tree of the job."""
    numbers = {path: number for number, path in enumerate(tree.paths)}
    positions = {numbers[path]: position for position, path in enumerate(description.tree.paths)}
    return description._replace(tree=tree, positions=positions)


class Merged(NamedTuple):
    """The state of the processes that did not lose it.

    Attributes:
        tree: all leaves.
        held: the boxes that processes hold, by leaf. Has no aliases.
    """

    tree: TreeMetadata
    held: Held


def merge_reports(reports: Sequence[Any], ranks: Sequence[Sequence[int]], lost: Sequence[int]) -> Merged:
    """Merge the states of processes.

    Args:
        reports: the different results of `report_of`.
        ranks: for each report, the ranks of the processes that it describes.
        lost: the ranks of the other processes of the job.

    Raises:
        ReplicasDifferError: a value, such as the step, differs between processes.
    """
    trees = [TreeMetadata.from_json(report["tree"]) for report in reports]
    remote = [frozenset(report["remote"]) for report in reports]
    may_differ = [frozenset(report["may_differ"]) for report in reports]
    holders = sum(map(len, ranks))
    try:
        tree = merge_trees(trees, ranks, size=holders + len(lost), remote_leaves=remote, may_differ=may_differ)
    except TreeMismatchError as error:
        lines = "\n  ".join(error.differences[:20])
        raise ReplicasDifferError(
            f"the processes that have their state hold different states:\n  {lines}\nAll of them must be at the same "
            "step; wrap state that differs between processes in PerProcess(...). Otherwise load a checkpoint. Nothing "
            "was changed"
        ) from error
    numbers = [{path: number for number, path in enumerate(own.paths)} for own in trees]
    boxes = [{leaf: list(map(box_from_json, listed)) for leaf, listed in report["boxes"]} for report in reports]
    held: dict[int, Sequence[HeldBox]] = {}
    for leaf, path in enumerate(tree.paths):
        record = tree.leaves[leaf]
        if leaf in tree.aliases or not isinstance(record, ArrayRecord):
            continue
        holding: dict[Box, list[int]] = {}
        differs = False
        for number, of_report in enumerate(ranks):
            own = numbers[number].get(path)
            if own is not None:
                differs |= own in may_differ[number] and record.cuts is None
                for box in boxes[number].get(own, ()):
                    holding.setdefault(box, []).extend(of_report)
        # As in a checkpoint, the array of the lowest rank counts if processes may have different ones.
        held[leaf] = [HeldBox(box, tuple(sorted(of)[: 1 if differs else None])) for box, of in holding.items()]
    # A process need not have a leaf that only some processes hold. The lost processes had all other leaves.
    held_by = {leaf: holding for leaf, holding in tree.held_by.items() if len(holding) < holders}
    return Merged(replace(tree, held_by=held_by), held)


def dtypes_of(tree: TreeMetadata) -> Mapping[int, np.dtype[Any]]:
    """Return the dtypes of the arrays, by leaf."""
    return {leaf: record.spec.numpy_dtype for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}


def lacking_values(tree: TreeMetadata, rank: int) -> list[str]:
    """Return the paths of the values in `PerProcess` that only one process had, and no process holds any more."""
    return [
        format_path(path)
        for path, node in containers_and_leaves((), tree.skeleton)
        if isinstance(node, Node) and node.type == PER_PROCESS and rank not in node.keys
    ]


def as_checkpoint(tree: TreeMetadata, context: Context) -> Checkpoint:
    """Return a state as an open checkpoint. The caller replaces its reads."""
    nbytes = sum([record.spec.nbytes for record in tree.leaves if isinstance(record, ArrayRecord)])
    root = Root(
        save_id=new_save_id(),
        created=save_created(),
        writer={},
        layout=_LAYOUT,
        state=None,
        tree=tree,
        # Loads limit the memory that they allocate by the size of the objects.
        objects={PLACE: ObjectRecord(PLACE, nbytes)},
    )
    storage = MemoryStorages().open("memory://job", StorageOptions())
    stored = _HeldFormat(runtime_of(context).registry.layout(_LAYOUT), None)
    return Checkpoint.of_root(Location(PLACE, storage, "state"), LocationVersion(None), root, context, stored)


class _HeldFormat(StoredFormat):
    """The format of a state that is in no objects."""

    def index(self, tree: TreeMetadata) -> ChunkIndex:
        """See `StoredFormat.index`."""
        return _NoChunks()


class _NoChunks(ChunkIndex):
    """The index of a state that is in no objects."""

    def boxes(self, leaf: int, box: Box) -> Sequence[Chunk]:
        """See `ChunkIndex.boxes`."""
        return ()

    def extents(self, leaf: int) -> Sequence[tuple[str, int, int]]:
        """See `ChunkIndex.extents`."""
        return ()


def box_from_json(encoded: Sequence[Sequence[int]]) -> Box:
    """Return the box with a start and a stop."""
    start, stop = encoded
    return Box(tuple(start), tuple(stop))
