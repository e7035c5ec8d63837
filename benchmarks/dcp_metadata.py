"""A ``.metadata`` of very many chunks: merged, written and read, beside torch.distributed.checkpoint's own functions."""

from __future__ import annotations

import dataclasses
import pickle
from collections import ChainMap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_dcp.metadata import read_metadata
from ckptcore_dcp.state import ChunkTable
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
from benchmarks.alternating import Contender
from benchmarks.cases import Case
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Node, Receipt, TreeMetadata

__all__ = ["dcp_metadata_cases"]

_RANKS = 64
_ITEM_BYTES = 2752
_ROWS, _COLUMNS = 8, 64
"""Of each chunk; no element is written, only said where it would be."""


class _Kept:
    """A store that keeps what is put."""

    def __init__(self) -> None:
        self.data = b""

    def put(self, key: str, data: bytes) -> None:
        """Keep it."""
        self.data = data


def dcp_metadata_cases(directory: Path, chunks: int) -> Iterator[Case]:
    """Of so many chunks, once of tensors in a thousand chunks each, and once of as many tensors."""
    yield from _cases(directory / "thousands", chunks // 1000, 1000)
    yield from _cases(directory / "single", chunks, 1)


def _cases(directory: Path, tensors: int, chunks: int) -> Sequence[Case]:
    names = [f"model.layers.{tensor}.weight" for tensor in range(tensors)]
    plans = [_plan(names, chunks, rank) for rank in range(_RANKS)]
    spec = ArraySpec((chunks * _ROWS, _COLUMNS), "float32")
    tree = TreeMetadata(Node("dict", tuple(names), (LEAF,) * tensors), (ArrayRecord(spec),) * tensors)
    receipts = [_receipt(tensors, chunks, rank) for rank in range(_RANKS)]
    layout, store = DcpLayout(), _Kept()
    layout.check(tree, _RANKS)  # a save does so before it writes
    theirs = _written(plans)
    state = layout.finish(tree, receipts, store)  # type: ignore[arg-type]  # it puts one object and asks for nothing else
    directory.mkdir()
    (directory / ".metadata").write_bytes(theirs)
    count = f"{tensors} x {chunks}"
    per_chunk = tensors * chunks
    return [
        Case(
            f"dcp: merge and write metadata, {count}",
            [
                Contender(f"torch, {len(theirs) / per_chunk:.0f} B/chunk", lambda: _written(plans)),
                Contender(
                    f"ckptcore, {len(store.data) / per_chunk:.0f} B/chunk",
                    lambda: layout.finish(tree, receipts, store),  # type: ignore[arg-type]  # as above
                ),
            ],
            10.0,
        ),
        Case(
            f"dcp: read metadata, {count}",
            [
                Contender("pickle.load of torch's", lambda: pickle.loads(theirs)),
                Contender("ckptcore, the table of its root", lambda: ChunkTable(tree, state)),
                Contender("ckptcore, torch's .metadata", lambda: read_metadata(theirs, key=".metadata")),
            ],
            10.0,
        ),
        Case(
            f"dcp: inspect what torch wrote, {count}",
            [
                Contender("FileSystemReader.read_metadata", lambda: FileSystemReader(directory).read_metadata()),
                Contender("ckptcore.metadata, a tree", lambda: ckptcore.metadata(directory)),
            ],
            1.0,
        ),
    ]


def _mine(tensor: int, chunks: int, rank: int) -> Sequence[int]:
    """The chunks of a tensor that a rank has: dealt out in turn."""
    return range((rank - tensor) % _RANKS, chunks, _RANKS)


def _plan(names: Sequence[str], chunks: int, rank: int) -> SavePlan:
    """What the planner of a rank sends: `create_default_local_save_plan` needs tensors, and makes this of them."""
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
    """What its coordinator does: `DefaultSavePlanner.create_global_plan` and `FileSystemWriter.finish` without the file."""
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


def _receipt(tensors: int, chunks: int, rank: int) -> Receipt:
    """What a rank reports."""
    leaf = [tensor for tensor in range(tensors) for _ in _mine(tensor, chunks, rank)]
    starts = [chunk * _ROWS for tensor in range(tensors) for chunk in _mine(tensor, chunks, rank)]
    offset = [number * _ITEM_BYTES for number in range(len(leaf))]
    return Receipt(
        rank,
        (),
        {
            "value_offset": [],
            "value_nbytes": [],
            "leaf": leaf,
            "offset": offset,
            "nbytes": [_ITEM_BYTES] * len(leaf),
            "elements": [start + 512 for start in offset],
            "box": [bound for start in starts for bound in (start, 0, start + _ROWS, _COLUMNS)],
        },
        (),
    )
