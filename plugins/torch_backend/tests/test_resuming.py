"""Resumed runs: after a load into new objects, optimizers, schedulers and scalers continue bit for bit
like an uninterrupted run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import ckptcore

Parameters = list[torch.nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1, t0=2),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=4),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "weight_decay": 0.1}]
    ),
}


def parameters_of() -> Parameters:
    values = torch.linspace(-1, 1, 6, dtype=torch.float64)
    return [torch.nn.Parameter(values[:2].clone()), torch.nn.Parameter(values[2:].reshape(2, 2).clone())]


def step(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.stack([((parameter - 0.3) ** 4).sum() + parameter.cos().sum() for parameter in parameters]).sum()
        total.backward()  # type: ignore[no-untyped-call]  # has no annotations
        return total

    optimizer.step(loss)  # type: ignore[arg-type]  # annotated with a tensor in LBFGS, and with a float in others


def bits(parameters: Parameters) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in parameters]


@pytest.mark.parametrize("used", [0, 2], ids=["new", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_resumes(name: str, used: int, tmp_path: Path) -> None:
    """The target is new, or has made other steps. In LBFGS the history then has another length."""
    parameters = parameters_of()
    optimizer = OPTIMIZERS[name](parameters)
    for _ in range(3):
        step(optimizer, parameters)
    ckptcore.save(tmp_path / "step", {"parameters": parameters, "optimizer": optimizer})

    others = parameters_of()
    other = OPTIMIZERS[name](others)
    for _ in range(used):
        step(other, others)
    ckptcore.load_into(tmp_path / "step", {"parameters": others, "optimizer": other})
    assert bits(others) == bits(parameters)
    for _ in range(3):
        step(optimizer, parameters)
        step(other, others)
        assert bits(others) == bits(parameters)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4, 6]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 5),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, cooldown=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.StepLR(optimizer, 2)], milestones=[3]
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.MultiStepLR(optimizer, [2, 6])], optimizer
    ),
}


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_resumes(name: str, rate: float | torch.Tensor, tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any, Callable[[], float]]:
        optimizer = torch.optim.AdamW(parameters_of(), lr=copy.deepcopy(rate))
        scheduler = SCHEDULERS[name](optimizer)

        def advance() -> float:
            optimizer.step()
            arguments = [1.0] if name == "ReduceLROnPlateau" else []
            scheduler.step(*arguments)
            return float(optimizer.param_groups[0]["lr"])

        return optimizer, scheduler, advance

    optimizer, scheduler, advance = make()
    before = [advance() for _ in range(4)]
    ckptcore.save(tmp_path / "step", {"optimizer": optimizer, "scheduler": scheduler})
    other_optimizer, other, advance_other = make()
    ckptcore.load_into(tmp_path / "step", {"optimizer": other_optimizer, "scheduler": other})
    after = [advance() for _ in range(6)]
    assert [advance_other() for _ in range(6)] == after
    assert len({*before, *after}) > 1
    assert _types(other.state_dict()) == _types(scheduler.state_dict())


def _types(state: Any) -> object:
    if isinstance(state, dict):
        return type(state), {key: _types(child) for key, child in state.items()}
    if isinstance(state, list | tuple):
        return type(state), [_types(child) for child in state]
    return type(state)


def test_scaler_resumes(tmp_path: Path) -> None:
    def make() -> tuple[torch.amp.GradScaler, Callable[[float], float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def advance(loss: float) -> float:
            optimizer.zero_grad()
            scaler.scale((parameter * loss).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            return float(scaler.get_scale())

        return scaler, advance

    scaler, advance = make()
    for loss in (1.0, 1.0, float("inf"), 1.0):
        advance(loss)
    ckptcore.save(tmp_path / "step", {"scaler": scaler})
    other, advance_other = make()
    ckptcore.load_into(tmp_path / "step", {"scaler": other})
    assert other.state_dict() == scaler.state_dict()
    for loss in (1.0, float("nan"), 1.0, 1.0):
        assert advance_other(loss) == advance(loss)


def test_moments_keep_their_saved_dtype(tmp_path: Path) -> None:
    """PyTorch would cast the moments to the dtype of the parameter."""

    def make() -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])

    moments = torch.tensor([1.0, 2.0**-20 + 1, 3.0])
    optimizer = make()
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter] = {"step": torch.tensor(5.0), "exp_avg": moments, "exp_avg_sq": moments + 1}
    ckptcore.save(tmp_path / "step", {"optimizer": optimizer})
    other = make()
    ckptcore.load_into(tmp_path / "step", {"optimizer": other})
    state = other.state[other.param_groups[0]["params"][0]]
    assert state["exp_avg"].dtype is torch.float32
    assert torch.equal(state["exp_avg"], moments)
    assert torch.equal(state["exp_avg_sq"], moments + 1)
    assert torch.equal(state["step"], torch.tensor(5.0))


class Counting(torch.optim.SGD):
    """An optimizer whose state has a string key in addition to the parameters."""

    def step(self, closure: Any = None) -> Any:
        # mypy expects a parameter as the key
        held = self.state.setdefault("all", {"steps": torch.zeros((), dtype=torch.int64), "last": None})  # type: ignore[arg-type]
        held["steps"] += 1
        held["last"] = int(held["steps"])
        return super().step(closure)


@pytest.mark.parametrize("used", [0, 2])
def test_state_without_a_parameter_is_saved_and_loaded(used: int, tmp_path: Path) -> None:
    parameters, others = parameters_of(), parameters_of()
    optimizer, other = Counting(parameters, momentum=0.9), Counting(others, momentum=0.9)
    for _ in range(3):
        step(optimizer, parameters)
    for _ in range(used):
        step(other, others)
    ckptcore.save(tmp_path / "step", optimizer)
    ckptcore.load_into(tmp_path / "step", other)
    held: Any = dict(other.state)["all"]  # type: ignore[index]  # a string as key
    assert (held["steps"].item(), held["steps"].dtype, held["last"]) == (3, torch.int64, 3)


def test_loads_replace_states_of_other_sizes(tmp_path: Path) -> None:
    """State that the checkpoint lacks is removed from the target."""

    class Records:
        """An object with a tensor of losses that grows."""

        def __init__(self) -> None:
            self.losses = torch.zeros(0)

        def state_dict(self) -> dict[str, object]:
            return {"losses": self.losses} if len(self.losses) else {}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.losses = state.get("losses", torch.zeros(0))

    few, many = Records(), Records()
    few.losses, many.losses = torch.tensor([1.0]), torch.arange(5.0)
    ckptcore.save(tmp_path / "few", few)
    ckptcore.save(tmp_path / "many", many)
    ckptcore.save(tmp_path / "none", Records())
    ckptcore.load_into(tmp_path / "many", few)
    assert torch.equal(few.losses, torch.arange(5.0))
    ckptcore.load_into(tmp_path / "none", many)
    assert len(many.losses) == 0
