"""Four processes of torchrun: a mesh of 2 x 2 with replicas on one axis and shards on the other, as in HSDP."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptcore

# This file runs as a program, so the root of the repository is not in the path.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.launchers.states import ARRAYS, STEP, run_job
from tests.launchers.torch_arrays import assert_is, tensor_of

PLACEMENTS = {"w": (Replicate(), Shard(1)), "e": (Shard(0), Shard(1)), "b": (Replicate(), Shard(0))}


def _params(filled: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    params: dict[str, torch.Tensor] = {}
    for name, placements in PLACEMENTS.items():
        tensor = tensor_of(ARRAYS[name])
        params[name] = distribute_tensor(tensor if filled else torch.zeros_like(tensor), mesh, placements)
    return params


def save(location: Path, layout: str) -> None:
    """Save tensors of every placement."""
    state = {"params": _params(True), "i": tensor_of(ARRAYS["i"]), "step": STEP}
    ckptcore.save_async(location, state, layout=layout).result()


def load(location: Path) -> None:
    """Load with tensors, and with abstract tensors."""
    like = {"params": _params(False), "i": torch.zeros(4, dtype=torch.int64), "step": 0}
    for wanted in (like, ckptcore.abstract(like)):
        loaded = ckptcore.load(location, wanted)
        assert loaded["step"] == STEP
        assert_is("i", loaded["i"])
        for name, tensor in loaded["params"].items():
            assert isinstance(tensor, DTensor) and tensor.placements == PLACEMENTS[name]
            assert_is(name, tensor.full_tensor())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    run_job("torch_mesh", dist.get_rank() == 0, save, load, dist.destroy_process_group)
    # Skip the shutdown of the interpreter. A thread of gloo may destroy its last collective during the shutdown, cannot
    # get the lock of the interpreter, and aborts the process (torch 2.13.0: ~AsyncWork, ~ThreadLocalState).
    os._exit(0)
