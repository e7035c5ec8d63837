"""Writes the golden checkpoints of torch_checkpointing 0.1.1: ``torchrun --nproc-per-node 2 FILE DIRECTORY``.

Written with torch 2.13.0 and gloo. torch_checkpointing always gathers its metadata as CUDA tensors, even without a
CUDA device. This program replaces its function by one that gathers objects. Run by hand; tests only read the files.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def gather(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, data)
    return dict(enumerate(objects))


DefaultMetadataManager._all_gather_pickled_data = gather  # type: ignore[method-assign]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(35.0).reshape(7, 5)
for name, items in (("plain", dict[str, ItemSpec]()), ("resharded", {"model": ItemSpec(resharder=DefaultResharder())})):
    manager = CheckpointManager(
        CheckpointManager.Config(
            items=items,
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    model = {
        "w": distribute_tensor(whole, mesh, [Shard(0)]),
        "c": distribute_tensor(whole, mesh, [Shard(1)]),
        "r": distribute_tensor(whole, mesh, [Replicate()]),
        "n": {"plain": torch.ones(3)},
    }
    manager.save(f"{sys.argv[1]}/{name}", {"model": model, "step": 7, "rng": {"seed": dist.get_rank()}})
    manager.close()
dist.destroy_process_group()
