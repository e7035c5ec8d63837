"""A job of two processes that saves and loads with torch and ckptcore: models under FSDP1 and FSDP2,
and ShardedTensors.

``torchrun --nproc-per-node 2 sharded_job.py TASK DIRECTORY``. Raises an error on a wrong result.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckptcore_torch.named_optimizers import NamedOptimizer, NamedOptimizerPart
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptcore

Job = tuple[torch.nn.Module, torch.optim.Optimizer]


def layers(seed: int) -> torch.nn.Sequential:
    """Return a model whose rows do not divide evenly between two processes. One of its modules is wrapped."""
    torch.manual_seed(seed)
    first = checkpoint_wrapper(torch.nn.Linear(10, 13))
    return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(13, 3, bias=False))


def optimizer_of(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, amsgrad=True)


def losses(job: Job, seed: int) -> list[float]:
    """Train on data that is the same in every process. Return the losses."""
    model, optimizer = job
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(3):
        inputs, targets = torch.randn(8, 10, generator=generator), torch.randn(8, 3, generator=generator)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def both_ways(make: Callable[[int], Job], directory: Path, *, torch_can: bool = True) -> None:
    """Save with both libraries, and load each checkpoint with both. Training continues with the same losses.

    Args:
        make: function that creates a model and its optimizer from a seed.
        directory: directory of the checkpoints.
        torch_can: True if set_state_dict supports such a model.
    """
    ours, parts, theirs = directory / "ours", directory / "parts", directory / "theirs"
    job = make(0)
    losses(job, 1)
    model, optimizer = job
    ckptcore.save(ours, {"model": model, "optimizer": NamedOptimizer(model, optimizer)}, layout="dcp")
    ckptcore.save(parts, {"model": model, "optimizer": NamedOptimizerPart(model, optimizer)}, layout="dcp")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(theirs))
    expected = losses(job, 2)
    kinds = (NamedOptimizer, NamedOptimizerPart)
    for source, used, kind in itertools.product((ours, parts, theirs), (False, True), kinds):
        job = make(9)
        if used:
            losses(job, 4)
        model, optimizer = job
        ckptcore.load_into(source, {"model": model, "optimizer": kind(model, optimizer)})
        assert losses(job, 2) == expected, (source, used, kind)
    if torch_can:
        job = model, optimizer = make(9)
        losses(job, 4)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=str(ours))
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        assert losses(job, 2) == expected
    plain = layers(5)
    job = plain, optimizer_of(plain, 0.9)
    ckptcore.load_into(ours, {"model": plain, "optimizer": NamedOptimizer(*job)})
    close = [abs(loss - other) < 1e-5 for loss, other in zip(losses(job, 2), expected, strict=True)]
    assert all(close), "the losses differ by more than rounding"


def fsdp1(directory: Path) -> None:
    """Test FSDP1 with sharded and full state dicts, and with flat parameters or views of them."""
    cpu = torch.device("cpu")
    kinds = (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT)
    for use_orig_params, kind in itertools.product((True, False), kinds):

        def make(seed: int, use_orig_params: bool = use_orig_params, kind: StateDictType = kind) -> Job:
            inner = layers(seed)
            inner[0] = FSDP(inner[0], use_orig_params=use_orig_params, device_id=cpu)
            model = FSDP(inner, use_orig_params=use_orig_params, device_id=cpu)
            FSDP.set_state_dict_type(model, kind)
            return model, optimizer_of(model, 0.05 if seed == 0 else 0.9)

        place = directory / f"{use_orig_params}-{kind.name}"
        # set_state_dict fails for flat parameters: FSDP1 itself names them inconsistently if
        # activation checkpointing added a part to their names.
        both_ways(make, place, torch_can=use_orig_params)
        assert list(ckptcore.load(place / "ours")["model"]) == ["0.weight", "0.bias", "2.weight"]


def fsdp2(directory: Path) -> None:
    """Test FSDP2, whose state dicts contain DTensors."""

    def make(seed: int) -> Job:
        model = layers(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
        return model, optimizer_of(model, 0.05 if seed == 0 else 0.9)

    both_ways(make, directory / "named")
    job = model, optimizer = make(0)
    losses(job, 1)
    ckptcore.save(directory / "numbers", {"model": model, "optimizer": optimizer}, layout="dcp")
    expected = losses(job, 2)
    job = model, optimizer = make(9)
    ckptcore.load_into(directory / "numbers", {"model": model, "optimizer": optimizer})
    assert losses(job, 2) == expected, "after a load by numbers"
    job = model, optimizer = make(9)
    losses(job, 4)
    loaded = ckptcore.load(directory / "numbers", ckptcore.abstract({"model": model, "optimizer": optimizer}))
    set_model_state_dict(model, loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert losses(job, 2) == expected, "after a load of abstract states"


def sharded(whole: torch.Tensor, places: list[tuple[tuple[int, ...], tuple[int, ...], int]]) -> ShardedTensor:
    """Create a ShardedTensor from the offsets, sizes and rank of each shard."""
    shards = [ShardMetadata(list(start), list(sizes), f"rank:{rank}/cpu") for start, sizes, rank in places]
    local = []
    for shard, (start, sizes, rank) in zip(shards, places, strict=True):
        if rank == dist.get_rank():
            part = whole[tuple([slice(low, low + size) for low, size in zip(start, sizes, strict=True)])]
            local.append(LocalShard(part.clone(), shard))
    metadata = ShardedTensorMetadata(shards, whole.shape, TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def state(*, filled: bool) -> dict[str, Any]:
    """Return ShardedTensors with one shard per process, uneven shards, and several adjacent shards per process."""
    whole = {
        "even": torch.arange(12, dtype=torch.float32).reshape(4, 3),
        "uneven": torch.arange(35).reshape(5, 7).bfloat16(),
        "blocks": torch.arange(36, dtype=torch.float32).reshape(6, 6),
    }
    if not filled:
        whole = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    corners = itertools.product((0, 3), (0, 3))
    return {
        "even": sharded(whole["even"], [((0, 0), (2, 3), 0), ((2, 0), (2, 3), 1)]),
        "uneven": sharded(whole["uneven"], [((0, 0), (5, 5), 0), ((0, 5), (5, 2), 1)]),
        "blocks": sharded(whole["blocks"], [(corner, (3, 3), number % 3 % 2) for number, corner in enumerate(corners)]),
    }


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(
        torch.equal(shard.tensor, other.tensor)
        for name in first
        for shard, other in zip(first[name].local_shards(), second[name].local_shards(), strict=True)
    )


def golden(directory: Path) -> None:
    """Save ShardedTensors with torch."""
    dcp.save(state(filled=True), checkpoint_id=str(directory))


def shards(directory: Path) -> None:
    """Load ShardedTensors with both libraries, into ShardedTensors, DTensors and whole tensors."""
    saved = state(filled=True)
    golden(directory / "theirs")
    ckptcore.save(directory / "ours", saved, layout="dcp")
    mesh = init_device_mesh("cpu", (2,))
    for source in (directory / "theirs", directory / "ours"):
        target = state(filled=False)
        dcp.load(target, checkpoint_id=str(source))
        assert same(target, saved)
        target = state(filled=False)
        ckptcore.load_into(source, target)
        assert same(target, saved)
        assert same(ckptcore.load(source, state(filled=False)), saved)
        assert same(ckptcore.load(source, ckptcore.abstract(saved)), saved)
        like = {
            "even": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]),
            "uneven": distribute_tensor(torch.zeros(5, 7, dtype=torch.bfloat16), mesh, [Replicate()]),
            "blocks": torch.zeros(6, 6),
        }
        loaded = ckptcore.load(source, like)
        assert torch.equal(loaded["even"].full_tensor(), torch.arange(12.0).reshape(4, 3))
        assert torch.equal(loaded["uneven"].to_local().float(), torch.arange(35.0).reshape(5, 7))
        assert torch.equal(loaded["blocks"], torch.arange(36.0).reshape(6, 6))


TASKS = {"fsdp1": fsdp1, "fsdp2": fsdp2, "shards": shards, "golden": golden}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        TASKS[sys.argv[1]](Path(sys.argv[2]))
    finally:
        dist.destroy_process_group()
    # Skip the exit of the interpreter. During the exit, a gloo thread that drops its last collective
    # needs the interpreter lock, cannot get it, and aborts the process (torch 2.13.0: ~AsyncWork,
    # ~ThreadLocalState).
    os._exit(0)
