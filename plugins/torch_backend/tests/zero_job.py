"""A job that saves or resumes a ZeroRedundancyOptimizer: ``zero_job.py TASK DIRECTORY LAYOUT``.

TASK is ``save``, ``load`` or ``load stepped``. The last loads into objects that have made a step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import ckptcore


def made() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def step(model: Any, optimizer: Any, scheduler: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.arange(8.0).reshape(2, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def main() -> None:
    task, directory, layout = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    model, optimizer, scheduler = made()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if task == "save":
        step(model, optimizer, scheduler, 2)
        ckptcore.save(directory / "checkpoint", state, layout=layout)
        step(model, optimizer, scheduler, 2)
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), directory / "expected.pt")
    else:
        step(model, optimizer, scheduler, 0 if task == "load" else 1)
        ckptcore.load_into(directory / "checkpoint", state)
        assert optimizer.param_groups[0]["lr"] == optimizer.optim.param_groups[0]["lr"] == 0.025
        step(model, optimizer, scheduler, 2)
        expected = torch.load(directory / "expected.pt")
        assert all(torch.equal(held, expected[name]) for name, held in model.state_dict().items())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
