"""Checkpoints like those of sharded jobs, saved from one process by ckptcore or by torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ckptcore_testing import ThreadJob
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import ckptcore
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, Ready, Shard
from ckptcore.protocols import Coordinator, LeafHandler


def boxes_of(shape: tuple[int, ...], grid: tuple[int, ...]) -> Sequence[Box]:
    """Return the box of each process of a mesh. Divides the axes like DTensor and ``torch.chunk``."""
    cuts = []
    for extent, parts in zip(shape, grid, strict=True):
        step = -(-extent // parts)
        cuts.append([(min(start * step, extent), min((start + 1) * step, extent)) for start in range(parts)])
    return [
        Box(tuple([low for low, _ in corner]), tuple([high for _, high in corner]))
        for corner in itertools.product(*cuts)
    ]


@dataclass(frozen=True)
class _Sharded:
    """An array that a mesh of processes saves. Each process saves one part."""

    array: HostArray
    grid: tuple[int, ...]


class _ShardedHandler(LeafHandler):
    """Saves only the part of this process."""

    priority = 0

    def describe(self, leaf: _Sharded) -> ArrayRecord:
        return ArrayRecord(ArraySpec(leaf.array.shape, str(leaf.array.dtype)))

    def identity(self, leaf: _Sharded) -> object:
        return id(leaf)

    def shards(self, leaf: _Sharded, rank: int, size: int) -> Sequence[Shard]:
        box = boxes_of(leaf.array.shape, leaf.grid)[rank]
        return [Shard(box, 0, 1)] if box.size else []

    def view_on_host(self, leaf: _Sharded, boxes: Sequence[Box]) -> Sequence[Ready[HostArray]]:
        return [Ready(leaf.array[box.slices]) for box in boxes]

    def abstract(self, *_: Any) -> Any:
        raise NotImplementedError

    copy_to_host = wanted = build = abstract


def save_ours(location: Path, state: Mapping[str, HostArray], grid: tuple[int, ...]) -> None:
    """Save in the layout ``dcp`` what a job with one process for each part of `grid` would save."""
    tree = {name: _Sharded(array, grid) for name, array in state.items()}

    def save(coordinator: Coordinator) -> None:
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=coordinator),
            plugins=ckptcore.context.PluginOptions(handlers={_Sharded: _ShardedHandler()}),
            durability="none",
            io=ckptcore.context.IOOptions(threads=1),
        )
        ckptcore.save(location, tree, layout="dcp", context=context)

    ThreadJob(int(np.prod(grid))).run(save)


class _Planner(DefaultSavePlanner):
    """Plans the parts of one process of a mesh, as torch would plan them for DTensors."""

    def __init__(self, state: Mapping[str, HostArray], grid: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self._parts = {}
        items = []
        for name, array in state.items():
            tensor, box = torch.from_numpy(array), boxes_of(array.shape, grid)[rank]
            self._parts[name] = tensor[box.slices].clone()
            chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._parts[write_item.index.fqn]


def save_torch(location: Path, state: Mapping[str, HostArray], grid: tuple[int, ...]) -> None:
    """Write what torch.distributed.checkpoint would write in a job with one process for each part of `grid`."""
    planners = [_Planner(state, grid, rank) for rank in range(int(np.prod(grid)))]
    plans, metadata = create_default_global_save_plan([planner.plan for planner in planners])
    writers = [FileSystemWriter(location, sync_files=False) for _ in planners]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0)
    local = [writer.prepare_local_plan(plan) for writer, plan in zip(writers, plans, strict=True)]
    whole = writers[0].prepare_global_plan(local)
    results = [
        writer.write_data(plan, planner).wait() for writer, plan, planner in zip(writers, whole, planners, strict=True)
    ]
    writers[0].finish(metadata, results)
