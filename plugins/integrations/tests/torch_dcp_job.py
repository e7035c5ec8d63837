"""A job of several processes that saves and loads with the replacement for torch.distributed.checkpoint.

``torchrun --nproc-per-node N torch_dcp_job.py TASK DIRECTORY``. Each process writes ``DIRECTORY/TASK.RANK`` at the end.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import ckptcore_integrations.torch_dcp as dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as original
from kills import kill_at
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptcore


def state_of(value: int) -> dict[str, Any]:
    """Return sharded and replicated tensors of bfloat16, values, a list, and a key that only this rank has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(40.0).reshape(10, 4).bfloat16() + value
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": torch.full((3,), float(value)),
        "groups": [{"rate": 0.1 + value, "betas": (0.9, 0.99)}, {"rate": 0.2 + value, "params": [1, 2]}],
        "step": value,
        "object": torch.Size([value]),
        f"rank_{dist.get_rank()}": {"seed": value + dist.get_rank(), "noise": torch.full((2,), float(dist.get_rank()))},
    }


def blank(value: Any) -> Any:
    """Return a target of the same structure."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return [blank(inner) for inner in value]
    return None


def expect_same(loaded: Any, expected: Any, path: str = "") -> None:
    """Compare trees, and the local tensors of DTensors."""
    if isinstance(expected, DTensor):
        assert torch.equal(loaded.to_local(), expected.to_local()), path
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(loaded, expected), path
    elif isinstance(expected, dict):
        assert loaded.keys() == expected.keys(), path
        for key in expected:
            expect_same(loaded[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list):
        for number, inner in enumerate(expected):
            expect_same(loaded[number], inner, f"{path}.{number}")
    else:
        assert (type(loaded), loaded) == (type(expected), expected), path


def both_ways(directory: Path) -> None:
    """Load each library's checkpoint with both libraries. Asynchronous saves in a thread and a process are included."""
    state = state_of(3)
    dcp.save(state, checkpoint_id=directory / "ours")
    original.save(state, checkpoint_id=directory / "theirs")
    original.save(state, storage_writer=dcp.Writer(directory / "writer"))
    dcp.async_save(state, checkpoint_id=directory / "thread").result()
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    dcp.async_save(state, checkpoint_id=directory / "process", async_checkpointer_type=kind).result()
    for name in ("ours", "theirs", "writer", "thread", "process"):
        for library in (dcp, original):
            target = blank(state)
            library.load(target, checkpoint_id=directory / name)
            expect_same(target, state, f"{name} by {library.__name__}")
    expected = original.FileSystemReader(directory / "theirs").read_metadata().planner_data
    for name in ("ours", "writer", "thread", "process"):
        assert original.FileSystemReader(directory / name).read_metadata().planner_data == expected
    loaded = ckptcore.load(directory / "ours")
    assert loaded["groups"][1]["params"] == [1, 2]


def groups(directory: Path) -> None:
    """Save with groups: a part of the job, all ranks in reverse order, and each process alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for half in (list(range(size // 2)), list(range(size // 2, size))):
        group = dist.new_group(half)
        if rank in half:
            location = directory / f"group-{half[0]}"
            state = {"w": torch.full((2,), float(half[0])), f"of_{rank}": rank}
            for _ in range(2):
                dcp.save(state, checkpoint_id=location, process_group=group)
            target = {"w": torch.zeros(2), f"of_{rank}": None}
            original.load(target, checkpoint_id=location, process_group=group)
            expect_same(target, state)
    alone = directory / f"alone-{rank}"
    dcp.save({"rank": rank}, checkpoint_id=alone, no_dist=True)
    target = {"rank": None}
    dcp.load(target, checkpoint_id=alone, no_dist=True)
    assert target["rank"] == rank


class Failing(original.DefaultSavePlanner):
    """A planner that fails on the last rank when the save needs data."""

    def resolve_data(self, write_item: Any) -> Any:
        """Raise an error on the last rank."""
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError("the disk of the last rank is gone")
        return super().resolve_data(write_item)


def failing(directory: Path) -> None:
    """Check that all ranks raise the error of the failed rank, in a save and a load, and keep the old checkpoint."""
    dcp.save(state_of(1), checkpoint_id=directory / "saved")
    for save in (dcp.save, original.save):
        options = (
            {"checkpoint_id": directory / "saved"}
            if save is dcp.save
            else {"storage_writer": dcp.Writer(directory / "saved")}
        )
        try:
            save(state_of(2), planner=Failing(), **options)
        except original.CheckpointException as error:
            assert "the disk of the last rank is gone" in str(error)
            assert len(error.failures) == dist.get_world_size()
        else:
            raise AssertionError("the save succeeded")
    target = blank(state_of(1))
    dcp.load(target, checkpoint_id=directory / "saved")
    expect_same(target, state_of(1))
    dcp.save(state_of(3), checkpoint_id=directory / "saved")  # the job can save again
    wanted = {"plain": torch.zeros(3)} if dist.get_rank() else {"plain": torch.zeros(3), "none": 0}
    try:
        dcp.load(wanted, checkpoint_id=directory / "saved")
    except original.CheckpointException as error:
        assert "Missing key" in str(error)
    else:
        raise AssertionError("the load succeeded")


def dtypes(directory: Path) -> None:
    """Save a tensor whose dtype differs between the ranks, and follow the remedy in the error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    def state_in(dtype: torch.dtype) -> dict[str, Any]:
        return {"x": DTensor.from_local(torch.full((2,), float(rank), dtype=dtype), mesh, [Shard(0)])}

    try:
        dcp.save(state_in(torch.bfloat16 if rank else torch.float32), checkpoint_id=directory / "saved")
    except original.CheckpointException as error:
        assert "'x' is ((4,), 'bfloat16'), but ((4,), 'float32') on another rank" in str(error)
        assert "Give it one shape and dtype on all" in str(error)
    else:
        raise AssertionError("the save succeeded")
    assert not (directory / "saved").exists()
    state = state_in(torch.float32)
    dcp.save(state, checkpoint_id=directory / "saved")
    target = blank(state)
    original.load(target, checkpoint_id=directory / "saved")
    expect_same(target, state)


def killed(directory: Path, victim: str, event: str) -> None:
    """Overwrite a checkpoint. One rank is killed at its n-th change of the file system."""
    dcp.save(state_of(1), checkpoint_id=directory / "saved")
    dist.barrier()
    if dist.get_rank() == int(victim):
        kill_at(int(event), directory)
    dcp.save(state_of(2), checkpoint_id=directory / "saved")


def main() -> None:
    """Run a task."""
    warnings.simplefilter("ignore")
    task, directory, *arguments = sys.argv[1:]
    dist.init_process_group("gloo")
    globals()[task](Path(directory), *arguments)
    (Path(directory) / f"{task}.{dist.get_rank()}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
