"""Trials: checkpoints that a layout writes and reads without a commit, for any number of processes."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from ckptcore_incremental.session_tables import SessionReceipts, merge_sessions

from ckptcore.io.checksums import BlockChecksums
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads
from ckptcore.job.receipts import decode_receipts, encode_receipts
from ckptcore.model import (
    BLOCK_BYTES,
    JSON,
    LEAF,
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    Key,
    LeafRecord,
    Node,
    ObjectRecord,
    ReadItem,
    Receipt,
    Skeleton,
    TreeMetadata,
    TreePath,
    ValueRecord,
    WriteItem,
    WritePlan,
)
from ckptcore.model.transfer import list_of_column
from ckptcore.planning import cuts_of
from ckptcore.protocols import CheckpointInfo, Layout, ReadStore, StorageBackend
from ckptcore_testing.arrays import assert_same_bits, bit_patterns
from ckptcore_testing.layout_stores import (
    MemorySnapshot,
    MutableObject,
    StrictReadStore,
    StrictWriteStore,
    objects_below,
)

SAVE_ID = "0123456789abcdef"
CREATED = "2026-01-02T03:04:05.678+00:00"


@dataclass(frozen=True)
class Trial:
    """A tree with elements.

    Attributes:
        tree: the tree.
        arrays: elements of all arrays, including aliases, by number of the leaf.
        parts: the boxes that each process writes, by number of the leaf. Process 0 writes the whole of other leaves.
        size: number of processes.
        name: name of the checkpointable. Empty if the tree is the whole checkpoint.
        session: in a partial save, the rank of the first process of this session among the processes of all sessions.
            None: not a partial save.
    """

    tree: TreeMetadata
    arrays: Mapping[int, HostArray]
    parts: Mapping[int, Sequence[Sequence[Box]]]
    size: int = 1
    name: str = ""
    session: int | None = None

    def plan(self, rank: int) -> WritePlan:
        """Return the plan of one process."""
        items = []
        for leaf, array in self.arrays.items():
            if leaf in self.tree.aliases:
                continue
            record = self.tree.leaves[leaf]
            assert isinstance(record, ArrayRecord)
            default = [(Box.whole(array.shape),), *[()] * (self.size - 1)]
            boxes = tuple(self.parts.get(leaf, default)[rank])
            if boxes:
                items.append(WriteItem(leaf, record.spec, boxes))
        first = self.session or 0
        return WritePlan(self.tree, tuple(items), first + rank, self.size, SAVE_ID, self.name, self.session)


def tree_trial(
    skeleton: Skeleton,
    leaves: Sequence[ArraySpec | ValueRecord],
    *,
    aliases: Mapping[int, int] | None = None,
    parts: Mapping[int, Sequence[Sequence[Box]]] | None = None,
    size: int = 1,
) -> Trial:
    """Return a trial of these leaves, in the order of the skeleton, with random elements."""
    records: list[LeafRecord] = []
    arrays: dict[int, HostArray] = {}
    aliases, parts = aliases or {}, parts or {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, ValueRecord):
            records.append(leaf)
            continue
        boxes = [box for boxes in parts.get(number, ()) for box in boxes]
        records.append(ArrayRecord(leaf, cuts=cuts_of(leaf.shape, boxes)))
        arrays[number] = bit_patterns(leaf, aliases.get(number, number))
    return Trial(TreeMetadata(skeleton, tuple(records), dict(aliases)), arrays, parts, size)


def flat_trial(
    specs: Mapping[Key, ArraySpec], *, parts: Mapping[int, Sequence[Sequence[Box]]] | None = None, size: int = 1
) -> Trial:
    """Return a trial of one dict of arrays."""
    skeleton = Node("dict", tuple(specs), (LEAF,) * len(specs))
    return tree_trial(skeleton, tuple(specs.values()), parts=parts, size=size)


@dataclass(frozen=True)
class WrittenTrial:
    """A written trial.

    Attributes:
        trial: the trial.
        layout: the layout.
        storage: the storage.
        state: the layout's state in the root, encoded and decoded as JSON.
        digests: SHA-256 of each object.
        records: record of each object in the root.
    """

    trial: Trial
    layout: Layout
    storage: StorageBackend
    state: JSON
    digests: Mapping[str, bytes]
    records: Mapping[str, ObjectRecord]

    def objects(self) -> dict[str, MutableObject]:
        """Return the objects by key."""
        return {key: stored for key, stored in objects_below(self.storage).items() if key in self.digests}

    def read(
        self,
        wanted: Sequence[tuple[int, Box]] | None = None,
        *,
        state: JSON = "as written",
        tree: TreeMetadata | None = None,
        verified: bool = True,
        store: ReadStore | None = None,
    ) -> list[HostArray]:
        """Read boxes of leaves, and check that the layout follows the protocol.

        Args:
            wanted: numbers of leaves, and boxes. None: all arrays but aliases.
            state, tree: the state and the tree to read with, by default the written ones.
            verified: True if the default store verifies objects.
            store: the store to read from. None: a `StrictReadStore`.
        """
        tree = self.trial.tree if tree is None else tree
        if wanted is None:
            wanted = [
                (leaf, Box.whole(record.spec.shape))
                for leaf, record in enumerate(tree.leaves)
                if isinstance(record, ArrayRecord) and leaf not in tree.aliases
            ]
        items = [ReadItem(leaf, box) for leaf, box in wanted]
        index = self.layout.index(tree, self.state if state == "as written" else state)
        buffers = []
        for leaf, box in wanted:
            record = tree.leaves[leaf]
            assert isinstance(record, ArrayRecord)
            buffers.append(_unwritten(record.spec._replace(shape=box.shape)))
        if store is None:
            store = self.stores(verified=verified)[0]
        at_yield: dict[int, bytes] = {}
        for number in store.read_boxes(index, items, buffers):
            assert 0 <= number < len(items), f"read yields {number}, but there are {len(items)} buffers"
            assert number not in at_yield, f"read yields {number} twice"
            at_yield[number] = buffers[number].tobytes()
        assert len(at_yield) == len(items), f"read never yields {sorted(set(range(len(items))) - set(at_yield))}"
        for number, elements in at_yield.items():
            assert buffers[number].tobytes() == elements, f"buffer {number} changed after it was yielded"
        return buffers

    def assert_reads_back(
        self, wanted: Sequence[tuple[int, Box]] | None = None, *, stores: Sequence[ReadStore] = ()
    ) -> None:
        """Fail unless boxes of leaves are read back bitwise.

        Args:
            wanted: numbers of leaves, and boxes. None: all arrays but aliases.
            stores: the stores to read from, one after another. Empty: both kinds of `stores()`.
        """
        if wanted is None:
            wanted = [
                (leaf, Box.whole(array.shape))
                for leaf, array in self.trial.arrays.items()
                if leaf not in self.trial.tree.aliases
            ]
        for store in stores or self.stores():
            for (leaf, box), elements in zip(wanted, self.read(wanted, store=store), strict=True):
                assert_same_bits(elements, self.trial.arrays[leaf][box.slices], f"leaf {leaf} {box}")

    def stores(self, *, verified: bool = True) -> Sequence[ReadStore]:
        """Return a strict store, and a store as in `ckptcore.load`."""
        return (
            StrictReadStore(self.storage, self.digests if verified else None),
            ObjectReader(self.storage, self.records if verified else {}, _threads(), verify=verified),
        )


def write_trial(layout: Layout, trial: Trial, storage: StorageBackend) -> WrittenTrial:
    """Write a trial like a save: check it, write the part of each process, and call the layout's `finish`.

    If the trial has no name, also write metadata files. Receipts and states are encoded and decoded as in a job. Plans
    must be picklable.
    """
    return _finish(layout, trial, _write(layout, trial, storage), storage)


def write_sessions(layout: Layout, trials: Sequence[Trial], storage: StorageBackend) -> WrittenTrial:
    """Write a trial in several sessions of a partial save, and finish it. Return the combined trial.

    Args:
        layout: a layout with the capability ``sessions``.
        trials: the trial of each session. Their trees are merged.
        storage: the storage.
    """
    assert layout.capabilities.sessions
    sessions: list[SessionReceipts] = []
    arrays: dict[TreePath, HostArray] = {}
    first = 3  # gaps between the ranks, as after failed sessions
    for trial in trials:
        receipts = _write(layout, replace(trial, session=first), storage)
        sessions.append(SessionReceipts(first, trial.tree, receipts))
        arrays.update({trial.tree.paths[leaf]: array for leaf, array in trial.arrays.items()})
        first += trial.size + 1
    tree, united = merge_sessions(sessions, layout)
    layout.check(tree, len(united))
    numbers = {path: number for number, path in enumerate(tree.paths)}
    whole = Trial(tree, {numbers[path]: array for path, array in arrays.items()}, {})
    return _finish(layout, whole, united, storage)


def _write(layout: Layout, trial: Trial, storage: StorageBackend) -> Sequence[Receipt]:
    layout.check(trial.tree, trial.size)
    receipts = []
    for rank in reversed(range(trial.size)):
        plan = trial.plan(rank)
        assert pickle.loads(pickle.dumps(plan)) == plan
        snapshot, store = MemorySnapshot(plan, trial.arrays), StrictWriteStore(storage)
        state = layout.write(snapshot, store)
        snapshot.assert_released()
        receipt = Receipt(plan.rank, plan.items, _through_json(state), tuple(store.objects.values()))
        (received,) = decode_receipts([trial.tree], encode_receipts([trial.tree], [receipt]))
        receipts.append(pickle.loads(pickle.dumps(received)))
    receipts.sort(key=lambda receipt: receipt.rank)
    return receipts


def _finish(layout: Layout, trial: Trial, receipts: Sequence[Receipt], storage: StorageBackend) -> WrittenTrial:
    state = _through_json(layout.finish(trial.tree, receipts, StrictWriteStore(storage)))
    if not trial.name:
        write_metadata_files(layout, CheckpointInfo(CREATED), storage)
    contents = {key: stored.read_bytes() for key, stored in objects_below(storage).items()}
    digests = {key: hashlib.sha256(content).digest() for key, content in contents.items()}
    records = {key: _record(key, content) for key, content in contents.items()}
    return WrittenTrial(trial, layout, storage, state, digests, records)


def write_metadata_files(layout: Layout, info: CheckpointInfo, storage: StorageBackend) -> None:
    """Write the metadata files of a layout, and check their names."""
    store = StrictWriteStore(storage)
    layout.write_metadata_files(info, store)
    for key in store.objects:
        assert not key.startswith("checkpoint."), f"write_metadata_files wrote {key}, which is a reserved name"
        assert key.partition("/")[0] not in info.members, f"write_metadata_files wrote {key} into a checkpointable"


def _record(key: str, content: bytes) -> ObjectRecord:
    checksums = BlockChecksums(len(content), block_bytes=BLOCK_BYTES)
    checksums.add(0, content)
    return ObjectRecord(key, len(content), checksums.encode())


@cache
def _threads() -> IOThreads:
    return IOThreads(2)


def _through_json(state: JSON) -> JSON:
    decoded: JSON = json.loads(json.dumps(state, allow_nan=False, default=list_of_column))
    return decoded


def _unwritten(spec: ArraySpec) -> HostArray:
    return np.full(spec.nbytes, 0xA5, np.uint8).view(spec.numpy_dtype).reshape(spec.shape)
