"""A ``.metadata`` of many chunks: merged, written and read, compared with torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses
import gc
import pickle
from collections import ChainMap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from ckptcore_dcp.chunk_index import dcp_index
from ckptcore_dcp.layouts import DcpLayout
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.report import Row
from benchmarks.scale_transport import CountingStore, PlannedSnapshot
from benchmarks.setting import Setting
from ckptcore import model
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, Node, Receipt, TreeMetadata, WritePlan

_CHUNKS = 100_000
"""Number of tensors of a large model on a few hundred accelerators."""
_RANKS = 64
_SAVE_ID = "0" * 16
_ITEM_BYTES = 2752
_ROWS, _COLUMNS = 8, 64
"""Rows and columns of each chunk. Only the metadata is written, no elements."""


class _MemoryStore:
    """A store in memory."""

    def __init__(self) -> None:
        self.data = b""

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        self.data = data


def rows(setting: Setting) -> Iterator[Row]:
    """Measure tensors of a thousand chunks each, and as many tensors of one chunk."""
    chunks = setting.count(_CHUNKS, least=1000)
    for name, tensors, of_each in (("thousands", chunks // 1000, 1000), ("single", chunks, 1)):
        gc.disable()  # a collection visits millions of objects of torch, and takes longer than many runs
        cases = _cases(setting.directory / name, tensors, of_each)
        gc.freeze()
        gc.enable()
        for case in cases:
            yield from compare(case, setting.rounds)
        gc.unfreeze()


def _cases(directory: Path, tensors: int, chunks: int) -> Sequence[Case]:
    names = [f"model.layers.{tensor}.weight" for tensor in range(tensors)]
    plans = [_plan(names, chunks, rank) for rank in range(_RANKS)]
    spec = ArraySpec((chunks * _ROWS, _COLUMNS), "float32")
    tree = TreeMetadata(Node("dict", tuple(names), (LEAF,) * tensors), (ArrayRecord(spec),) * tensors)
    layout, store = DcpLayout(), _MemoryStore()
    layout.check(tree, _RANKS)  # a save does so before it writes
    receipts = [_receipt(layout, tree, chunks, rank) for rank in range(_RANKS)]
    theirs = _written(plans)
    state = layout.finish(tree, receipts, store)  # type: ignore[arg-type]  # it puts one object and asks for nothing else
    directory.mkdir()
    (directory / ".metadata").write_bytes(theirs)
    count = f"{tensors} x {chunks}"
    per_chunk = tensors * chunks
    return [
        Case(
            f"dcp: merge metadata, {count}",
            [
                Contender(
                    f"ckptcore, {len(store.data) / per_chunk:.0f} B/chunk",
                    lambda: layout.finish(tree, receipts, store),  # type: ignore[arg-type]  # as above
                ),
                Contender(f"torch, {len(theirs) / per_chunk:.0f} B/chunk", lambda: _written(plans), target=10.0),
            ],
        ),
        Case(
            f"dcp: read metadata, {count}",
            [
                Contender("ckptcore, the table of its root", lambda: dcp_index(tree, state)),
                Contender("pickle.load of torch's", lambda: pickle.loads(theirs), target=10.0),
            ],
        ),
        Case(
            f"dcp: inspect torch's metadata, {count}",
            [
                Contender("ckptcore.metadata, a tree", lambda: ckptcore.metadata(directory)),
                Contender(
                    "FileSystemReader.read_metadata",
                    lambda: FileSystemReader(directory).read_metadata(),
                    target=1.0,
                ),
            ],
        ),
    ]


def write_single_chunks(directory: Path, tensors: int) -> None:
    """Create a directory with the ``.metadata`` of tensors of one chunk each, as torch writes it."""
    names = [f"model.layers.{tensor}.weight" for tensor in range(tensors)]
    directory.mkdir()
    (directory / ".metadata").write_bytes(_written([_plan(names, 1, rank) for rank in range(_RANKS)]))


def _mine(tensor: int, chunks: int, rank: int) -> Sequence[int]:
    """Return the chunks of a tensor that a rank writes, in round-robin order."""
    return range((rank - tensor) % _RANKS, chunks, _RANKS)


def _plan(names: Sequence[str], chunks: int, rank: int) -> SavePlan:
    """Return the plan of a rank. `create_default_local_save_plan` would create it from tensors."""
    properties = TensorProperties(dtype=torch.float32)
    items: list[WriteItem] = []
    for number, name in enumerate(names):
        whole = torch.Size([chunks * _ROWS, _COLUMNS])
        for chunk in _mine(number, chunks, rank):
            offsets, sizes = torch.Size([chunk * _ROWS, 0]), torch.Size([_ROWS, _COLUMNS])
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, whole)
            items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    known = dict.fromkeys(item.index.fqn for item in items)
    return SavePlan(items, planner_data={name: tuple(name.split(".")) for name in known})


def _written(plans: Sequence[SavePlan]) -> bytes:
    """Run the steps of the coordinator: `create_global_plan`, and `FileSystemWriter.finish` without the file."""
    merged, metadata = create_default_global_save_plan(list(plans))
    metadata = dataclasses.replace(metadata, planner_data=dict(ChainMap(*[plan.planner_data for plan in merged])))
    return _pickled(metadata, merged)


def _pickled(metadata: Metadata, plans: Sequence[SavePlan]) -> bytes:
    places: dict[MetadataIndex, Any] = {}
    for rank, plan in enumerate(plans):
        for number, item in enumerate(plan.items):
            places[item.index] = _StorageInfo(f"__{rank}_0.distcp", number * _ITEM_BYTES, _ITEM_BYTES)
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta("checkpoint", save_id="save")
    return pickle.dumps(metadata)


def _receipt(layout: DcpLayout, tree: TreeMetadata, chunks: int, rank: int) -> Receipt:
    """Return the receipt of a rank, from the real layout, with chunks without elements."""
    items = []
    for leaf, record in enumerate(tree.leaves):
        assert isinstance(record, ArrayRecord)
        starts = [chunk * _ROWS for chunk in _mine(leaf, chunks, rank)]
        if starts:
            boxes = tuple(Box((start, 0), (start + _ROWS, _COLUMNS)) for start in starts)
            items.append(model.WriteItem(leaf, record.spec, boxes))
    plan = WritePlan(tree, tuple(items), rank, _RANKS, _SAVE_ID)
    store = CountingStore(rank)
    state = layout.write(PlannedSnapshot(plan), store)
    return Receipt(rank, plan.items, state, tuple(store.objects))
