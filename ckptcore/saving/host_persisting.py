"""Saves into directories of single hosts.

A checkpoint has every element once, on one of the hosts that hold it. A host whose disk the others do not see would have to read from
elsewhere what it held itself, and could not before that is uploaded. So each host has copies of it, beside its part of the checkpoint: a
small checkpoint of each process, of which nothing is told to anybody else.

Nothing is committed on any host before every process of the job has written. Then the leader makes the root, every host gets it, and
the first process of each commits it there. If a host dies in between, the step is on some hosts and not on all: it does not count.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ckptcore.commit.root import HOST_COPIES, Claimed
from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import Recording
from ckptcore.io.background import SaveHandle
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import Hosts, OnHosts, expect_claim, note_key
from ckptcore.model.arrays import ArraySpec, Box, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import WriteItem, WritePlan
from ckptcore.model.tree import JSON, LEAF, Node
from ckptcore.planning.replicas import Owners, owned_cells
from ckptcore.plugins import Plugins
from ckptcore.protocols import HostBytes, HostMemory, StorageBackend, Transaction
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import Captured, Part
from ckptcore.saving.persisting import (
    NOTHING_COMMITTED,
    Described,
    build_whole,
    claim_for,
    decode_written,
    encode_written,
    write_parts,
)
from ckptcore.saving.tree_descriptions import StartTransfer, TreeDescription

__all__ = [
    "FIRST_STAGE",
    "CopyDescription",
    "Held",
    "add_host_copies",
    "copied_boxes",
    "persist_on_hosts",
]

Held = Mapping[int, Sequence[Shard]]
"""By leaf of a tree, the boxes that a process holds and others hold too."""

FIRST_STAGE: Final = "held"
"""Where the others wait for a process that cannot go on with a save that it has described."""

_LAYOUT: Final = "safetensors"
"""How copies are laid out, whatever the layout of the checkpoint: it stores any array as it is."""


@dataclass(frozen=True, slots=True)
class CopyDescription:
    """What a process copies of a tree for its host: a tree of its own, with each box as an array.

    Attributes:
        of: the tree.
        source: the boxes of that tree, one to an item.
    """

    of: TreeDescription
    source: WritePlan

    @property
    def name(self) -> str:
        """Of the checkpointable."""
        return self.of.name

    def part(self, directory: str, rank: int, plugins: Plugins) -> Part:
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
        return Part(f"{directory}/{inside}" if directory else inside, layout, plan, own=True, copies=True)

    def host_bytes(self, item: WriteItem) -> HostBytes:
        """As of a `TreeDescription`."""
        return self.of.host_bytes(self.source.items[item.leaf])

    def start_copy(self, plan: WritePlan, memory: HostMemory) -> StartTransfer:
        """As of a `TreeDescription`."""
        return self.of.start_copy(self.source, memory)

    def start_view(self, plan: WritePlan) -> StartTransfer:
        """As of a `TreeDescription`."""
        return self.of.start_view(self.source)


def add_host_copies(
    described: Described, trees: Sequence[tuple[int, TreeDescription]], hosts: Hosts, plugins: Plugins
) -> tuple[Described, Sequence[CopyDescription]]:
    """Let a save have copies of what this host holds and others write. On every rank; blocks until all hosts have looked.

    Args:
        described: the save.
        trees: that all processes save together, each with the number of its part.
        hosts: who is where.
        plugins: to find the layout of copies.

    Returns:
        The save with the parts that this process writes for its host, and what each of those is.
    """
    agreement, save_id = described.agreement, described.save_id
    rank, size = agreement.rank, agreement.size
    held = {number: _replicated(description) for number, description in trees}
    on_host = _exchange(agreement, described.location.parent, hosts, save_id, held)
    parts: list[Part] = []
    copied: list[CopyDescription] = []
    with agreement.stage("copies", meaning=NOTHING_COMMITTED):
        for number, description in trees:
            tree = description.tree
            by_rank = {other: found.get(number, {}) for other, found in on_host.items()}
            items = []
            for leaf, box in copied_boxes(tree, by_rank, description.owners(rank, size), rank):
                record = tree.leaves[leaf]
                assert isinstance(record, ArrayRecord)  # only arrays have boxes
                items.append(WriteItem(leaf, record.spec, (box,)))
            if items:
                source = WritePlan(tree, tuple(items), 0, 1, save_id, description.name)
                copied.append(CopyDescription(description, source))
                parts.append(copied[-1].part(described.parts[number].directory, rank, plugins))
    return replace(described, parts=[*described.parts, *parts]), copied


def copied_boxes(
    tree: TreeMetadata, held: Mapping[int, Held], owners: Mapping[int, Owners] | None, rank: int
) -> Iterator[tuple[int, Box]]:
    """The boxes that one process copies for its host, each with its leaf: those that no process of the host writes of what it holds.

    Several processes of a host that hold one box take turns. Every one finds its own from what is told of the boxes that it holds, so
    that it need not know of other arrays.

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
        leaf: tuple([shard for shard in shards if shard.replicas > 1]) for leaf, shards in description.shards.items()
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
        with agreement.stage(FIRST_STAGE, meaning=NOTHING_COMMITTED):
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


def persist_on_hosts(
    described: Described,
    captured: Sequence[Captured],
    context: Context,
    recording: Recording,
    handle: SaveHandle | None,
    on_hosts: OnHosts,
) -> None:
    """Claim the location on each host, write, and commit on each. On every rank; returns once all hosts have committed.

    Args:
        described: the save; its location is that of this host.
        captured: what each of its parts holds.
        context: options.
        recording: is told the phases.
        handle: counts the bytes written.
        on_hosts: who is where.

    Raises:
        CheckpointError: why it is not committed on every host. A host that had committed keeps what it has, and it counts for nobody.
    """
    agreement, hosts = described.agreement, on_hosts.hosts
    claimed = Claimed(described.save_id, described.created)
    claim: Transaction | None = None
    try:
        with agreement.stage("claim", meaning=NOTHING_COMMITTED):
            if agreement.rank == hosts.first_of(agreement.rank):
                with recording.phase("claim"):
                    claim = claim_for(described, claimed, context)
                    claim.show_claim()
        store = (
            claim.store
            if claim is not None
            else described.location.commits.store_of(
                described.location, described.save_id, runtime_of(context).conditions
            )
        )
        with agreement.stage("write", meaning=NOTHING_COMMITTED) as stage:
            if claim is None:
                expect_claim(claimed, described.location)
            with recording.phase("write") as phase:
                written = write_parts(described, captured, store, context, handle, None)
                phase.nbytes = sum(record.size for part in written for receipt in part for record in receipt.objects)
            own = [receipts for part, receipts in zip(described.parts, written, strict=True) if not part.own]
            stage.payload = encode_written(described, [receipt for (receipt,) in own])
        payloads = stage.payloads

        def make_whole() -> JSON:
            before = set(store.list())
            parts = [part for part in described.parts if not part.own]
            receipts = decode_written(described, payloads)
            with recording.phase("commit"):
                root, of_root = build_whole(described, store, parts, receipts, context, recording)
            made = {key: store.get(key) for key in store.list() if key not in before}
            return {
                "root": _text(root),
                "parts": {key: _text(data) for key, data in of_root.items()},
                "objects": {key: _text(data) for key, data in made.items()},
                "told": on_hosts.tell(),
            }

        whole: Any = agreement.lead("root", make_whole)
        with agreement.stage("commit", meaning="the step is not on all hosts, and does not count"):
            if claim is not None:
                if agreement.rank != 0:
                    for key, text in whole["objects"].items():
                        claim.store.put(key, _bytes(text))
                if described.before_commit is not None:
                    described.before_commit()
                claim.commit(_bytes(whole["root"]), {key: _bytes(text) for key, text in whole["parts"].items()})
        on_hosts.hear(whole["told"])
    except BaseException as error:
        try:
            if claim is not None:
                claim.abort()
        except CheckpointError as failure:
            # The error that stopped the save says more; the next save removes what is left.
            error.add_note(f"removing what was written failed too: {failure}")
        raise


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
