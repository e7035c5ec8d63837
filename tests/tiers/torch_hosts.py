"""What processes of torch.distributed do in the tests of near tiers that each host has by itself: each process is a host."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptcore import Checkpointer, NearTier
from tests.jobs.processes import Place

__all__ = ["TASKS", "run"]

_SHAPE: Final = (12, 5)


def run(task: Callable[[Place], Any], place: Place) -> Any:
    """Do a task in a job of torch.distributed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{place.port}", rank=place.rank, world_size=place.size)
    answer = task(place)
    dist.barrier()
    dist.destroy_process_group()
    return answer


def _state(step: int, place: Place) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (place.size,))
    return {"w": distribute_tensor(torch.full(_SHAPE, float(step)), mesh, [Shard(0)]), "step": step}


def _open(place: Place) -> Checkpointer:
    near = place.directory / f"host-{place.rank}" / "run"
    return Checkpointer(place.directory / "far", near=NearTier(near, seen_by="host", close_seconds=120.0), layout="dcp")


def _save(place: Place) -> list[int]:
    with _open(place) as run:
        for step in (1, 2):
            run.save(step, _state(step, place))
            run.wait()
        return list(run.steps)


def _load(place: Place) -> list[Any]:
    with _open(place) as run:
        state = run.load_into(_state(0, place))
        tensor = state["w"]
        assert isinstance(tensor, DTensor)
        assert bool((tensor.to_local() == state["step"]).all())
        found = [run.restored_step, state["step"]]
        run.save(state["step"] + 10, _state(state["step"] + 10, place))
        return found


def _die_with_a_host(place: Place) -> None:
    """Save a step that is not uploaded when the second host is killed; the others are killed with it, as a launcher does."""
    run = _open(place)
    run.save(3, _state(3, place))
    time.sleep(0.0 if place.rank == 1 else 0.3)
    os.kill(os.getpid(), signal.SIGKILL)


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {"save": _save, "load": _load, "die": _die_with_a_host}
