"""One checkpoint written and read through a layout alone: no engine, no commit, any number of processes."""

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
from ckptcore.io.requests import IOThreads
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
from ckptcore_testing.layout_stores import HeldSnapshot, StoredObject, StrictReadStore, StrictWriteStore, objects_below

__all__ = ["Trial", "Written", "flat_trial", "tree_trial", "write_metadata_files", "write_sessions", "write_trial"]

SAVE_ID = "0123456789abcdef"
CREATED = "2026-01-02T03:04:05.678+00:00"


@dataclass(frozen=True)
class Trial:
    """A tree to write, with its elements.

    Attributes:
        tree: the tree.
        arrays: by number of the leaf, the elements of each array, aliases too.
        parts: by number of the leaf, for each process the boxes it writes; a leaf left out is written whole by
            process 0.
        size: how many processes write.
        name: of the checkpointable; empty where the tree is the whole checkpoint.
        session: which session of a partial save it is; None: no partial save.
    """

    tree: TreeMetadata
    arrays: Mapping[int, HostArray]
    parts: Mapping[int, Sequence[Sequence[Box]]]
    size: int = 1
    name: str = ""
    session: int | None = None

    def plan(self, rank: int) -> WritePlan:
        """What one process writes."""
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
    """A trial of these leaves, in the order of the skeleton; arrays have random elements."""
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
    """A trial of one dict of arrays."""
    skeleton = Node("dict", tuple(specs), (LEAF,) * len(specs))
    return tree_trial(skeleton, tuple(specs.values()), parts=parts, size=size)


@dataclass(frozen=True)
class Written:
    """A trial that was written.

    Attributes:
        trial: what.
        layout: by what.
        storage: where.
        state: what the layout keeps in the root, after a trip through JSON.
        digests: SHA-256 of each object.
        records: what the root would say of each object.
    """

    trial: Trial
    layout: Layout
    storage: StorageBackend
    state: JSON
    digests: Mapping[str, bytes]
    records: Mapping[str, ObjectRecord]

    def objects(self) -> dict[str, StoredObject]:
        """Each object by key."""
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
        """Read boxes of leaves, each array whole where none are named; fails where the layout breaks its contract.

        Args:
            wanted: numbers of leaves and boxes.
            state, tree: other ones than were written.
            verified: whether the strict store verifies what it reads.
            store: another one than the strict store.
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
            assert 0 <= number < len(items), f"read yields {number}, and there are {len(items)} buffers"
            assert number not in at_yield, f"read yields {number} twice"
            at_yield[number] = buffers[number].tobytes()
        assert len(at_yield) == len(items), f"read never yields {sorted(set(range(len(items))) - set(at_yield))}"
        for number, elements in at_yield.items():
            assert buffers[number].tobytes() == elements, f"buffer {number} changed after it was yielded"
        return buffers

    def assert_reads_back(
        self, wanted: Sequence[tuple[int, Box]] | None = None, *, stores: Sequence[ReadStore] = ()
    ) -> None:
        """Fail unless boxes of leaves, or every array whole, come back bit for bit, through both sorts of store."""
        if wanted is None:
            wanted = [
                (leaf, Box.whole(array.shape))
                for leaf, array in self.trial.arrays.items()
                if leaf not in self.trial.tree.aliases
            ]
        for store in stores or self.stores():
            for (leaf, box), found in zip(wanted, self.read(wanted, store=store), strict=True):
                assert_same_bits(found, self.trial.arrays[leaf][box.slices], f"leaf {leaf} {box}")

    def stores(self, *, verified: bool = True) -> Sequence[ReadStore]:
        """The strict store, and the one that loads read through."""
        return (
            StrictReadStore(self.storage, self.digests if verified else None),
            ObjectReader(self.storage, self.records if verified else {}, _threads(), verify=verified),
        )


def write_trial(layout: Layout, trial: Trial, storage: StorageBackend) -> Written:
    """Check, write on each process, finish and write metadata files; every plan, receipt and state takes the trips it takes in a job."""
    return _finish(layout, trial, _write(layout, trial, storage), storage)


def write_sessions(layout: Layout, trials: Sequence[Trial], storage: StorageBackend) -> Written:
    """The same in several sessions, one after the other, and one finish; the whole as a trial that was written.

    Args:
        layout: one that has the capability ``sessions``.
        trials: of each session; mappings of them are united.
        storage: where to write.
    """
    assert layout.capabilities.sessions
    sessions: list[SessionReceipts] = []
    arrays: dict[TreePath, HostArray] = {}
    first = 3  # ranks are missing where somebody died
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
        snapshot, store = HeldSnapshot(plan, trial.arrays), StrictWriteStore(storage)
        state = layout.write(snapshot, store)
        snapshot.assert_released()
        receipt = Receipt(plan.rank, plan.items, _through_json(state), tuple(store.objects.values()))
        (told,) = decode_receipts([trial.tree], encode_receipts([trial.tree], [receipt]))
        receipts.append(pickle.loads(pickle.dumps(told)))
    receipts.sort(key=lambda receipt: receipt.rank)
    return receipts


def _finish(layout: Layout, trial: Trial, receipts: Sequence[Receipt], storage: StorageBackend) -> Written:
    state = _through_json(layout.finish(trial.tree, receipts, StrictWriteStore(storage)))
    if not trial.name:
        write_metadata_files(layout, CheckpointInfo(CREATED), storage)
    contents = {key: stored.read_bytes() for key, stored in objects_below(storage).items()}
    digests = {key: hashlib.sha256(content).digest() for key, content in contents.items()}
    records = {key: _record(key, content) for key, content in contents.items()}
    return Written(trial, layout, storage, state, digests, records)


def write_metadata_files(layout: Layout, info: CheckpointInfo, storage: StorageBackend) -> None:
    """Write the metadata files of a layout, and check their names."""
    store = StrictWriteStore(storage)
    layout.write_metadata_files(info, store)
    for key in store.objects:
        assert not key.startswith("checkpoint."), f"write_metadata_files wrote {key}, and such names are reserved"
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
