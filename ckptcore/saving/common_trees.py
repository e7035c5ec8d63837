"""CommonTrees: the trees that all ranks of a job save together. Merges trees that differ between ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import xxhash

from ckptcore.commit.root import Member
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from ckptcore.job.agreement import Agreement
from ckptcore.model.arrays import Box, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning.partition import SplitTree
from ckptcore.plugins import Plugins
from ckptcore.protocols import Layout, LeafHandler, SaveStrategy
from ckptcore.saving.descriptions import PartDescription, TreeDescription, naming
from ckptcore.saving.requests import NOTHING_COMMITTED, Save, SaveDraft
from ckptcore.tree.flattening import per_process_leaves, per_process_objects
from ckptcore.tree.merge import merge_trees, refuse_different_arrays

_MOST_DIFFERENT: Final = 32
"""Maximum number of ranks that send their trees only because their array digests differ. Limits the error text."""


class CommonTrees:
    """The trees that all ranks of a job save together. Each rank creates this object from its own descriptions."""

    def __init__(self, descriptions: Sequence[PartDescription], agreement: Agreement, context: Context) -> None:
        """Refuse per-process objects, unless the context allows them.

        Raises:
            UnsupportedLeafError
        """
        self._own = {tree.name: tree for tree in descriptions if isinstance(tree, TreeDescription) and not tree.own}
        self._digests: Mapping[str, Mapping[str, int]] = {}
        self._agreement = agreement
        for description in self._own.values():
            refuse_per_process_objects(description, agreement.size, context)

    def payload(self, members: Mapping[str, Member] | None, strategy: SaveStrategy[SaveDraft, Save]) -> JSON:
        """Return digests of the names, trees and arrays of this rank, for comparison with the digests of other ranks.

        Ignores the notes of leaves, because they name devices, and each rank names the device of an array differently.
        """
        rank, size = self._agreement.rank, self._agreement.size
        self._digests = {name: replica_digests(tree, rank, size) for name, tree in self._own.items()}
        names = None if members is None else [[name, member.kind, member.processes] for name, member in members.items()]
        return {
            "names": _digest(names),
            "strategy": strategy.signature,
            "trees": {name: tree_digest(description) for name, description in self._own.items()},
            "arrays": {name: _digest(dict(digests)) for name, digests in self._digests.items()},
        }

    def compare(self, payloads: Sequence[Any]) -> dict[str, Sequence[int]]:
        """Find the trees that differ between ranks, or whose arrays have different digests. Only the leader calls this.

        Returns:
            By name of each such tree, the ranks that send their tree to the leader.

        Raises:
            CheckpointError: the ranks save different checkpointables or further checkpoints.
            UnsupportedLeafError: no rank holds an array that all ranks describe.
        """
        for same, kind in (("names", "checkpointables (names, order, kinds)"), ("strategy", "further checkpoints")):
            others = [rank for rank, payload in enumerate(payloads) if payload[same] != payloads[0][same]]
            if others:
                values = f": {payloads[others[0]][same]!r} and {payloads[0][same]!r}" if same == "strategy" else ""
                raise CheckpointError(
                    f"the ranks {others} and rank 0 save different {kind}{values}. Save the same ones on every rank; "
                    "only the trees may differ. Nothing was written"
                )
        different: dict[str, Sequence[int]] = {}
        for name, description in self._own.items():
            senders = [ranks[0] for ranks in _groups(name, payloads)]
            others = [ranks[0] for ranks in _groups(name, payloads, "arrays") if ranks[0] not in senders]
            if len(senders) == 1:
                _refuse_unheld_arrays(description)
            if len(senders) > 1 or others:
                different[name] = [*senders, *others[:_MOST_DIFFERENT]]
        return different

    def merge(self, senders: Mapping[str, Sequence[int]], payloads: Sequence[Any]) -> Mapping[str, TreeDescription]:
        """Return all trees by name. A tree that differs between ranks becomes part of the union. Every rank calls this.

        Ranks with equal trees and equal array digests form a group. Only one rank of each group sends its tree to the
        leader, so that messages do not grow with the job.

        Raises:
            TreeMismatchError: on the leader, if trees cannot be merged, or arrays differ that must be equal. Other
                ranks raise RankFailedError with its text.
        """
        agreement, own = self._agreement, self._own
        if not senders:
            return own

        def unite() -> dict[str, JSON]:
            sent: Sequence[Any] = stage.payloads
            return {
                name: self._united(name, {rank: sent[rank][name] for rank in ranks}, payloads)
                for name, ranks in senders.items()
            }

        with agreement.stage("trees", meaning=NOTHING_COMMITTED) as stage:
            stage.decide = unite
            stage.payload = {
                name: [
                    own[name].tree.to_json(),
                    sorted(own[name].holders.remote_leaves),
                    sorted(per_process_leaves(own[name].flat)),
                    self._digests[name],
                ]
                for name, ranks in senders.items()
                if agreement.rank in ranks
            }
        united: Mapping[str, str] = stage.decision
        with agreement.stage("united", meaning=NOTHING_COMMITTED):
            for name, encoded in united.items():
                union = TreeMetadata.from_json(json.loads(encoded))
                with naming(name):
                    own[name] = _within(own[name], union, rank=agreement.rank, size=agreement.size)
        return own

    def _united(self, name: str, received: Mapping[int, Any], payloads: Sequence[Any]) -> str:
        """Return the union of the trees that some ranks sent, as JSON. Only the leader calls this."""
        trees = {rank: TreeMetadata.from_json(tree) for rank, (tree, *_) in received.items()}
        groups = _groups(name, payloads)
        first = [received[ranks[0]] for ranks in groups]
        with naming(name):
            tree = merge_trees(
                [trees[ranks[0]] for ranks in groups],
                groups,
                size=self._agreement.size,
                remote_leaves=[remote_leaves for _, remote_leaves, _, _ in first],
                may_differ=[may_differ for _, _, may_differ, _ in first],
            )
            alike = [ranks for ranks in _groups(name, payloads, "arrays") if ranks[0] in trees]
            refuse_different_arrays(
                [trees[ranks[0]] for ranks in alike], alike, [received[ranks[0]][3] for ranks in alike]
            )
            self._own[name].layout.check(tree, self._agreement.size)
        return json.dumps(tree.to_json())


def _within(description: TreeDescription, union: TreeMetadata, *, rank: int, size: int) -> TreeDescription:
    """Return the leaves of a tree as part of the tree that all processes save together.

    A leaf that only some processes have is divided among these processes: its handler is called with their number,
    and with the position of this process among them.

    Args:
        description: the tree of this process.
        union: the tree of all processes, with every leaf of this tree.
        rank, size: the rank of this process, and the number of processes of the job.

    Raises:
        UnsupportedLeafError: from a handler.
    """
    tree, flat, held = description.tree, description.flat, description.holders
    numbers = {path: number for number, path in enumerate(union.paths)}
    positions = {numbers[path]: position for position, path in enumerate(tree.paths)}
    shards: dict[int, Sequence[Shard]] = {}
    known = {} if description.shares is None else description.shares.replicas
    replicas = {leaf: known[position] for leaf, position in positions.items() if position in known}
    for leaf, position in positions.items():
        if leaf in union.aliases or not isinstance(union.leaves[leaf], ArrayRecord):
            continue
        if position in held.remote_leaves or not isinstance(tree.leaves[position], ArrayRecord):
            continue
        holders = union.held_by.get(leaf)
        if holders is None and position in held.local:
            shards[leaf] = held.local[position]
            continue
        index, count = (rank, size) if holders is None else (holders.index(rank), len(holders))
        handler = flat.handlers[position]
        assert handler is not None  # placeholders are for loading only
        try:
            local = handler.shards(flat.leaves[position], index, count)
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(f"{format_path(union.paths[leaf])}: {error}. Nothing was written") from error
        shards[leaf] = local or ()
        if replicas.get(leaf, 1) > 1:
            replicas[leaf] = handler.replicas(flat.leaves[position], count) or 1
    shares = description.shares
    if shares is not None:
        cut = shares.splits
        splits = {leaf: cut[position] for leaf, position in positions.items() if position in cut}
        shares = SplitTree(union, splits, replicas)
    return description._replace(tree=union, holders=held._replace(local=shards), positions=positions, shares=shares)


def refuse_per_process_objects(description: TreeDescription, size: int, context: Context) -> None:
    """Refuse per-process objects in a shared tree, because the checkpoint would store only one of them.

    Equal objects are refused too, because they may differ at a later save of the same job.
    """
    if size == 1 or description.own or context.job.replicas.objects != "refuse":
        return
    objects = [
        f"{format_path(path)} is a {type(thing).__module__}.{type(thing).__qualname__}"
        for path, thing in per_process_objects(description.flat.shape)
    ]
    if objects:
        where = f"in {description.name!r}: " if description.name else ""
        more = f"; and {len(objects) - 20} more" if len(objects) > 20 else ""
        raise UnsupportedLeafError(
            f"{where}{'; '.join(objects[:20])}{more}: every process has its own, and a tree that {size} processes save "
            "together stores only one. To store one for each rank, wrap it in PerProcess(...), or save it as a "
            "separate name in save_checkpointables. To store all shards and otherwise the lowest rank's state, as "
            "torch.distributed.checkpoint does, save with "
            'Context(job=JobOptions(replicas=ReplicaOptions(objects="lowest_rank"))). Nothing was written'
        )


def share_replicas(layout: Layout, strategy: SaveStrategy[SaveDraft, Save], registry: Plugins) -> bool:
    """Return True if every layout lets any replica write a box, including the layouts of further saves."""
    layouts = [layout, *map(registry.layout, strategy.layouts)]
    return all(each.capabilities.any_replica_writes for each in layouts)


def tree_digest(description: TreeDescription) -> str:
    """Return a digest that is equal for two ranks only if they save the same tree and hold boxes of the same arrays.

    Ignores notes.
    """
    return _digest([_without_notes(description.tree.to_json()), sorted(description.holders.remote_leaves)])


def _digest(document: JSON) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def _without_notes(tree: dict[str, JSON]) -> JSON:
    """Return a tree without notes. Cuts are stored once and referred to by number: many arrays share long cuts."""
    extras: Any = tree["extras"]
    cuts: dict[Any, int] = {}
    compact = {}
    for leaf, extra in extras.items():
        compact[leaf] = dict(extra)
        if "cuts" in extra:
            compact[leaf]["cuts"] = cuts.setdefault(extra["cuts"], len(cuts))
    columns = {name: column for name, column in tree.items() if name not in ("notes", "note")}
    return {**columns, "extras": compact, "cuts": list(cuts)}


def _refuse_unheld_arrays(description: TreeDescription) -> None:
    """Refuse arrays whose elements no rank holds. The leader checks this for all ranks, whose digests are equal."""
    if description.holders.remote_leaves:
        paths = [format_path(description.tree.paths[leaf]) for leaf in sorted(description.holders.remote_leaves)]
        more = f" and {len(paths) - 20} more" if len(paths) > 20 else ""
        raise UnsupportedLeafError(
            f"{', '.join(paths[:20])}{more}: no process of this job holds any shard. Save from the processes that "
            "own the devices or belong to the mesh, or remove it from the state. Nothing was written"
        )


def _groups(name: str, payloads: Sequence[Any], *further: str) -> list[list[int]]:
    """Return the groups of ranks that have the same tree under a name, and the same `further` digests."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, payload in enumerate(payloads):
        ranks.setdefault(tuple([payload[digest][name] for digest in ("trees", *further)]), []).append(rank)
    return list(ranks.values())


def replica_digests(description: TreeDescription, rank: int, size: int) -> Mapping[str, int]:
    """Return the digests of the arrays that are assumed to be equal in all processes.

    Includes only arrays that any process may write. The result is empty if replica 0 writes all boxes. Skips arrays
    that know which processes hold their boxes, and arrays that may differ between processes.

    Args:
        description: the tree of this process.
        rank, size: the rank of this process, and the number of processes of the job.

    Returns:
        The digest of each box. Its key is the number of the leaf; for a part of an array, the number and the box.
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
            digest = _sample_digest(handler, leaf, record, shard.box)
            if digest is not None:
                digests[f"{number}" if shard.box.shape == record.spec.shape else f"{number} {shard.box}"] = digest
    return digests


def _is_assumed_equal(handler: LeafHandler, leaf: object, rank: int, size: int) -> bool:
    """Return True if an array does not know which processes hold it.

    Asks for the shards in a job with one more process: such an array then has one more replica.
    """
    shards = handler.shards_of(leaf, None, rank, size + 1)
    return shards is not None and all(shard.replicas == size + 1 for shard in shards)


def _sample_digest(handler: LeafHandler, leaf: object, record: ArrayRecord, box: Box) -> int | None:
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
