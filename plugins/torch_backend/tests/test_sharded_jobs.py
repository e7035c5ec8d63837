"""Jobs of two processes under FSDP1 and FSDP2. torch and ckptcore load each other's checkpoints, and
training continues with the same losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_torch.named_optimizers import NamedOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptcore
from plugins.torch_backend.tests.conftest import Torchrun

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("sharded_job.py")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["fsdp1", "fsdp2", "shards"])
def test_jobs_of_torch_and_ckptcore_load_each_others_checkpoints(torchrun: Torchrun, task: str, tmp_path: Path) -> None:
    torchrun(2, PROGRAM, task, tmp_path)


def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("named", [False, True], ids=["by number", "by name"])
def test_a_new_optimizer_of_sharded_parameters_gets_dtensors(named: bool, tmp_path: Path) -> None:
    model, optimizer = job(0)
    train(model, optimizer)
    exact = torch.full((4, 3), 1 + 2.0**-40, dtype=torch.float64)
    parameter: Any = model.get_parameter("0.weight")
    moment = DTensor.from_local(exact, parameter.device_mesh, parameter.placements)
    optimizer.state[parameter]["exact"] = moment
    other, its = job(1)
    ckptcore.save(tmp_path / "c", {"m": model, "o": NamedOptimizer(model, optimizer) if named else optimizer})
    ckptcore.load_into(tmp_path / "c", {"m": other, "o": NamedOptimizer(other, its) if named else its})
    slots: Any = its.state[other.get_parameter("0.weight")]
    assert isinstance(slots["exp_avg"], DTensor) and slots["exp_avg"].placements == parameter.placements
    assert type(slots["step"]) is torch.Tensor
    assert slots["exact"].dtype is torch.float64 and torch.equal(slots["exact"].to_local(), exact)
    assert train(other, its) == train(model, optimizer)
