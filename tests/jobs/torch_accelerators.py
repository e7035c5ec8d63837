"""Saves and loads of two processes whose default group cannot send host memory, as with NCCL alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

import ckptcore
from ckptcore import PerProcess
from ckptcore.errors import CheckpointError, RankFailedError
from tests.jobs.processes import Place

ROWS: Final = torch.arange(44.0).reshape(11, 4)
_COLLECTIVES: Final = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource",
    "reduce",
    "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


class RefusingGroup(dist.ProcessGroup):
    """A group in Python that refuses every collective."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub requires a store
        self.refused: list[str] = []

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "refusing"

    @property
    def group_name(self) -> Any:
        """Return the name of the group in torch."""
        return dist.distributed_c10d._world.pg_names[self]


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: RefusingGroup, *_: Any) -> Any:
        self.refused.append(name)
        raise RuntimeError(f"{name} was called")

    return refuse


def run(task: Callable[[Place], Any], place: Place) -> Any:
    """Run a task. The task creates its own store and groups."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in _COLLECTIVES:
        setattr(RefusingGroup, name, _refusal(name))
    dist.Backend.register_backend(
        "refusing", lambda store, rank, size, timeout: RefusingGroup(rank, size), devices=["cpu", "cuda"]
    )
    # Like NCCL, this backend supports one kind of device, and not host memory.
    dist.Backend.register_backend(
        "accelerated",
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
        devices=["cuda"],
    )
    return task(place)


@contextmanager
def in_group(backend: str, store: Any, place: Place) -> Iterator[None]:
    """Create a default group of a backend that cannot send tensors in host memory."""
    prefixed: Any = dist.PrefixStore(backend, store)  # type: ignore[attr-defined]  # it is exported at run time
    dist.init_process_group(backend, store=prefixed, rank=place.rank, world_size=place.size)
    try:
        collectives: list[Callable[..., Any]] = [partial(dist.broadcast, src=0), dist.all_reduce]
        for collective in collectives:
            try:
                collective(torch.ones(1))
            except RuntimeError:
                continue
            raise AssertionError(f"the backend {backend} has a collective for host memory")
        if isinstance(dist.group.WORLD, RefusingGroup):
            assert dist.group.WORLD.refused
            dist.group.WORLD.refused.clear()
        yield
        if isinstance(dist.group.WORLD, RefusingGroup):
            assert not dist.group.WORLD.refused, dist.group.WORLD.refused
    finally:
        dist.destroy_process_group()


def sharded(value: torch.Tensor, mesh: DeviceMesh, placement: Placement, rank: int) -> DTensor:
    """Return a DTensor of a whole tensor, without communication."""
    assert isinstance(placement, Shard)
    part = value.chunk(2, placement.dim)[rank].contiguous()
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=value.shape, stride=value.stride())


def train(mesh: DeviceMesh, value: float) -> dict[str, Any]:
    """Return a model under FSDP2 and its optimizer. All numbers in them depend on `value`."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(value)
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": value}


def numbers(state: Mapping[str, Any]) -> list[float]:
    """Return the part of this process of a model and its optimizer."""
    model, optimizer = state["model"], state["optimizer"]
    tensors = [parameter.to_local() for parameter in model.parameters()]
    tensors += [slots[name].to_local() for slots in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [float(number) for tensor in tensors for number in tensor.detach().flatten()]


def save_and_load(place: Place, backend: str) -> Any:
    """Save and load with all functions. Return the steps of a run."""
    directory, rank = place.directory / backend, place.rank
    mesh = init_device_mesh("cpu", (place.size,))

    def state(value: float, dimension: int) -> dict[str, Any]:
        rows = sharded(ROWS * value, mesh, Shard(dimension), rank)
        return {"rows": rows, "copied": torch.full((3,), value), "host": np.full(4, value), "step": value}

    def expect(loaded: Mapping[str, Any], value: float) -> None:
        expected = state(value, 1)
        assert torch.equal(loaded["rows"].to_local(), expected["rows"].to_local())
        assert torch.equal(loaded["copied"], expected["copied"]) and (loaded["host"] == value).all()
        assert loaded["step"] == value

    quick = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=2))
    ckptcore.save(directory / "blocking", state(2, 0), context=quick)
    ckptcore.save_async(directory / "async", state(3, 0), layout="dcp", context=quick).result()
    expect(ckptcore.load(directory / "blocking", state(0, 1), context=quick), 2)
    together = ckptcore.Context(
        durability="none", io=ckptcore.context.IOOptions(threads=2), job=ckptcore.context.JobOptions(reads="broadcast")
    )  # uses separate groups
    expect(ckptcore.load_into(directory / "async", state(0, 1), context=together), 3)

    trained, blank = train(mesh, 1.0), train(mesh, 9.0)
    expected = numbers(trained)
    ckptcore.save(directory / "trained", trained, context=quick)
    ckptcore.load_into(directory / "trained", blank, context=quick)
    assert numbers(blank) == expected

    with ckptcore.Checkpointer(directory / "run", context=quick) as steps:
        for step in (1, 2):
            steps.save_checkpointables(step, {"model": state(step, 0), "mine": PerProcess({"rank": rank})})
        steps.wait()
        try:
            steps.save_blocking(3, {"wrong": object() if rank else 1})
        except CheckpointError as error:
            assert isinstance(error, RankFailedError) == (rank == 0), error
        else:
            raise AssertionError("a state that cannot be saved was saved")
        loaded = steps.load_checkpointables(abstract={"model": state(0, 1), "mine": PerProcess(None)})
        expect(loaded["model"], 2)
        assert loaded["mine"] == {"rank": rank}
        return list(steps.steps)


def accelerators(place: Place) -> Any:
    """Run one job for each kind of group. Return the steps of each job."""
    store: Any = dist.TCPStore("127.0.0.1", place.port, is_master=place.rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]  # it is exported at run time
    told = {}
    for backend in ("refusing", "accelerated"):
        with in_group(backend, store, place):
            told[backend] = save_and_load(place, backend)
    store.set(f"ended {place.rank}", "")
    if place.rank == 0:  # serves the store, so it ends last
        store.wait([f"ended {rank}" for rank in range(place.size)])
    return told


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {"accelerators": accelerators}
"""Tasks by name."""
