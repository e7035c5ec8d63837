"""Four processes of torchrun with parameters that FSDP2 shards into uneven rows."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptcore

# This file runs as a program, so the root of the repository is not in the path.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.launchers.states import ARRAYS, STEP, run_job
from tests.launchers.torch_arrays import assert_is, tensor_of


def _module(filled: bool) -> torch.nn.Module:
    module = torch.nn.Module()
    for name in ("w", "e", "b"):
        tensor = tensor_of(ARRAYS[name])
        module.register_parameter(name, torch.nn.Parameter(tensor if filled else torch.zeros_like(tensor)))
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def save(location: Path, layout: str) -> None:
    """Save a module."""
    state = {"params": dict(_module(True).state_dict()), "i": tensor_of(ARRAYS["i"]), "step": STEP}
    ckptcore.save(location, state, layout=layout)


def load(location: Path) -> None:
    """Load into another module."""
    state: dict[str, Any] = {
        "params": dict(_module(False).state_dict()),
        "i": torch.zeros(4, dtype=torch.int64),
        "step": 0,
    }
    ckptcore.load_into(location, state)
    assert state["step"] == STEP
    assert_is("i", state["i"])
    for name, tensor in state["params"].items():
        assert isinstance(tensor, DTensor)
        assert_is(name, tensor.full_tensor())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    run_job("torch_fsdp", dist.get_rank() == 0, save, load, dist.destroy_process_group)
    # Skip the shutdown of the interpreter. A thread of gloo may destroy its last collective during the shutdown, cannot
    # get the lock of the interpreter, and aborts the process (torch 2.13.0: ~AsyncWork, ~ThreadLocalState).
    os._exit(0)
