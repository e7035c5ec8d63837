"""Saves into directories of single hosts.

A checkpoint has every element once, on one of the hosts that hold it. A host whose disk the others do not see would
have to read from elsewhere what it held itself, and could not before that is uploaded. So each host has copies of it,
beside its part of the checkpoint: a small checkpoint of each process, of which nothing is told to anybody else.

Nothing is committed on any host before every process of the job has written. Then the leader makes the root, every host
gets it, and the first process of each commits it there. If a host dies in between, the step is on some hosts and not on
all: it does not count.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ckptcore.commit.root import HOST_COPIES
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import expect_claim
from ckptcore.model.arrays import ArraySpec, Box, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import Pending, WriteItem, WritePlan
from ckptcore.model.tree import JSON, LEAF, Node
from ckptcore.planning.replicas import Owners, owned_cells
from ckptcore.plugins import Plugins
from ckptcore.protocols import HostMemory, SaveCommit, StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import SavePart
from ckptcore.saving.requests import NOTHING_COMMITTED, Save, SaveDraft, fail_everywhere
from ckptcore.saving.roots import build_root, encode
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore.saving.writing import PlainCommit, PlainSave
from ckptcore_tiers.host_groups import Hosts, OnHosts, note_key

__all__ = ["CopyDescription", "Held", "HostSave", "copied_boxes"]

Held = Mapping[int, Sequence[Shard]]
"""By leaf of a tree, the boxes that a process holds and others hold too."""

_FIRST_STAGE: Final = "held"
"""Where the others wait for a process that cannot go on with a save that it has described."""

_LAYOUT: Final = "safetensors"
"""How copies are laid out, whatever the layout of the checkpoint: it stores any array as it is."""


@dataclass(frozen=True, slots=True)
class HostSave(PlainSave):
    """Write into a directory of each host, with copies of what the host holds and others write.

    Attributes:
        on_hosts: the hosts, and what the leader tells them.
    """

    on_hosts: OnHosts

    def prepare(self, draft: SaveDraft) -> Save:
        """Plan the parts, and the copies for this host."""
        if len(self.on_hosts.hosts.groups) == 1:
            return PlainSave.prepare(self, draft)
        try:
            save = draft.plan(self)
        except BaseException as error:  # noqa: BLE001  # sent to the other ranks, then raised
            fail_everywhere(draft.save.agreement, _FIRST_STAGE, error)
        return replace(save, parts=[*save.parts, *_plan_copies(save, self.on_hosts.hosts)])

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of a save."""
        return _HostCommit(save, self.on_hosts)


@dataclass(frozen=True, slots=True)
class CopyDescription:
    """What a process copies of a tree for its host: a tree of its own, with each box as an array.

    Attributes:
        of: the tree.
        source: the boxes of that tree, one to an item.
    """

    of: TreeDescription
    source: WritePlan

    def part(self, directory: str, rank: int, plugins: Plugins) -> SavePart:
        """What is written.

        Args:
            directory: of the tree within the checkpoint.
            rank: of this process.
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

    def copy(self, item: WriteItem, memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """See `ArraySource`."""
        return self.of.copy(self.source.items[item.leaf], memory)

    def view(self, item: WriteItem) -> Sequence[Pending[HostArray]]:
        """See `ArraySource`."""
        return self.of.view(self.source.items[item.leaf])


def _plan_copies(save: Save, hosts: Hosts) -> Sequence[SavePart]:
    """Plan copies of what this host holds and others write. On every rank; blocks until all hosts have looked."""
    agreement, save_id = save.agreement, save.info.save_id
    rank, size = agreement.rank, agreement.size
    trees = {
        number: (part, part.source)
        for number, part in enumerate(save.parts)
        if isinstance(part.source, TreeDescription) and not part.own
    }
    held = {number: _replicated(description) for number, (_, description) in trees.items()}
    on_host = _exchange(agreement, save.target.location.parent, hosts, save_id, held)
    copies: list[SavePart] = []
    with agreement.stage("copies", meaning=NOTHING_COMMITTED):
        for number, (part, description) in trees.items():
            tree = description.tree
            by_rank = {other: found.get(number, {}) for other, found in on_host.items()}
            items = []
            for leaf, box in copied_boxes(tree, by_rank, description.owners(rank, size), rank):
                record = tree.leaves[leaf]
                assert isinstance(record, ArrayRecord)  # only arrays have boxes
                items.append(WriteItem(leaf, record.spec, (box,)))
            if items:
                source = WritePlan(tree, tuple(items), 0, 1, save_id, description.name)
                plugins = runtime_of(save.context).registry
                copies.append(CopyDescription(description, source).part(part.directory, rank, plugins))
    return copies


def copied_boxes(
    tree: TreeMetadata, held: Mapping[int, Held], owners: Mapping[int, Owners] | None, rank: int
) -> Iterator[tuple[int, Box]]:
    """The boxes that one process copies for its host, each with its leaf: those that no process of the host writes of what it holds.

    Several processes of a host that hold one box take turns. Every one finds its own from what is told of the boxes
    that it holds, so that it need not know of other arrays.

    Args:
        tree: of the whole job.
        held: by rank on this host, what it holds.
        owners: of what this process holds, which replicas write which cells.
        rank: the process.
    """
    here: dict[tuple[int, Box], dict[int, int]] = {}
    for other, of_rank in sorted(held.items()):
        for leaf, shards in of_rank.items():
            for shard in shards:
                here.setdefault((leaf, shard.box), {})[shard.replica] = other
    for leaf, shards in sorted(held[rank].items()):
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # only arrays have shards
        of_leaf = None if owners is None else owners.get(leaf)
        for shard in {shard.box: shard for shard in shards}.values():
            replicas = here[leaf, shard.box]
            if len(replicas) == shard.replicas or not shard.box.size:
                continue
            ranks = sorted(set(replicas.values()))
            for number, (cell, replica) in enumerate(owned_cells(record, shard, of_leaf)):
                if replica not in replicas and ranks[(leaf + number) % len(ranks)] == rank:
                    yield leaf, cell


def _replicated(description: TreeDescription) -> Held:
    shared = {
        leaf: tuple([shard for shard in shards if shard.replicas > 1]) for leaf, shards in description.held.here.items()
    }
    return {leaf: shards for leaf, shards in shared.items() if shards}


def _exchange(
    agreement: Agreement, store: StorageBackend, hosts: Hosts, save_id: str, own: Mapping[int, Held]
) -> Mapping[int, Mapping[int, Held]]:
    """By rank on this host, what it holds of each tree; told in the directory of the host, so that it is told to no other.

    Args:
        agreement: of the save.
        store: the directory of the steps on this host.
        hosts: who is where.
        save_id: the save.
        own: by number of the part, what this process holds.
    """
    beside = hosts.beside(agreement.rank)
    key = note_key(save_id, agreement.rank)
    try:
        with agreement.stage(_FIRST_STAGE, meaning=NOTHING_COMMITTED):
            if len(beside) > 1:
                store.put(key, json.dumps(_told(own)).encode("ascii"))
        if max(map(len, hosts.groups)) == 1:
            return {agreement.rank: own}
        with agreement.stage("beside", meaning=NOTHING_COMMITTED):
            found = {rank: _heard(json.loads(store.get(note_key(save_id, rank)))) for rank in beside if len(beside) > 1}
        return {**found, agreement.rank: own}
    finally:
        if len(beside) > 1:
            store.delete([key])


def _told(held: Mapping[int, Held]) -> list[JSON]:
    return [
        [number, leaf, list(shard.box.start), list(shard.box.stop), shard.replica, shard.replicas]
        for number, of_tree in held.items()
        for leaf, shards in of_tree.items()
        for shard in shards
    ]


def _heard(told: Any) -> Mapping[int, Held]:
    held: dict[int, dict[int, list[Shard]]] = {}
    for number, leaf, start, stop, replica, replicas in told:
        shard = Shard(Box(tuple(start), tuple(stop)), replica, replicas)
        held.setdefault(number, {}).setdefault(leaf, []).append(shard)
    return held


class _HostCommit(PlainCommit):
    """The commit of a save into a directory of each host: the leader builds the root, and every host commits it."""

    commit_meaning = "the step is not on all hosts, and does not count"

    def __init__(self, save: Save, on_hosts: OnHosts) -> None:
        """Claim nothing yet."""
        super().__init__(save)
        self._on_hosts = on_hosts
        self._told: JSON = None

    def claim(self) -> None:
        """Claim the location on the first process of each host."""
        rank = self._save.agreement.rank
        if rank == self._on_hosts.hosts.first_of(rank):
            self._take_claim()

    @property
    def store(self) -> StorageBackend:
        """The storage of the claim on this host.

        Raises:
            NotSharedError: this process does not see the claim of its host.
        """
        if self._claim is None and self._followed is None:
            expect_claim(self._save.info.claimed, self._save.target.location)
        return super().store

    def commit(self, payloads: Sequence[object]) -> None:
        """Build the root on the leader; commit the same bytes on each host."""
        whole: Any = self._save.agreement.lead("root", functools.partial(self._compose, payloads))
        self._told = whole["told"]
        if self._claim is None:
            return
        if self._save.agreement.rank != 0:
            for key, text in whole["objects"].items():
                self._claim.store.put(key, _bytes(text))
        if self._save.target.before_commit is not None:
            self._save.target.before_commit()
        self._claim.commit(_bytes(whole["root"]), {key: _bytes(text) for key, text in whole["parts"].items()})

    def _compose(self, payloads: Sequence[object]) -> JSON:
        """The root, what it names, and the objects that the leader wrote to finish the parts."""
        save, store = self._save, self.store
        if save.agreement.size > 1:
            save.take_receipts(payloads)
        before = set(store.list())
        with save.recording.phase("commit"):
            root, tables = encode(build_root(save.info, save.parts, store, save.context, save.recording))
        return {
            "root": _text(root),
            "parts": {key: _text(data) for key, data in tables.items()},
            "objects": {key: _text(store.get(key)) for key in store.list() if key not in before},
            "told": self._on_hosts.tell(),
        }

    def settle(self, error: Exception | None) -> None:
        """Take what the leader tells all hosts, if all have committed."""
        if error is not None:
            raise error
        self._on_hosts.hear(self._told)

    def abort(self) -> None:
        """Remove what was written on this host. A host that has committed keeps it, and it does not count."""
        if self._claim is not None:
            self._claim.abort()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
