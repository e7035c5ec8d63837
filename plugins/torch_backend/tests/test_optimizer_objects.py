"""Optimizers of other libraries, with objects and functions in their states, and additional keys."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_torch.named_optimizers import NamedOptimizer

import ckptcore
from ckptcore.errors import TreeMismatchError

galore = pytest.importorskip("galore_torch")


def trained(steps: int, name: str = "GaLoreAdamW") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(8, 8)
    low_rank = {"params": [model.weight], "rank": 2, "update_proj_gap": 3, "scale": 0.5, "proj_type": "std"}
    options: dict[str, Any] = {"lr": 0.01, "relative_step": False, "scale_parameter": False}
    if name == "GaLoreAdamW":
        options = {"lr": 0.01, "no_deprecation_warning": True}
    optimizer = getattr(galore, name)([low_rank, {"params": [model.bias]}], **options)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(16.0).reshape(2, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["GaLoreAdamW", "GaLoreAdafactor"])
@pytest.mark.parametrize("steps", [0, 1], ids=["new", "stepped"])
@pytest.mark.parametrize("layout", ["zarr3", "dcp", "torch.save"])
@pytest.mark.parametrize("named", [False, True], ids=["plain", "named"])
def test_optimizers_of_galore_resume(tmp_path: Path, name: str, steps: int, layout: str, named: bool) -> None:
    model, optimizer = trained(2, name)
    other, target = trained(steps, name)
    if layout == "torch.save" and named:
        pytest.skip("torch.save has no names")

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": model, "optimizer": NamedOptimizer(model, optimizer) if named else optimizer}

    if layout == "torch.save":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    else:
        ckptcore.save(tmp_path / "c", state(model, optimizer), layout=layout)
    ckptcore.load_into(tmp_path / "c", state(other, target))
    for _ in range(2):
        step(model, optimizer)
        step(other, target)
    # PyTorch keeps the strides of a loaded matrix and ckptcore loads a contiguous one, so products round differently.
    torch.testing.assert_close(model.weight, other.weight, rtol=0, atol=1e-6)
    assert type(target.state[other.weight]["projector"]).__name__ == "GaLoreProjector"


@pytest.mark.brings("`GaLoreAdamW`, loaded into `AdamW`", "galore-torch", "refused")
def test_an_object_of_a_class_that_the_optimizer_does_not_know(tmp_path: Path) -> None:
    _, optimizer = trained(1)
    ckptcore.save(tmp_path / "c", optimizer)
    parameters = [torch.nn.Parameter(torch.zeros(8, 8)), torch.nn.Parameter(torch.zeros(8))]
    target = torch.optim.AdamW([{"params": [parameter]} for parameter in parameters])
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(
        TreeMismatchError, match="another class of optimizer than AdamW.*projector, step are stored instead"
    ):
        ckptcore.load_into(tmp_path / "c", target)
    assert target.state_dict() == before


class Schedule(torch.optim.SGD):
    """An optimizer with an additional key in its state dict, whose value changes type, and a function as an option."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.memory: Any = None
        for group in self.param_groups:
            group["decay"] = lambda step: 0.5**step

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # libraries do this
        return {**super().state_dict(), "memory": self.memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        self.memory = state_dict["memory"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "memory"})


@pytest.mark.brings("optimizer with further keys in its state dict, and functions as options", "torch", "same")
def test_further_keys_and_functions(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    saved, target = Schedule([parameter]), Schedule([parameter])
    parameter.grad = torch.ones(2)
    saved.step()
    saved.memory = {"average": torch.arange(3.0), "seen": [1, 2, 3]}
    ckptcore.save(tmp_path / "c", saved)
    function = target.param_groups[0]["decay"]
    ckptcore.load_into(tmp_path / "c", target)
    assert torch.equal(target.memory["average"], torch.arange(3.0))
    assert target.memory["seen"] == [1, 2, 3]
    assert target.param_groups[0]["decay"] is function
    assert torch.equal(target.state[parameter]["momentum_buffer"], saved.state[parameter]["momentum_buffer"])
