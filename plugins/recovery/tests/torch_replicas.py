"""Programs of torch.distributed in which processes lose their state, and get it from others."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from ckptcore_recovery.replicas import RecoveryReport, recover
from ckptcore_recovery.replicas.fetching import Fetch
from ckptcore_recovery.replicas.sending import HeldElements
from ckptcore_recovery.replicas.transfers import Parcel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptcore.errors import CheckpointError
from tests.jobs.processes import Place
from tests.jobs.torch_program import run as run_torch

LOST: Final = (1, 3)


def run(task: Callable[[Place], Any], place: Place) -> Any:
    """Run a task in a job, or a task that begins jobs itself."""
    return task(place) if task is _replaced_process else run_torch(task, place)


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 200))


def _trained(seed: int, wrap: Callable[[Any], Any] = lambda model: model) -> dict[str, Any]:
    """Return a state after three steps; equal on all processes with one seed."""
    model = wrap(_model(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(8, 300, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "step": 3 + seed,
        "rng": torch.get_rng_state(),
    }


def _new(seed: int, wrap: Callable[[Any], Any] = lambda model: model) -> dict[str, Any]:
    """Return the state of a process that has just started."""
    model = wrap(_model(seed))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "rng": torch.get_rng_state()}


def _plain(value: Any) -> Any:
    """Return a state as built-in containers of local tensors."""
    if isinstance(value, DTensor):
        return value.to_local()
    if hasattr(value, "state_dict"):
        return _plain(value.state_dict())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def expect_equal(state: Any, expected: Any) -> None:
    """Check that two states are equal in every bit, with all their objects."""
    state, expected = _plain(state), _plain(expected)
    if isinstance(expected, dict):
        assert list(state) == list(expected)
        for key, item in expected.items():
            expect_equal(state[key], item)
    elif isinstance(expected, list):
        assert len(state) == len(expected)
        for own, item in zip(state, expected, strict=True):
            expect_equal(own, item)
    elif isinstance(expected, torch.Tensor):
        assert state.dtype == expected.dtype
        assert torch.equal(state, expected)
    else:
        assert state == expected


def _described(report: RecoveryReport) -> dict[str, Any]:
    return {
        "lost": list(report.lost),
        "needed": report.bytes_needed,
        "moved": report.bytes_moved,
        "received": {str(rank): nbytes for rank, nbytes in report.received.items()},
        "replaced": sorted(report.replaced),
    }


def _data_parallel(place: Place) -> Any:
    """Two of four processes lose a module, an optimizer, a schedule and a random state."""
    expected, lost = _trained(0), place.rank in LOST
    state = _new(place.rank) if lost else _trained(0)
    model, report = state["model"], RecoveryReport()
    recovered = recover(state, lost=lost, report=report)
    assert recovered is state
    assert recovered["model"] is model
    expect_equal(recovered, expected)
    return _described(report)


def _sharded(place: Place) -> Any:
    """HSDP: each shard is on two processes, and two processes with different shards lose theirs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def wrap(model: Any) -> Any:
        return fully_shard(model, mesh=mesh)

    lost = place.rank in (0, 3)
    expected = _trained(0, wrap)
    kept = _trained(0, wrap)
    state = _new(place.rank + 1, wrap) if lost else kept
    del state["rng"], expected["rng"]  # differs between the processes
    report = RecoveryReport()
    recover(state, lost=lost, report=report)
    expect_equal(state, expected)
    return _described(report)


def _not_replicated(place: Place) -> Any:
    """FSDP without replicas: no process has the shard of the one that lost it."""
    mesh = init_device_mesh("cpu", (place.size,))
    whole = torch.arange(40.0 * 10).reshape(40, 10)
    lost = place.rank == 1
    tensor = distribute_tensor(torch.zeros_like(whole) if lost else whole, mesh, [Shard(0)])
    replicated = distribute_tensor(torch.zeros_like(whole) if lost else whole, mesh, [Replicate()])
    before = replicated.to_local().clone()
    try:
        recover({"w": tensor, "r": replicated, "step": place.rank == 1 or 7}, lost=lost)
    except Exception as error:  # noqa: BLE001  # returned to the test
        assert torch.equal(replicated.to_local(), before)
        return f"{type(error).__name__}: {error}"
    return None


def _die_at_parcel(count: int) -> None:
    """Kill this process when a parcel is requested for the given time, after the digests were compared."""
    digests, parcel, sent = HeldElements.digests, HeldElements.parcel, [0]

    def compare(self: HeldElements, parcels: Sequence[Parcel], rank: int) -> bytes:
        computed = digests(self, parcels, rank)
        HeldElements.parcel = send  # type: ignore[method-assign, assignment]
        return computed

    def send(self: HeldElements, wanted: Parcel) -> memoryview:
        sent[0] += 1
        if sent[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return parcel(self, wanted)

    HeldElements.digests = compare  # type: ignore[method-assign]


def _recover_large(place: Place, lost_ranks: Sequence[int] = (1,)) -> Any:
    """Some ranks lose an array of 48 MB, and get it from the others. Record what this one received."""
    whole = torch.randn(12_000, 1_000, generator=torch.Generator().manual_seed(1))
    lost, report = place.rank in lost_ranks, RecoveryReport()
    state: dict[str, Any] = {"w": torch.zeros_like(whole) if lost else whole.clone(), "step": 0 if lost else 7}
    outcome: dict[str, Any] = {"error": None}
    try:
        recover(state, lost=lost, report=report)
        assert torch.equal(state["w"], whole)
        assert state["step"] == 7
    except CheckpointError as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    (place.directory / f"outcome-{place.rank}.json").write_text(json.dumps({**outcome, **_described(report)}))
    os._exit(0)  # the group waits for killed processes


def _killed_holder(place: Place) -> Any:
    """Rank 2 is killed when the third parcel is requested of it: rank 1 has then received the first."""
    if place.rank == 2:
        _die_at_parcel(3)
    return _recover_large(place)


def _killed_holders(place: Place) -> Any:
    """Some ranks, but not rank 0, are killed when one of their three parcels is requested, by seed."""
    chance = random.Random(place.layouts[0])
    killed = chance.sample(range(2, place.size), chance.randint(1, place.size - 2))
    if place.rank in killed:
        _die_at_parcel(random.Random(f"{place.layouts[0]} {place.rank}").randint(1, 3))
    return _recover_large(place)


def _killed_receiver(place: Place) -> Any:
    """Ranks 1 and 3 lose their state. Rank 1 is killed when it has received its second parcel."""
    if place.rank == 1:
        accept, accepted = Fetch.accept, []

        def die(self: Fetch, *arguments: Any) -> None:
            accepted.append(arguments)
            if len(accepted) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            accept(self, *arguments)

        Fetch.accept = die  # type: ignore[method-assign, assignment]
    return _recover_large(place, lost_ranks=LOST)


def _begin(place: Place, name: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place.directory}/{name}", rank=rank, world_size=3)


def _replaced_process(place: Place) -> Any:
    """Rank 1 of three processes is killed. The others begin a new group with a spare process as rank 1.

    The others have taken part in another recovery before, and the spare process has not.
    """
    is_spare = place.rank == 3
    if is_spare:
        state = _new(9)
    else:
        _begin(place, "before", place.rank)
        lost = place.rank == 2
        state = _new(8) if lost else _trained(0)
        recover(state, lost=lost)
        expect_equal(state, _trained(0))
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:  # until the training notices that a process is missing
                dist.all_reduce(torch.ones(1))
        except RuntimeError:
            dist.destroy_process_group()
    _begin(place, "after", 1 if is_spare else place.rank)
    report = RecoveryReport()
    recover(state, lost=is_spare, report=report)
    expect_equal(state, _trained(0))
    (place.directory / f"outcome-{place.rank}.json").write_text(json.dumps({"error": None, **_described(report)}))
    dist.barrier()
    dist.destroy_process_group()


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {
    "data parallel": _data_parallel,
    "sharded": _sharded,
    "not replicated": _not_replicated,
    "replaced process": _replaced_process,
    "killed holder": _killed_holder,
    "killed holders": _killed_holders,
    "killed receiver": _killed_receiver,
}
