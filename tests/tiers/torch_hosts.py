"""Programs of torch.distributed for tests of near tiers. Each process is a host."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from ckptcore_tiers import NearTier, TieredDirectory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from ckptcore import Checkpointer, Context
from ckptcore.context import JobOptions, ReplicaOptions
from ckptcore.policies import SpecificSteps
from tests.jobs.processes import Place
from tests.jobs.torch_program import run as run_torch

run: Final = run_torch
_SHAPE: Final = (12, 5)


def _state(step: int, place: Place) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (place.size,))
    return {"w": distribute_tensor(torch.full(_SHAPE, float(step)), mesh, [Shard(0)]), "step": step}


def _open(place: Place) -> Checkpointer:
    near = place.directory / f"host-{place.rank}" / "run"
    return Checkpointer(
        TieredDirectory(NearTier(near, seen_by="host", close_seconds=120.0), place.directory / "far"), layout="dcp"
    )


def _save(place: Place) -> list[int]:
    with _open(place) as run:
        for step in (1, 2):
            run.save(step, _state(step, place))
            run.wait()
        return list(run.steps)


def _load(place: Place) -> list[Any]:
    with _open(place) as run:
        state = run.load_into(_state(0, place))
        tensor = state["w"]
        assert isinstance(tensor, DTensor)
        assert bool((tensor.to_local() == state["step"]).all())
        steps = [run.restored_step, state["step"]]
        run.save(state["step"] + 10, _state(state["step"] + 10, place))
        return steps


def _die_with_a_host(place: Place) -> None:
    """Save a step, then kill this process. The second host dies first, and the others after its death."""
    run = _open(place)
    pids: list[int] = [0] * place.size
    dist.all_gather_object(pids, os.getpid())
    second = os.pidfd_open(pids[1])
    dist.barrier()
    run.save(3, _state(3, place))
    if place.rank != 1:
        select.select([second], [], [], 60)  # readable once the process has ended
    os.kill(os.getpid(), signal.SIGKILL)


def _open_never_uploading(place: Place) -> Checkpointer:
    """Open a run with two processes on each host that uploads no step."""
    near = NearTier(
        place.directory / f"host-{place.rank // 2}" / "run", seen_by="host", upload_policy=SpecificSteps([])
    )
    context = Context(job=JobOptions(replicas=ReplicaOptions(piece_bytes=256)))
    return Checkpointer(TieredDirectory(near, place.directory / "far"), layout=place.layouts[0], context=context)


def _trained(place: Place, steps: int) -> dict[str, Any]:
    """Return the state of a data-parallel job after `steps` steps, with arrays that only some ranks hold."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(31, 17), torch.nn.BatchNorm1d(17)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 31), float(step)) + torch.arange(4.0)[:, None]).square().sum().backward()
        optimizer.step()
    mesh = init_device_mesh("cpu", (2, place.size // 2))
    whole = torch.arange(12.0 * 50).reshape(12, 50) + steps
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "across": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "within": distribute_tensor(whole, mesh, [Shard(0), Replicate()]),
        "step": steps,
    }


def _die_saved(place: Place) -> None:
    """Save two steps. Kill this process once the second step is committed on all hosts, before any upload."""
    run = _open_never_uploading(place)
    for steps in (1, 2):
        run.save(steps, _trained(place, steps))
        run.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load_trained(place: Place) -> Any:
    """Load the state of the killed job, and compare every element."""
    with _open_never_uploading(place) as run:
        loaded = run.load_into(_trained(place, 1))
        restored = run.restored_step
    expected = _trained(place, 2)
    for name in ("across", "within"):
        assert torch.equal(loaded.pop(name).to_local(), expected.pop(name).to_local())
    ours, theirs = (tree_flatten(state)[0] for state in (loaded, expected))
    assert len(ours) == len(theirs)
    for leaf, expected_leaf in zip(ours, theirs, strict=True):
        assert torch.equal(leaf, expected_leaf) if isinstance(leaf, torch.Tensor) else leaf == expected_leaf
    return restored


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {
    "save": _save,
    "load": _load,
    "die": _die_with_a_host,
    "die saved": _die_saved,
    "load trained": _load_trained,
}
