"""`HostSave`: a save to separate near directories of several hosts.

A checkpoint stores every element once, on one host. A host cannot read the directories of other
hosts. To load a replicated array that another host wrote, a host would have to wait for the upload
and read the far directory. Therefore each host also stores copies of such arrays: each process
writes a small checkpoint of copies, which only its host uses.

No host commits before every process of the job has written. Then the leader builds the root and
sends it to every host, and the first process of each host commits it there. If a host fails before
its commit, only some hosts have the step. Such a step is incomplete, and is not loaded.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.commit.root import HOST_COPIES
from ckptcore.commit.root_json import encode_root
from ckptcore.io.snapshot import StateBoxes
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import expect_claim
from ckptcore.model.arrays import ArraySpec, Box, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import WriteItem, WritePlan
from ckptcore.model.tree import JSON, LEAF, Node
from ckptcore.planning.partition import Owners, owned_cells
from ckptcore.plugins import Plugins
from ckptcore.protocols import SaveCommit, StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import TreeDescription, refuse_differences
from ckptcore.saving.requests import NOTHING_COMMITTED, Save, SaveDraft, SavePart, failing_everywhere
from ckptcore.saving.writing import PlainCommit, PlainSave, build_root
from ckptcore_tiers.hosts import Hosts, shards_key

ReplicaShards = Mapping[int, Sequence[Shard]]
"""For each leaf of a tree, the shards of a process that have more than one replica in the job."""

_FIRST_STAGE: Final = "replicated shards"
"""First stage of a save after planning. A process that failed to plan reports its error there."""

_LAYOUT: Final = "safetensors"
"""Layout of copies, independent of the checkpoint's layout. It can store any array unchanged."""


@dataclass(frozen=True, slots=True)
class HostSave(PlainSave):
    """Save to a directory of each host, with copies of the replicated arrays that other hosts write.

    Attributes:
        hosts: groups of processes that share a near directory.
        message: called on the leader. Returns a message that every process receives with the root.
        receive: called on every process with that message, once all hosts have committed the step.
    """

    hosts: Hosts
    message: Callable[[], JSON]
    receive: Callable[[JSON], None]

    def prepare(self, draft: SaveDraft) -> Save:
        """Plan the parts, and the copies for this host."""
        if len(self.hosts.groups) == 1:
            return PlainSave.prepare(self, draft)
        with failing_everywhere(draft.save.agreement, _FIRST_STAGE):
            for description in draft.descriptions:
                refuse_differences(
                    description.layout,
                    "of which each host would have only a part: save in a directory that all hosts share",
                )
            save = draft.plan(self)
        return save._replace(parts=[*save.parts, *_plan_copies(save, self.hosts)])

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of a save."""
        return _HostCommit(save, self)


@dataclass(frozen=True, slots=True)
class _ReplicaCopies:
    """The boxes of a tree that a process copies for its host, as a separate tree with an array for each box.

    Attributes:
        tree: the original tree.
        source: plan with the boxes of the original tree, one box per item.
    """

    tree: TreeDescription
    source: WritePlan

    def part(self, directory: str, rank: int, plugins: Plugins) -> SavePart:
        """Return the part of the save that writes the copies.

        Args:
            directory: directory of the original tree within the checkpoint.
            rank: rank of this process.
            plugins: to find the layout.
        """
        items = []
        records = []
        for number, item in enumerate(self.source.items):
            (box,) = item.boxes
            spec = ArraySpec(box.shape, item.spec.dtype)
            items.append(WriteItem(number, spec, (Box.whole(box.shape),)))
            records.append(ArrayRecord(spec, notes={"copy_of": [item.leaf, list(box.start), list(box.stop)]}))
        tree = TreeMetadata(Node("list", tuple(range(len(items))), (LEAF,) * len(items)), tuple(records))
        layout = plugins.layout(_LAYOUT)
        layout.check(tree, 1)
        plan = WritePlan(tree, tuple(items), 0, 1, self.source.save_id, self.source.name)
        inside = f"{HOST_COPIES}/{rank}"
        return SavePart(f"{directory}/{inside}" if directory else inside, layout, plan, own=True, source=self)

    def boxes(self, leaf: int, boxes: tuple[Box, ...]) -> StateBoxes:
        """Return the box of the original tree that one array of the copies stores. See `ArraySource`."""
        item = self.source.items[leaf]
        return self.tree.boxes(item.leaf, item.boxes)


def _plan_copies(save: Save, hosts: Hosts) -> Sequence[SavePart]:
    """Plan copies of the replicated arrays that other hosts write. Every rank must call this. Waits for all ranks."""
    agreement, save_id = save.agreement, save.info.save_id
    rank, size = agreement.rank, agreement.size
    trees = {
        number: (part, part.source)
        for number, part in enumerate(save.parts)
        if isinstance(part.source, TreeDescription) and not part.own
    }
    own = {number: _replicated_shards(description) for number, (_, description) in trees.items()}
    on_host = _exchange_shards(agreement, save.target.location.parent, hosts, save_id, own)
    copies: list[SavePart] = []
    with agreement.stage("copies", meaning=NOTHING_COMMITTED):
        for number, (part, description) in trees.items():
            tree = description.tree
            by_rank = {other: shards.get(number, {}) for other, shards in on_host.items()}
            items = []
            for leaf, box in copied_boxes(tree, by_rank, description.owners(rank, size), rank):
                record = tree.leaves[leaf]
                assert isinstance(record, ArrayRecord)  # only arrays have boxes
                items.append(WriteItem(leaf, record.spec, (box,)))
            if items:
                source = WritePlan(tree, tuple(items), 0, 1, save_id, description.name)
                plugins = runtime_of(save.context).registry
                copies.append(_ReplicaCopies(description, source).part(part.directory, rank, plugins))
    return copies


def copied_boxes(
    tree: TreeMetadata, shards_by_rank: Mapping[int, ReplicaShards], owners: Mapping[int, Owners] | None, rank: int
) -> Iterator[tuple[int, Box]]:
    """Yield the boxes that one process copies for its host, each with its leaf.

    The boxes are parts of the shards of this process that no process of its host writes to the
    checkpoint. Processes of the host with the same shard share the work.

    Args:
        tree: the tree of the whole job.
        shards_by_rank: for each rank on this host, its replicated shards.
        owners: for each leaf of this process, the replica that writes each cell. Without an entry,
            replica 0 writes all.
        rank: the process.
    """
    on_host: dict[tuple[int, Box], dict[int, int]] = {}
    for other, of_rank in sorted(shards_by_rank.items()):
        for leaf, shards in of_rank.items():
            for shard in shards:
                on_host.setdefault((leaf, shard.box), {})[shard.replica] = other
    for leaf, shards in sorted(shards_by_rank[rank].items()):
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # only arrays have shards
        of_leaf = None if owners is None else owners.get(leaf)
        for shard in {shard.box: shard for shard in shards}.values():
            replicas = on_host[leaf, shard.box]
            if len(replicas) == shard.replicas or not shard.box.size:
                continue
            ranks = sorted(set(replicas.values()))
            for number, (cell, replica) in enumerate(owned_cells(record, shard, of_leaf)):
                if replica not in replicas and ranks[(leaf + number) % len(ranks)] == rank:
                    yield leaf, cell


def _replicated_shards(description: TreeDescription) -> ReplicaShards:
    shared = {
        leaf: tuple([shard for shard in shards if shard.replicas > 1])
        for leaf, shards in description.holders.local.items()
    }
    return {leaf: shards for leaf, shards in shared.items() if shards}


def _exchange_shards(
    agreement: Agreement, store: StorageBackend, hosts: Hosts, save_id: str, own: Mapping[int, ReplicaShards]
) -> Mapping[int, Mapping[int, ReplicaShards]]:
    """Return the replicated shards of every rank on this host, by rank and number of the part.

    The processes exchange shards as objects in the near directory, so that no data is sent to other
    hosts.

    Args:
        agreement: exchange of the save.
        store: near directory of this host.
        hosts: groups of processes that share a near directory.
        save_id: the save.
        own: shards of this process, by number of the part.
    """
    ranks = hosts.group_of(agreement.rank)
    key = shards_key(save_id, agreement.rank)
    try:
        with agreement.stage(_FIRST_STAGE, meaning=NOTHING_COMMITTED):
            if len(ranks) > 1:
                store.put(key, json.dumps(_encode_shards(own)).encode("ascii"))
        if max(map(len, hosts.groups)) == 1:
            return {agreement.rank: own}
        with agreement.stage("shards", meaning=NOTHING_COMMITTED):
            shards = {
                rank: _decode_shards(json.loads(store.get(shards_key(save_id, rank))))
                for rank in ranks
                if len(ranks) > 1
            }
        return {**shards, agreement.rank: own}
    finally:
        if len(ranks) > 1:
            store.delete([key])


def _encode_shards(shards_by_part: Mapping[int, ReplicaShards]) -> list[JSON]:
    return [
        [number, leaf, list(shard.box.start), list(shard.box.stop), shard.replica, shard.replicas]
        for number, of_tree in shards_by_part.items()
        for leaf, shards in of_tree.items()
        for shard in shards
    ]


def _decode_shards(encoded: Any) -> Mapping[int, ReplicaShards]:
    shards_by_part: dict[int, dict[int, list[Shard]]] = {}
    for number, leaf, start, stop, replica, replicas in encoded:
        shard = Shard(Box(tuple(start), tuple(stop)), replica, replicas)
        shards_by_part.setdefault(number, {}).setdefault(leaf, []).append(shard)
    return shards_by_part


class _HostCommit(PlainCommit):
    """Commit of a `HostSave`: the leader builds the root, and the first process of each host commits it there."""

    commit_meaning = "the step is incomplete, because not all hosts have it"

    def __init__(self, save: Save, strategy: HostSave) -> None:
        super().__init__(save)
        self._strategy = strategy
        self._message: JSON = None

    def claim(self) -> None:
        """Claim the location on the first process of each host."""
        rank = self._save.agreement.rank
        if rank == self._strategy.hosts.first_of(rank):
            self._begin_transaction()

    @property
    def store(self) -> StorageBackend:
        """Storage of the claim on this host.

        Raises:
            NotSharedError: if this process does not see the claim of its host.
        """
        if self._claim is None and self._claimed_store is None:
            expect_claim(self._save.info.claimed, self._save.target.location)
        return super().store

    def commit(self, payloads: Sequence[object]) -> None:
        """Build the root on the leader, and commit the same bytes on each host."""
        built: Any = self._save.agreement.lead("root", functools.partial(self._build_root, payloads))
        self._message = built["message"]
        if self._claim is None:
            return
        if self._save.agreement.rank != 0:
            for key, text in built["objects"].items():
                self._claim.store.put(key, base64.b64decode(text))
        if self._save.target.before_commit is not None:
            self._save.target.before_commit()
        parts = {key: base64.b64decode(text) for key, text in built["parts"].items()}
        self._claim.commit(base64.b64decode(built["root"]), parts)

    def _build_root(self, payloads: Sequence[object]) -> JSON:
        """Return the root and its tables, the objects that the leader wrote to finish the parts, and the message."""
        save, store = self._save, self.store
        if save.agreement.size > 1:
            save.take_receipts(payloads)
        before = set(store.list())
        with save.recording.phase("commit"):
            root, tables = encode_root(build_root(save.info, save.parts, store, save.context, save.recording))
        return {
            "root": _to_base64(root),
            "parts": {key: _to_base64(data) for key, data in tables.items()},
            "objects": {key: _to_base64(store.get(key)) for key in store.list() if key not in before},
            "message": self._strategy.message(),
        }

    def settle(self, error: Exception | None) -> None:
        """Call `HostSave.receive` with the leader's message if all hosts have committed; else raise the error."""
        if error is not None:
            raise error
        self._strategy.receive(self._message)

    def abort(self) -> None:
        """Remove the objects written on this host. A host that has committed keeps an incomplete step."""
        if self._claim is not None:
            self._claim.abort()


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
