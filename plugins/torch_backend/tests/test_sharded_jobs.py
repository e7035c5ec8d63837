"""Jobs of two processes under FSDP1 and FSDP2. torch and ckptcore continue from each other's
checkpoints with the same losses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckptcore_torch.named_optimizers import NamedOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptcore

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("sharded_job.py")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["fsdp1", "fsdp2", "shards"])
def test_jobs_of_torch_and_ckptcore_load_each_others_checkpoints(task: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(PROGRAM), task, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
