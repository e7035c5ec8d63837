"""A job that saves DTensors of torchao tensors on one mesh, and loads them on others.

``torchrun --nproc-per-node N composed_job.py TASK DIRECTORY``. Raises an error on a wrong result.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao.optim  # type: ignore[import-untyped]  # has no types
from ckptcore_torch.named_optimizers import NamedOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.optim.subclass_4bit import OptimState4bit  # type: ignore[import-untyped]  # has no types
from torchao.optim.subclass_8bit import OptimState8bit  # type: ignore[import-untyped]  # has no types
from torchao.optim.subclass_fp8 import OptimStateFp8  # type: ignore[import-untyped]  # has no types
from torchao.quantization import (  # type: ignore[import-untyped]  # has no types
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import ckptcore
from ckptcore.errors import RankFailedError, TreeMismatchError

Job = tuple[torch.nn.Module, torch.optim.Optimizer]

OPTIMIZERS = (torchao.optim.AdamW8bit, torchao.optim.AdamW4bit, torchao.optim.AdamWFp8)
STATES = (OptimState8bit, OptimState4bit, OptimStateFp8)
ROWS, COLUMNS = 32, 1024


def eager(function: Any = None, **options: Any) -> Any:
    """Replace torch.compile, which takes a minute. The optimizers of torchao compute the same results without it."""
    return function


def model_of(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(512, 128), torch.nn.ReLU(), torch.nn.Linear(128, 256))


def losses(job: Job, seed: int) -> list[float]:
    """Train on data that is the same in every process. Return the losses."""
    model, optimizer = job
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(2):
        loss = model(torch.randn(4, 512, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def sharded(seed: int, optimizer: Any, *, tensor_parallel: bool) -> Job:
    model = model_of(seed)
    size = dist.get_world_size()
    if not tensor_parallel:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        return model, optimizer(model.parameters(), lr=0.01)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model, optimizer(model.parameters(), lr=0.01)


def inner_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the inner tensors of all quantised first moments."""
    inner = []
    for slots in optimizer.state.values():
        local = slots["exp_avg"]._local_tensor
        if hasattr(local, "codes"):
            inner += [local.codes.view(torch.uint8), local.scale]
    assert inner
    return inner


def resumed(directory: Path) -> None:
    """Load into new and used optimizers. Both continue like the saved job. Used optimizers keep their tensors."""
    for kind in OPTIMIZERS:
        for tensor_parallel in (False, True):
            place = directory / f"{kind.__name__}-{tensor_parallel}"
            model, optimizer = job = sharded(0, kind, tensor_parallel=tensor_parallel)
            losses(job, 1)
            ckptcore.save(place / "numbers", {"model": model, "optimizer": optimizer})
            ckptcore.save(place / "names", {"model": model, "optimizer": NamedOptimizer(model, optimizer)})
            expected = losses(job, 2)
            for used in (False, True):
                for names in (False, True):
                    model, optimizer = job = sharded(7, kind, tensor_parallel=tensor_parallel)
                    if used:
                        losses(job, 3)
                    before = inner_tensors(optimizer) if used else []
                    target = NamedOptimizer(model, optimizer) if names else optimizer
                    ckptcore.load_into(place / ("names" if names else "numbers"), {"model": model, "optimizer": target})
                    if used:
                        after = inner_tensors(optimizer)
                        assert [tensor.data_ptr() for tensor in before] == [tensor.data_ptr() for tensor in after]
                    assert losses(job, 2) == expected, (kind, tensor_parallel, used, names)


def whole_state(kind: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    state: torch.Tensor = kind.zeros((ROWS, COLUMNS))
    return state.copy_(torch.randn(ROWS, COLUMNS))


def state_on(mesh_shape: tuple[int, ...], placements: Any, kind: Any, seed: int, **options: Any) -> Any:
    """Return an optimizer state on a mesh. Each process quantises its own part, as an optimizer does."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.randn(options.pop("shape", (ROWS, COLUMNS)))
    part = DTensor.from_local(whole, mesh, [Replicate()] * len(mesh_shape)).redistribute(mesh, placements)
    local = kind.zeros(part.to_local().shape, **options)
    local.copy_(part.to_local())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def parts(state: Any) -> list[torch.Tensor]:
    local = getattr(state, "_local_tensor", state)
    return [local.codes.view(torch.uint8), local.scale, *([local.qmap] if hasattr(local, "qmap") else [])]


def equal(first: Any, second: Any) -> bool:
    assert type(first) is type(second)
    return all(map(torch.equal, parts(first), parts(second)))


def meshes() -> dict[str, tuple[tuple[int, ...], Any]]:
    size = dist.get_world_size()
    shapes_and_placements: dict[str, tuple[tuple[int, ...], Any]] = {
        "rows": ((size,), [Shard(0)]),
        "columns": ((size,), [Shard(1)]),
        "copies": ((size,), [Replicate()]),
    }
    if size == 4:
        shapes_and_placements["both"] = (2, 2), [Shard(0), Shard(1)]
        shapes_and_placements["rows twice"] = (2, 2), [Shard(0), Shard(0)]
        shapes_and_placements["rows and copies"] = (2, 2), [Replicate(), Shard(0)]
    return shapes_and_placements


def save(directory: Path) -> None:
    """Save the same state on each mesh, and load it on all of them."""
    for kind in STATES:
        for saving, (shape, placements) in meshes().items():
            place = directory / f"{kind.__name__}-{saving}"
            state = state_on(shape, placements, kind, 0)
            ckptcore.save(place, {"s": state})
            load(directory, kind.__name__, saving)


def load(directory: Path, *only: str) -> None:
    for kind in STATES:
        for place in sorted(directory.glob(f"{kind.__name__}-*")):
            if only and place.name != "-".join(only):
                continue
            for shape, placements in meshes().values():
                expected = state_on(shape, placements, kind, 0)
                target = {"s": state_on(shape, placements, kind, 1)}
                loaded = ckptcore.load(place, target)["s"]
                assert equal(loaded, expected), (place, shape, placements)
                assert loaded.placements == expected.placements and loaded.shape == expected.shape
                held = target["s"]
                ckptcore.load_into(place, target)
                assert target["s"] is held and equal(held, expected)
                assert equal(ckptcore.load(place, ckptcore.abstract(target))["s"], expected)


def alone(directory: Path) -> None:
    """Load the checkpoints of all meshes in a process without a mesh."""
    places = sorted(directory.iterdir())
    assert len(places) == 18
    for place in places:
        (kind,) = [kind for kind in STATES if place.name.startswith(kind.__name__)]
        target = {"s": whole_state(kind, 1)}
        ckptcore.load_into(place, target)
        assert equal(target["s"], whole_state(kind, 0)), place


def cut_blocks(directory: Path) -> None:
    """Load a state whose blocks a mesh cuts. Only meshes that divide the tensor in the same way can load it."""
    options: dict[str, Any] = {"shape": (64, 256), "block_size": 256}
    for kind in STATES:
        place = directory / f"{kind.__name__}"
        state = state_on((2, 2), [Shard(0), Shard(1)], kind, 0, **options)
        ckptcore.save(place, {"s": state})
        target = {"s": state_on((2, 2), [Shard(0), Shard(1)], kind, 1, **options)}
        assert equal(ckptcore.load(place, target)["s"], state)
        ckptcore.load_into(place, target)
        assert equal(target["s"], state)
        for shape, placements in (((4,), [Shard(0)]), ((4,), [Shard(1)])):
            other = {"s": state_on(shape, placements, kind, 1, **options)}
            before = [part.clone() for part in parts(other["s"])]
            with pytest.raises(TreeMismatchError, match=r"^s: .*(shards: .* on a mesh that divides it|block)"):
                ckptcore.load_into(place, other)
            assert all(map(torch.equal, before, parts(other["s"])))


def weight_on(mesh_shape: tuple[int, ...], placements: Any, config: Any, seed: int) -> Any:
    """Return a quantised weight on a mesh. torchao slices the part of each process."""
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    quantize_(model, config)
    mesh, whole = init_device_mesh("cpu", mesh_shape), model[0].weight.detach()
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            width = local.shape[placement.dim] // mesh.size(axis)
            start = width * mesh.get_local_rank(axis)
            local = local[start : start + width] if placement.dim == 0 else local[:, start : start + width]
    # `from_local` needs a view, which the weights of torchao do not have.
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    make: Any = DTensor
    return make(local, spec, requires_grad=False)


def weights(directory: Path) -> None:
    """Load weights with a scale for each row. A mesh that cuts rows can load only its own checkpoint."""
    for config in (Int8WeightOnlyConfig(), Float8WeightOnlyConfig()):
        for saving, (shape, placements) in meshes().items():
            place = directory / f"{type(config).__name__}-{saving}"
            ckptcore.save(place, {"w": weight_on(shape, placements, config, 0)})
            for loading, other in meshes().items():
                expected, target = weight_on(*other, config, 0), {"w": weight_on(*other, config, 1)}
                if saving != loading and {saving, loading} & {"columns", "both"}:
                    with pytest.raises(TreeMismatchError, match=r"^w: context.block_size: "):
                        ckptcore.load_into(place, target)
                    continue
                loaded = ckptcore.load(place, target)["w"]
                ckptcore.load_into(place, target)
                for weight in (loaded, target["w"]):
                    for name in ("qdata", "scale"):
                        part, equal_part = getattr(weight._local_tensor, name), getattr(expected._local_tensor, name)
                        assert torch.equal(part.view(torch.uint8), equal_part.view(torch.uint8)), (
                            saving,
                            loading,
                            name,
                        )


def small_shards(directory: Path) -> None:
    """Save a tensor with a shard of less than 4,096 elements, which torchao does not quantise. The save fails."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(7, 1024)
    part: Any = DTensor.from_local(whole, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
    state = torchao.optim.AdamW8bit([part], lr=0.1)._new_buffer(part, True)
    with pytest.raises((TreeMismatchError, RankFailedError), match="s: dict on rank 0; a leaf on rank 1"):
        ckptcore.save(directory, {"s": state})
    assert not directory.exists()


if __name__ == "__main__":
    torch.compile = eager  # type: ignore[assignment]  # it has overloads
    task, where = sys.argv[1:]
    dist.init_process_group("gloo")
    for name in task.split(","):
        tasks = {
            "resumed": resumed,
            "save": save,
            "load": load,
            "alone": alone,
            "cut_blocks": cut_blocks,
            "small_shards": small_shards,
            "weights": weights,
        }
        tasks[name](Path(where) / ("save" if name in ("load", "alone") else name))
    dist.destroy_process_group()
