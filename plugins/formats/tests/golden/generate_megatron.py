"""Writes the golden checkpoint of Megatron: ``python generate_megatron.py DIRECTORY``, with megatron-core 0.16.1.

megatron-core calls ``torch.cuda`` even without a GPU. This program replaces these calls (`without_cuda`), and changes
nothing else: ``dist_checkpointing.save`` writes the files, with its strategy ``torch_dist``. ``NAME.npz`` has the whole
arrays. Run by hand; tests only read the files.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")
SIZE = 2


def without_cuda() -> None:
    """Replace the calls of ``torch.cuda`` that megatron-core makes while it saves."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.is_initialized = lambda: False
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self


def state_of(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of a process, and the whole arrays by their stored keys."""
    from megatron.core.dist_checkpointing import (  # type: ignore[import-not-found]
        ShardedObject,
        ShardedTensor,
    )

    whole = {
        "decoder.layers.weight": torch.arange(24.0).reshape(4, 6),
        "embedding.weight": torch.arange(30).reshape(6, 5).to(torch.bfloat16),
        "optimizer.state.exp_avg.decoder.layers.weight": torch.arange(24.0).reshape(4, 6) / 8,
        "norm.weight": torch.ones(3),
    }
    sharded: dict[str, Any] = {}
    for key, tensor in whole.items():
        if key == "norm.weight":
            sharded[key] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
            continue
        axis = 1 if key.startswith("decoder") else 0
        local = tensor.chunk(SIZE, axis)[rank].contiguous()
        sharded[key] = ShardedTensor.from_rank_offsets(key, local, (axis, rank, SIZE))
    state = {
        "args": argparse.Namespace(hidden_size=6, bf16=True),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "content_metadata": {"distrib_optim_sharding_type": "fully_sharded_model_space"},
        "optimizer": {
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "step": 7}],
            "exp_avg": sharded.pop("optimizer.state.exp_avg.decoder.layers.weight"),
        },
        "model": sharded,
        "rng_state": ShardedObject("rng_state", [{"seed": rank, "numpy": torch.arange(3) + rank}], (SIZE,), (rank,)),
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 14, "table": torch.arange(4.0)},
    }
    return state, {
        key: (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for key, tensor in whole.items()
    }


def work(rank: int, directory: Path, port: int) -> None:
    torch.set_num_threads(1)
    without_cuda()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=SIZE)
    from megatron.core import dist_checkpointing  # type: ignore[import-not-found]

    state, whole = state_of(rank)
    dist_checkpointing.save(state, str(directory / "torch_dist"), ("torch_dist", 1))
    if rank == 0:
        np.savez_compressed(directory / "torch_dist.npz", **whole)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "torch_dist").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    mp.spawn(work, (target, number), SIZE)  # type: ignore[no-untyped-call, attr-defined]
