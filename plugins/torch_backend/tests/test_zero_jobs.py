"""Jobs with a ZeroRedundancyOptimizer: each process saves its part, and jobs of other sizes resume exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("zero_job.py")


def run(task: str, directory: Path, layout: str, size: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [*command, str(PROGRAM), task, str(directory), layout]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.brings("`ZeroRedundancyOptimizer`, in jobs of other sizes", "torch", "same")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zarr3", "dcp"])
def test_other_numbers_of_processes_resume(tmp_path: Path, layout: str) -> None:
    run("save", tmp_path, layout, 2)
    run("load", tmp_path, layout, 3)
    if layout == "dcp":  # slow
        run("load stepped", tmp_path, layout, 1)
    # The checkpoint contains the state of the inner AdamW, so a plain AdamW loads it.
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ckptcore.load_into(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(8.0).reshape(2, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    expected = torch.load(tmp_path / "expected.pt")
    assert all(torch.equal(held, expected[name]) for name, held in model.state_dict().items())
