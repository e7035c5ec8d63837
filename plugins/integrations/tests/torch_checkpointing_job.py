"""A job of several processes that saves or loads with torch_checkpointing on a storage of ckptcore.

``torchrun --nproc-per-node N torch_checkpointing_job.py TASK LOCATION ENDPOINT``. `TASK` is ``save`` or ``load``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ckptcore_integrations.torch_checkpointing import CkptcoreStorageConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig

import ckptcore

WHOLE = torch.arange(84.0).reshape(12, 7)


def main() -> None:
    """Save or load, and compare."""
    task, location, endpoint = sys.argv[1:]
    dist.init_process_group("gloo")
    context = ckptcore.Context(storage={"gs": {"endpoint": endpoint, "anonymous": True}})
    manager = CheckpointManager(
        CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=CkptcoreStorageConfig(context))
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if task == "save":
        manager.save(location, {"model": {"w": distribute_tensor(WHOLE, mesh, [Shard(0)])}, "step": 7})
        dist.barrier()
        storage = CkptcoreStorageConfig(context).create_storage()
        assert storage.exists(Path(location))
        assert storage.ls(Path(location).parent) == [Path(location).name]
    else:
        target: DTensor = distribute_tensor(torch.zeros(12, 7), mesh, [Shard(0)])
        manager.load(location, into={"model": {"w": target}})
        assert torch.equal(target.full_tensor(), WHOLE)
    manager.close()
    dist.destroy_process_group()
    print(f"{task} of a rank is done")


main()
