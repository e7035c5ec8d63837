"""Programs of torch.distributed for the tests of jobs: stages on their own meshes, strided shards, topologies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.model import ArrayRecord
from tests.jobs.counting import Counting
from tests.jobs.optimizer_stages import optimizers
from tests.jobs.processes import Place
from tests.jobs.topologies import WHOLE, assert_part
from tests.jobs.unequal_ranks import refusals, wait_for_late_rank
from tests.launchers.torch_arrays import tensor_of

QUICK: Final = ckptcore.Context(durability="none")


def run(task: Callable[[Place], Any], place: Place) -> Any:
    """Run a task in a job of torch.distributed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{place.port}", rank=place.rank, world_size=place.size)
    answer = task(place)
    dist.barrier()
    dist.destroy_process_group()
    return answer


class Stage(torch.nn.Module):
    """Two layers of a model, with their names in the whole model."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleDict({str(2 * number + own): torch.nn.Linear(6, 6 + own) for own in range(2)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply both layers."""
        for layer in self.layers.values():
            inputs = layer(inputs)
        return inputs


def whole_of(state: Any) -> dict[str, Any]:
    """Return the whole arrays of a tree of dicts by dotted name. DTensors are gathered from their mesh."""
    arrays: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            arrays.update({f"{key}.{name}": array for name, array in whole_of(value).items()})
        elif isinstance(value, torch.Tensor):
            arrays[key] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().numpy()
    return arrays


def stages(place: Place) -> Any:
    """Save and load two stages on two processes each, with FSDP2 or tensor parallelism.

    A rank has only the keys of its stage.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "within"))
    number, within = mesh.get_local_rank("stage"), mesh["within"]

    def make(seed: int) -> Any:
        stage: Any = Stage(number, seed)
        if number:
            parallelize_module(stage, within, {"layers.2": ColwiseParallel(), "layers.3": RowwiseParallel()})
        else:
            fully_shard(stage, mesh=within)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
        stage(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
        slots = {name: optimizer.state[parameter] for name, parameter in stage.named_parameters()}
        return {"model": stage, "optimizer": slots, "step": seed}

    def whole(state: Any) -> dict[str, Any]:
        return whole_of({**state, "model": state["model"].state_dict()})

    state = make(3)
    expected = whole(state)
    if within.get_local_rank() == 0:
        np.savez(place.directory / f"stage-{number}.npz", **expected)
    for layout in place.layouts:
        location = place.directory / f"stages-{layout}"
        ckptcore.save(location, state, layout=layout, context=QUICK)
        target = make(9)
        ckptcore.load_into(location, target, context=QUICK)
        loaded = whole(target)
        assert target["step"] == 3 and loaded.keys() == expected.keys()
        assert all(np.array_equal(loaded[name], expected[name]) for name in expected), layout
    return sorted(expected)


def submeshes(place: Place) -> Any:
    """Save and load DTensors over meshes of two processes. All four processes have them in their trees."""
    meshes = {name: DeviceMesh("cpu", ranks) for name, ranks in {"first": [0, 1], "last": [2, 3], "one": [3]}.items()}
    kinds: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
    rows = torch.arange(30, dtype=torch.float32).reshape(5, 6)

    def state(value: float) -> dict[str, Any]:
        tree: dict[str, Any] = {
            name: {
                kind: distribute_tensor(rows * value + number, mesh, [placement]) for kind, placement in kinds.items()
            }
            for number, (name, mesh) in enumerate(meshes.items())
        }
        tree["last"]["tied"] = tree["last"]["rows"]
        tree["whole"] = torch.arange(4.0) * value
        return tree

    def same(actual: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return all(same(actual[key], expected[key]) for key in expected)
        if isinstance(expected, DTensor):
            assert isinstance(actual, DTensor) and actual.placements == expected.placements
            return torch.equal(actual.to_local(), expected.to_local())
        return torch.equal(actual, expected)

    for layout in place.layouts:
        location = place.directory / f"submeshes-{layout}"
        ckptcore.save_async(location, state(2), layout=layout, context=QUICK).result()
        assert same(ckptcore.load(location, state(0), context=QUICK), state(2))
        target = state(0)
        ckptcore.load_into(location, target, context=QUICK)
        assert same(target, state(2))
    return "done"


def strided(place: Place) -> Any:
    """Save and load under FSDP2 over tensor parallelism. Four processes have ten rows, in uneven shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.Linear(10, 7))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["data"])

    model = make(1)
    weight = model.get_parameter("0.weight")
    assert [type(placement).__name__ for placement in weight.placements] == ["_StridedShard", "Shard"]
    expected = whole_of(model.state_dict())
    if place.rank == 0:
        np.savez(place.directory / "strided.npz", **expected)
    for layout in place.layouts:
        location = place.directory / f"strided-{layout}"
        ckptcore.save(location, {"model": model}, layout=layout, context=QUICK)
        tree = ckptcore.metadata(location).tree
        (record,) = [tree.leaves[leaf] for leaf, path in enumerate(tree.paths) if path[-1] == "0.weight"]
        assert isinstance(record, ArrayRecord)
        assert record.cuts == ((3, 5, 8), ())
        other = make(2)
        ckptcore.load_into(location, {"model": other}, context=QUICK)
        loaded = whole_of(other.state_dict())
        assert all(np.array_equal(loaded[name], expected[name]) for name in expected), layout
    return "done"


def array_of(tensor: torch.Tensor) -> Any:
    """Return the elements as a NumPy array."""
    tensor = tensor.detach()
    return (
        tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


def fsdp(*, filled: bool) -> dict[str, Any]:
    """Return the arrays of all topologies under FSDP2, except arrays without axes."""
    module: Any = torch.nn.Module()
    for name, array in WHOLE.items():
        if array.ndim:
            tensor = tensor_of(array)
            module.register_parameter(name, torch.nn.Parameter(tensor if filled else torch.zeros_like(tensor)))
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    count = tensor_of(WHOLE["count"])
    return {**module.state_dict(), "count": count if filled else torch.zeros_like(count)}


def save(place: Place) -> Any:
    """Save arrays that FSDP2 sharded."""
    for layout in place.layouts:
        ckptcore.save(place.directory / f"torch{place.size}-{layout}", fsdp(filled=True), layout=layout, context=QUICK)


def load(place: Place) -> Any:
    """Load all checkpoints into arrays that FSDP2 sharded."""
    names = sorted(path.name for path in place.directory.iterdir())
    for name in names:
        loaded = ckptcore.load(place.directory / name, fsdp(filled=False), context=QUICK)
        for key, tensor in loaded.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert_part(key, array_of(whole), ())
    return names


def counted(place: Place) -> Any:
    """Count the bytes that each process writes and reads, for shards, for replicated shards and for replicas."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    line = init_device_mesh("cpu", (4,))
    other = init_device_mesh("cpu", (2, 2))
    kinds: dict[str, tuple[Any, list[Placement]]] = {
        "sharded": (line, [Shard(0)]),
        "hybrid": (pairs, [Replicate(), Shard(0)]),
        "replicated": (line, [Replicate()]),
    }
    elements = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 30, (4096, 512), np.int32))

    def state() -> dict[str, Any]:
        made: dict[str, Any] = {name: distribute_tensor(elements, *kind) for name, kind in kinds.items()}
        return {**made, "same": elements.clone(), "small": [torch.arange(2048) + number for number in range(40)]}

    def needed(tree: Any) -> list[int]:
        tensors = [*(value for value in tree.values() if isinstance(value, torch.Tensor)), *tree.get("small", ())]
        return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors]

    answers = {}
    saved = state()
    for layout in place.layouts:
        counting = Counting(replicas=ckptcore.context.ReplicaOptions(piece_bytes=1 << 16))
        location = counting.url(place.directory / f"counted-{layout}")
        ckptcore.save(location, saved, layout=layout, context=counting.context)
        written = counting.counted().written
        reads = []
        rows = {name: distribute_tensor(torch.zeros_like(elements), other, [Shard(0), Shard(0)]) for name in kinds}
        for like in (state(), {**state(), **rows}):
            before = counting.counted().read
            ckptcore.load(location, like, context=counting.context)
            reads.append({"needed": needed(like), "read": counting.counted().read - before})
        answers[layout] = {"written": written, "reads": reads}
    whole = elements.nbytes * 4 + 40 * 2048 * 8
    return {"whole": whole, "layouts": answers}


def unequal(place: Place) -> Any:
    """Save arrays that differ between ranks, and save with a late rank."""
    state = {
        "generator": torch.Generator().manual_seed(place.rank).get_state(),
        "half and half": torch.full((1 << 24,), float(place.rank)),
    }
    messages = refusals(place, state, torch.equal)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(3))
    model(torch.randn(5, 3) + place.rank).sum().backward()  # each rank has the statistics of its own batch
    try:
        ckptcore.save(place.directory / "statistics", model.state_dict(), layout="dcp", context=QUICK)
    except CheckpointError as error:
        messages["statistics"] = str(error)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    ckptcore.save(place.directory / "statistics", model.state_dict(), layout="dcp", context=QUICK)
    return {"refused": messages, "lines": wait_for_late_rank(place)}


def quick(place: Place) -> Any:
    """Run a sample of all tasks."""
    submeshes(place)
    strided(place)
    stages(place)
    optimizers(replace(place, layouts=["dcp"]))
    return counted(place)


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {
    task.__name__: task for task in (stages, submeshes, strided, save, load, counted, quick, optimizers, unequal)
}
