"""Jobs with a ZeroRedundancyOptimizer: each process saves its part, and jobs of other sizes resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore
from plugins.torch_backend.tests.conftest import Torchrun

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("zero_job.py")


@pytest.mark.brings("`ZeroRedundancyOptimizer`, in jobs of other sizes", "torch", "same")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zarr3", "dcp"])
def test_other_numbers_of_processes_resume(torchrun: Torchrun, tmp_path: Path, layout: str) -> None:
    torchrun(2, PROGRAM, "save", tmp_path, layout)
    torchrun(3, PROGRAM, "load", tmp_path, layout)
    if layout == "dcp":  # slow
        torchrun(1, PROGRAM, "load stepped", tmp_path, layout)
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
