"""Processes of torch.distributed with steps in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptcore import Checkpointer
from plugins.recovery.tests.framework_jobs import Framework, whole_array
from tests.jobs.processes import Place
from tests.jobs.torch_program import run as run_torch

run: Final = run_torch


def _state(step: int) -> dict[str, Any]:
    """Return sharded and replicated arrays."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.from_numpy(whole_array(step))
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole[:100], mesh, [Replicate()]),
        "step": step,
    }


def _load(run: Checkpointer) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = run.load_into(_state(0))
    return loaded


def _expect(loaded: Mapping[str, Any], step: int) -> None:
    expected = _state(step)
    assert loaded["step"] == step
    for name in ("sharded", "replicated"):
        tensor = loaded[name]
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.to_local(), expected[name].to_local())


TORCH: Final = Framework(_state, _load, _expect, dist.barrier)
TASKS: Final[Mapping[str, Callable[[Place], Any]]] = TORCH.tasks
