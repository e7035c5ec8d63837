"""A run under ``torchrun --max-restarts 1`` in which a process is killed during a save.

Arguments: ``restarted_job.py DIRECTORY``. The restarted run has the same store, and continues from
the last committed step. The process group of each life uses its own part of the store: otherwise
gloo sometimes reads addresses of failed processes from the store, and fails (torch 2.13.0).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptcore_torch.store_coordinator import StoreCoordinator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.protocols import LeafHandler


class Deadly:
    """A leaf whose handler kills the process during a save."""


class DeadlyLeaves(HostArrayHandler):
    def describe(self, leaf: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(*files: Path) -> None:
    """Wait until other processes have created the files."""
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def main(directory: Path, store: Any, life: int) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(step: int) -> dict[str, object]:
        return {"rows": distribute_tensor(torch.full((6, 2), float(step)), mesh, [Shard(0)]), "step": step}

    dying: LeafHandler = DeadlyLeaves()
    coordinator = StoreCoordinator(store, rank, dist.get_world_size(), timeout_seconds=120)
    context = ckptcore.Context(
        job=ckptcore.context.JobOptions(coordinator=coordinator),
        durability="none",
        plugins=ckptcore.context.PluginOptions(handlers={Deadly: dying}),
    )
    with ckptcore.Checkpointer(directory / "run", context=context, if_in_use="take over") as run:
        assert run.latest == (2 if life else None)
        if life:
            loaded: Any = run.load(None, state(0))
            assert isinstance(loaded["rows"], DTensor) and bool((loaded["rows"].to_local() == 2).all())
            if rank == 0:
                wait_for(directory / "asks-1", directory / "asks-2")  # the others ask first, and could find the old key
            else:
                (directory / f"asks-{rank}").touch()
            assert coordinator.broadcast("chosen", b"1" if rank == 0 else None) == b"1"
        else:
            run.save(1, state(1))
            run.save(2, state(2))
            run.wait()
            if rank == 1:
                wait_for(directory / "heard")
                run.save(3, {**state(3), "deadly": Deadly()})
            coordinator.broadcast("chosen", b"0" if rank == 0 else None)  # the failing process never receives this
            if rank == 2:
                (directory / "heard").touch()
        run.save(3, state(3))
        run.wait()
        assert run.latest == 3
        run.save(4, state(4))
    (directory / f"{life}-{rank}").touch()


if __name__ == "__main__":
    number, size, life = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"life {life}", store), rank=number, world_size=size)
    main(Path(sys.argv[1]), store, life)
    dist.destroy_process_group()
