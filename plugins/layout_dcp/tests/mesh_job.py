"""Job of 4, 2 or 1 processes whose state is on a mesh of a given kind, saved or loaded by torch or by ckptcore.

``torchrun --nproc-per-node N mesh_job.py TASK KIND DIRECTORY``. A save also writes the full state
to ``DIRECTORY/whole.pt``. After a load the full tensors are compared with it, and each process
writes ``DIRECTORY/TASK.KIND.RANK``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptcore


def _model(seed: int, kind: str) -> torch.nn.Sequential:
    """Return a model whose rows divide unevenly if they are divided twice along one axis."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 14), torch.nn.Tanh(), torch.nn.Linear(14, 6))
    size = dist.get_world_size()
    if kind == "fsdp-tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("fsdp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["fsdp"]
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    if kind != "whole":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        loss = model(torch.randn(8, 10, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _whole(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every full leaf of a state with its path. A collective: all processes must iterate together."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _whole(inner, f"{path}/{key}")
    elif isinstance(value, DTensor):
        yield path, value.full_tensor()
    else:
        yield path, value


def main(task: str, kind: str, directory: Path) -> None:
    """Run one task."""
    rank = dist.get_rank()
    action, _, by = task.partition("-")
    seed = 0 if action == "save" else 99
    model = _model(seed, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    _train(model, optimizer, seed)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": seed}
    if action == "save":
        if by == "torch":
            dcp.save(state, checkpoint_id=str(directory / "c"))
        else:
            ckptcore.save(directory / "c", state, layout="dcp")
        whole = dict(_whole(state))
        if rank == 0:
            torch.save(whole, directory / "whole.pt")
        return
    if by == "torch":
        dcp.load(state, checkpoint_id=str(directory / "c"))
    else:
        state = ckptcore.load(directory / "c", state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    leaves = dict(_whole({"model": model_state, "optimizer": optimizer_state, "step": state["step"]}))
    expected = torch.load(directory / "whole.pt")
    assert set(leaves) == set(expected), set(leaves) ^ set(expected)
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == leaves[path].dtype and torch.equal(value, leaves[path]), path
        else:
            assert value == leaves[path], path
    (directory / f"{task}.{kind}.{rank}").touch()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    finally:
        dist.destroy_process_group()
