"""One process of a torch.distributed job in which something fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ckptcore_torch.store_coordinator import StoreCoordinator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptcore.protocols import Coordinator
from tests.jobs.failing_job import Cell, take_part


class _TorchJob:
    """See `Job`."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def coordinator(self, timeout_seconds: float) -> Coordinator:
        return StoreCoordinator.of_job(timeout_seconds=timeout_seconds)

    def state(self, number: int) -> dict[str, Any]:
        rows = distribute_tensor(torch.full((13, 4), float(number)), self._mesh, [Shard(0)])
        return {"rows": rows, "here": {str(self.rank): np.full(5, number)}, "step": number}

    def expect(self, state: Mapping[str, Any], number: int) -> None:
        rows = state["rows"]
        assert isinstance(rows, DTensor) and rows.shape == (13, 4)
        assert bool((rows.to_local() == number).all())
        assert (state["here"][str(self.rank)] == number).all() and state["step"] == number


def serve(port: int) -> object:
    """Serve the store of a job, as a launcher does, until the result is deleted."""
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # it is exported at run time


def run(cell: Cell, rank: int, size: int, port: int, leader_serves: bool, place: Path, errors: str) -> None:
    """Run the process. It waits for other ranks at its end only if it serves the store of a healthy job."""
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    serves = leader_serves and rank == 0
    store = dist.TCPStore(  # type: ignore[attr-defined]  # it is exported at run time
        "127.0.0.1", port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=120)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    take_part(cell, _TorchJob(), place)
    if leader_serves and cell.operation == "resume":
        # The process with the store must end last.
        store.set(f"ended {rank}", "")
        if rank == 0:
            store.wait([f"ended {other}" for other in range(size)])
    os._exit(0)
