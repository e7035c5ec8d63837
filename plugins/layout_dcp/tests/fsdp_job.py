"""Job of one or more processes that trains a model under FSDP2, and saves or resumes with torch or ckptcore.

``torchrun --nproc-per-node N fsdp_job.py TASK DIRECTORY`` writes the losses after the save or load
to ``DIRECTORY/TASK.N.json``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptcore

STEPS = 3


def _model(seed: int) -> torch.nn.Sequential:
    """Return a model whose rows do not divide evenly among processes, with an array smaller than the mesh."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _losses(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    """Train and return the losses.

    All processes train on the same data, so losses of jobs of different sizes differ only by rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        inputs, targets = torch.randn(8, 10, generator=generator), torch.randn(8, 3, generator=generator)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": STEPS}


def main(task: str, directory: Path) -> None:
    """Run one task."""
    rank, size = dist.get_rank(), dist.get_world_size()
    action, _, by = task.partition("-")
    if action == "save":
        model = _model(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        _losses(model, optimizer, 1)
        state = _state(model, optimizer)
        if by == "torch":
            dcp.save(state, checkpoint_id=str(directory / "torch"))
        else:
            weights = ckptcore.Export(location=directory / "weights", subtree="model")
            ckptcore.save(directory / "ckptcore", state, layout="dcp", strategy=ckptcore.WithExports([weights]))
    else:
        model = _model(99)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.9)
        _losses(model, optimizer, 5)
        state = _state(model, optimizer)
        source = directory / ("ckptcore" if by == "torch" else "torch")
        if by == "torch":
            dcp.load(state, checkpoint_id=str(source))
        else:
            state = ckptcore.load(source, state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert state["step"] == STEPS
    losses = _losses(model, optimizer, 2)
    if rank == 0:
        (directory / f"{task}.{size}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    finally:
        dist.destroy_process_group()
    # Exit without finalizing the interpreter. A gloo thread that drops its last collective would otherwise wait for the
    # interpreter lock, fail to get it, and abort the process (seen with torch 2.13.0: ~AsyncWork, ~ThreadLocalState).
    os._exit(0)
