"""Plans of saves of PyTorch states: tensors on the meta device, and DTensors of processes that do not exist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ckptcore_torch.dtensors import DTensorHandler
from ckptcore_torch.tensors import TensorHandler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckptcore
from ckptcore.protocols import LeafHandler
from tests.jobs.torch_groups import process_group

PROCESSES = 8


@pytest.fixture
def imagined_group() -> Iterator[None]:
    """A process group of 8 ranks in which only this process exists."""
    with process_group("fake", rank=3, size=PROCESSES):
        yield


def test_handlers_implement_the_methods_that_plans_need() -> None:
    for handler in (TensorHandler, DTensorHandler):
        assert handler.shards_of is not LeafHandler.shards_of
        assert handler.host_bytes is not LeafHandler.host_bytes


def test_a_module_on_the_meta_device_is_planned() -> None:
    with torch.device("meta"):
        meta = torch.nn.Sequential(torch.nn.Linear(1 << 14, 1 << 14), torch.nn.Linear(1 << 14, 7))
        meta[0].weight = torch.nn.Parameter(torch.empty(1 << 14, 1 << 14, dtype=torch.bfloat16))
    plan = ckptcore.plan(meta, layout="dcp")
    assert plan.array_bytes == (1 << 29) + 4 * ((1 << 14) + 7 * (1 << 14) + 7)
    assert plan.memory[0].viewed == plan.array_bytes  # meta tensors may become tensors of a device, which need a copy
    small = torch.nn.Linear(3, 4)
    assert ckptcore.plan(small).memory[0].viewed == 0
    assert ckptcore.plan(small).processes == ckptcore.plan(small.to("meta")).processes


def test_tied_tensors_on_the_meta_device_count_once() -> None:
    weight = torch.empty(10, 10, device="meta")
    assert ckptcore.plan({"a": weight, "b": weight}).arrays == 1


def test_dtensors_of_other_processes_are_planned(imagined_group: None) -> None:
    mesh = init_device_mesh("cpu", (2, PROCESSES // 2), mesh_dim_names=("replicate", "shard"))
    rows = 4096
    local = torch.empty(rows * 2 // PROCESSES, 512, device="meta")
    weight = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    bias = DTensor.from_local(torch.empty(3, device="meta"), mesh, [Replicate(), Replicate()], run_check=False)
    plan = ckptcore.plan({"w": weight, "b": bias}, processes=PROCESSES, layout="dcp")
    assert plan.array_bytes == rows * 512 * 4 + 12
    written = [process.array_bytes for process in plan.processes]
    assert sum(written) == plan.array_bytes
    shared = ckptcore.Context(
        job=ckptcore.context.JobOptions(replicas=ckptcore.context.ReplicaOptions(piece_bytes=1 << 16))
    )
    assert ckptcore.plan({"w": weight}, processes=PROCESSES, layout="dcp", context=shared).imbalance == 1.0
