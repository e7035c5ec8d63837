"""Writes the golden checkpoints of one file per process: ``python generate_ranks.py DIRECTORY``, with torch 2.13.0.

Each process calls ``torch.save`` on its state of DTensors or ShardedTensors, as verl and FSDP do.
``NAME.npz`` has the whole arrays. Run by hand; tests only read them.
"""

from __future__ import annotations

import copy
import os
import random
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

warnings.filterwarnings("ignore")


def arrays_of(state: Any, path: str = "") -> dict[str, Any]:
    """Return the whole arrays of a state by path. A collective: all processes must call it."""
    if isinstance(state, DTensor):
        state = state.full_tensor()
    if isinstance(state, torch.Tensor):
        state = state.detach()
        return {path: (state.view(torch.int16) if state.dtype == torch.bfloat16 else state).numpy()}
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: array for key, child in pairs for name, array in arrays_of(child, f"{path}/{key}").items()}


def verl(directory: Path, rank: int, size: int) -> dict[str, Any]:
    """Save an FSDP 2 model and its optimizer under the file names of verl's checkpoint manager."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3), nn.LayerNorm(3)).bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    rng = {"numpy": np.random.RandomState(rank).get_state(), "random": random.Random(rank).getstate()}
    states = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": {"lr": 0.1, "rng": rng}}
    for kind, state in states.items():
        torch.save(state, directory / f"{kind}_world_size_{size}_rank_{rank}.pt")
    return {kind: copy.copy(states[kind]) for kind in ("model", "optim")}


def mesh_of_two_axes(directory: Path, rank: int, size: int) -> dict[str, Any]:
    """Save DTensors with all kinds of placements, on a mesh of two axes."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(35.0).reshape(7, 5)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0), Replicate()]),
        "both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(whole, mesh, [Shard(0), Shard(0)]),
        "same": distribute_tensor(whole, mesh, [Replicate(), Replicate()]),
        "few": distribute_tensor(whole[:1], mesh, [Shard(0), Replicate()]),
        "columns": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]),
        "number": torch.tensor(3.5),
    }
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(layers, mesh=mesh["dp"])
    state.update(layers.state_dict())
    torch.save(state, directory / f"state-rank{rank}.bin")
    return state


def sharded(directory: Path, rank: int, size: int) -> dict[str, Any]:
    """Save ShardedTensors with uneven shards. One process has no shard."""
    import torch.distributed._shard.sharded_tensor as st
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.shard import Shard as OwnShard

    whole = torch.arange(24.0).reshape(8, 3)
    bounds = [(0, 1), (1, 6), (6, 8)][rank : rank + 1]
    shards = [
        OwnShard(whole[start:stop].clone(), ShardMetadata([start, 0], [stop - start, 3], f"rank:{rank}/cpu"))
        for start, stop in bounds
    ]
    tensor = st.init_from_local_shards(shards, (8, 3))
    torch.save({"w": tensor, "epoch": 4, "b": torch.arange(2)}, directory / f"pytorch_model_fsdp_rank{rank}.bin")
    return {"w": whole, "b": torch.arange(2)}


def plain(directory: Path, rank: int, size: int) -> dict[str, Any]:
    """Save DTensors with the oldest version of torch whose DTensor is public."""
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(15.0).reshape(5, 3)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "c": distribute_tensor(whole, mesh, [Shard(1)])}
    torch.save(state, directory / f"state_rank_{rank}.pt")
    return state


CASES: dict[str, tuple[int, Callable[[Path, int, int], dict[str, Any]]]] = {
    "verl": (2, verl),
    "mesh": (4, mesh_of_two_axes),
    "sharded": (4, sharded),
    f"torch_{torch.__version__.partition('+')[0]}": (2, plain),
}


def work(rank: int, name: str, directory: Path, port: int) -> None:
    size, save = CASES[name]
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    whole = arrays_of(save(directory / name, rank, size))
    if rank == 0:
        np.savez_compressed(directory / f"{name}.npz", **{path[1:]: array for path, array in whole.items()})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for name, (size, _) in CASES.items():
        if (target / name).exists() or (sys.argv[2:] and name.partition("_")[0] not in sys.argv[2:]):
            continue
        (target / name).mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            number = free.getsockname()[1]
        mp.spawn(work, (name, target, number), size)  # type: ignore[no-untyped-call, attr-defined]
