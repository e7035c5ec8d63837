"""Pipeline stages, each with FSDP2 on two processes and its own optimizer, that save one state and resume."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from ckptcore_torch.named_optimizers import NamedOptimizer, NamedOptimizerPart
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptcore
from tests.jobs.processes import Place

LAYERS: Final = ("0", "1", "2", "3")
"""Of the whole model."""

QUICK: Final = ckptcore.Context(durability="none")


class Layers(torch.nn.Module):
    """Some layers of a model, with their names in the whole model."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(5, 5) for name in names})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply all layers."""
        for layer in self.layers.values():
            inputs = layer(inputs).tanh()
        return inputs


def adamw(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return an optimizer with decay for weights, and without decay for biases."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
        ],
        lr=rate,
    )


def go_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train some steps, on inputs that could come from an earlier stage."""
    for number in range(steps):
        optimizer.zero_grad()
        (model(torch.linspace(-1, 1, 15).reshape(3, 5)) - number).square().mean().backward()
        optimizer.step()


def stored_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return whole parameters, whole slots, and options of parameter groups, by dotted name."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    values: dict[str, Any] = {name: _whole(parameter) for parameter, name in names.items()}
    for parameter, slots in optimizer.state.items():
        values.update({f"{names[parameter]}.{slot}": _whole(held) for slot, held in slots.items()})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            values.update({f"{name}.{option}": np.array(group[option]) for option in ("lr", "betas", "weight_decay")})
    return values


def _whole(tensor: torch.Tensor) -> Any:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().numpy().copy()


def optimizers(place: Place) -> Any:
    """Save two stages on two processes each. Load them into the same stages and into other stages, and continue."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "within"))
    number, within = mesh.get_local_rank("stage"), mesh["within"]

    def make(names: Sequence[str], seed: int, rate: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Layers(names, seed)
        fully_shard(model, mesh=within)
        return model, adamw(model, rate)

    def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model, "optimizer": NamedOptimizerPart(model, optimizer)}

    own = (LAYERS[:2], LAYERS[2:])[number]
    job = make(own, 3 + number, 0.02)
    go_on(*job, 2)
    saved = stored_of(*job)
    if within.get_local_rank() == 0:
        np.savez(place.directory / f"optimizer-{number}.npz", **saved)
    for layout in place.layouts:
        ckptcore.save(place.directory / f"optimizers-{layout}", state(*job), layout=layout, context=QUICK)
    go_on(*job, 3)
    expected = stored_of(*job)
    for layout in place.layouts:
        location = place.directory / f"optimizers-{layout}"
        for used in (0, 1):
            other = make(own, 9, 0.7)
            go_on(*other, used)
            ckptcore.load_into(location, state(*other), context=QUICK)
            _expect(stored_of(*other), saved)
            go_on(*other, 3)
            _expect(stored_of(*other), expected)
        other = make((LAYERS[:3], LAYERS[3:])[number], 9, 0.7)
        ckptcore.load_into(location, state(*other), context=QUICK)
        loaded = stored_of(*other)
        assert {name.split(".")[1] for name in loaded} == set((LAYERS[:3], LAYERS[3:])[number])
        common = saved.keys() & loaded.keys()
        _expect({name: loaded[name] for name in common}, {name: saved[name] for name in common})
    return sorted(saved)


def _saved(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number in range(2):
        with np.load(directory / f"optimizer-{number}.npz") as arrays:
            values.update(arrays)
    return values


def load_whole(directory: Path, layout: str) -> None:
    """Load the state of both stages in one process."""
    whole = Layers(LAYERS, 9)
    optimizer = adamw(whole, 0.7)
    state = {"model": whole, "optimizer": NamedOptimizer(whole, optimizer)}
    ckptcore.load_into(directory / f"optimizers-{layout}", state)
    _expect(stored_of(whole, optimizer), _saved(directory))


def load_whole_by_torch(directory: Path) -> None:
    """Load the layout dcp in one process with torch, into an optimizer that has made a step."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    whole = Layers(LAYERS, 9)
    optimizer = adamw(whole, 0.7)
    go_on(whole, optimizer, 1)
    state = {"model": whole.state_dict(), "optimizer": get_optimizer_state_dict(whole, optimizer, options=flat)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        load_by_torch(state, checkpoint_id=directory / "optimizers-dcp")
    whole.load_state_dict(state["model"])
    set_optimizer_state_dict(whole, optimizer, state["optimizer"], options=flat)
    _expect(stored_of(whole, optimizer), _saved(directory))


def _expect(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype and actual[name].tobytes() == array.tobytes(), name
