"""Conformance tests of leaf handlers on DTensors, in a job of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ckptcore_testing import LeafExample, LeafHandlerTests
from ckptcore_torch.dtensors import DTensorHandler
from ckptcore_torch.modules import ModuleHandler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import ckptcore
from ckptcore.model import AbstractArray
from tests.jobs.torch_groups import process_group

WHOLE = torch.arange(1, 36, dtype=torch.float32).reshape(5, 7)


@contextmanager
def job() -> Iterator[None]:
    """Run in the existing process group, or in a new one of this process alone."""
    if dist.is_initialized():  # no group exists while pytest collects the tests, which creates the examples
        yield
        return
    with process_group():
        yield


def dtensor(whole: torch.Tensor, *placements: Any) -> DTensor:
    with job():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        return DTensor.from_local(whole.clone(), mesh, placements, run_check=False)


def elements(leaf: Any) -> Any:
    local = leaf.to_local().detach()
    return (local.float() if local.dtype is torch.bfloat16 else local).numpy()


def mutate(leaf: Any) -> None:
    with torch.no_grad():
        leaf.to_local().add_(1)


def example(name: str, whole: torch.Tensor, *placements: Any, parameter: bool = False) -> LeafExample:
    def make(tensor: torch.Tensor = whole) -> Any:
        made = dtensor(tensor, *placements)
        return torch.nn.Parameter(made) if parameter else made

    return LeafExample(name, make, whole.numpy(), elements, [lambda: make(whole.to("meta"))], mutate)


@pytest.mark.usefixtures("alone")
class TestDTensorsConform(LeafHandlerTests):
    """Conformance tests in a process that holds all shards."""

    handler = DTensorHandler()
    examples = (
        example("rows", WHOLE, Replicate(), Shard(0)),
        example("blocks", WHOLE, Shard(0), Shard(1)),
        example("whole", WHOLE.long(), Replicate(), Replicate()),
        example("one axis", WHOLE[0], Shard(0), Replicate()),
        example("empty", WHOLE[:0], Shard(0), Replicate()),
        example("parameter", WHOLE, Shard(0), Replicate(), parameter=True),
    )
    unsupported = (lambda: dtensor(WHOLE, Replicate(), Partial()),)

    def test_shards_of_all_processes_cover_the_array(self) -> None:
        """Run with one process only, because the mesh of the examples has one."""
        for each in self.examples:
            super().test_shards_of_all_processes_cover_the_array(each, 1)


@pytest.mark.usefixtures("alone")
def test_abstract_dtensor_requests_the_devices_of_its_mesh() -> None:
    leaf = dtensor(WHOLE.bfloat16(), Shard(0), Replicate())
    abstract: Any = DTensorHandler().abstract(leaf)
    assert abstract.to_local().is_meta and abstract.device_mesh == leaf.device_mesh
    assert (abstract.dtype, abstract.placements) == (torch.bfloat16, leaf.placements)
    assert np.array_equal(elements(leaf), WHOLE.numpy()), "the leaf is unchanged"


def test_a_rank_without_elements() -> None:
    """FSDP2 with tensor parallelism over four ranks, and a weight with one column."""
    with process_group("fake", rank=3, size=8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tensor"))
        module = torch.nn.Linear(1, 4, bias=False)
        parallelize_module(module, mesh["tensor"], RowwiseParallel())
        fully_shard(module, mesh=mesh["data"])
        assert module.weight.to_local().shape == (0, 0)  # the placements give (2, 0)
        assert DTensorHandler().shards(module.weight, 3, 8) == ()


@pytest.mark.usefixtures("alone")
def test_parameters_and_their_states_load_as_what_they_are(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    fully_shard(model)
    state = {"parameters": list(model.parameters()), "states": model.state_dict()}
    ckptcore.save(tmp_path / "c", state)
    for request in (state, ckptcore.abstract(state)):
        loaded = ckptcore.load(tmp_path / "c", request)
        assert all(isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad for leaf in loaded["parameters"])
        assert not any(leaf.requires_grad for leaf in loaded["states"].values())


@pytest.mark.usefixtures("alone")
def test_dtensors_over_one_tensor_keep_their_meshes(tmp_path: Path) -> None:
    local = torch.arange(4.0)
    meshes = [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("data", "tensor")]
    state = [DTensor.from_local(local, mesh, [Shard(0)]) for mesh in (*meshes, meshes[0])]
    ckptcore.save(tmp_path / "c", state)
    for request in (state, ckptcore.abstract(state)):
        loaded = ckptcore.load(tmp_path / "c", request)
        assert [leaf.device_mesh for leaf in loaded] == [*meshes, meshes[0]] and loaded[0] is loaded[2]


def test_another_order_of_ranks_is_another_array() -> None:
    with process_group("fake", 0, 2):
        local = torch.ones(2)
        leaves = [DTensor.from_local(local, DeviceMesh("cpu", ranks), [Shard(0)]) for ranks in ([0, 1], [1, 0], [0, 1])]
        first, other, tied = map(DTensorHandler().identity, leaves)
        assert first != other and first == tied


@pytest.mark.usefixtures("alone")
def test_a_sharded_module_is_filled_without_a_copy() -> None:
    """A module without its own loader cannot refuse a state, so the load keeps no copy to undo it."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    fully_shard(model)
    handler = ModuleHandler()
    stored = {name: AbstractArray(tuple(held.shape), "float32") for name, held in model.state_dict().items()}
    request = handler.flatten_to_load(model, stored)
    assert not handler.may_refuse(model, request)
