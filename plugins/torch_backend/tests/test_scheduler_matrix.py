"""Every scheduler of PyTorch with every kind of file: after a load, the rates equal those of the saved run."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_torch.named_optimizers import NamedOptimizer
from packaging.version import Version
from torch.optim import lr_scheduler as schedulers

import ckptcore
from plugins.torch_backend.tests.continued_runs import SOURCES

Make: TypeAlias = Callable[[torch.optim.Optimizer], Any]


class Decay:
    """A function with a state. `LambdaLR` saves its attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9**self.calls


SCHEDULERS: Final[dict[str, Make]] = {
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(optimizer, 0.9), schedulers.MultiStepLR(optimizer, [2, 4, 4])]
    ),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, 0.5, total_iters=4),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "LambdaLR with an object": lambda optimizer: schedulers.LambdaLR(optimizer, [Decay(), Decay()]),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, total_iters=5),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 4, 4]),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda epoch: 1 / epoch),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, total_steps=12),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 6, power=2.0),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [
            schedulers.LinearLR(optimizer, total_iters=2),
            schedulers.MultiStepLR(optimizer, [1, 2]),
            schedulers.CosineAnnealingLR(optimizer, 4),
        ],
        [2, 5],
    ),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2, gamma=0.5),
}

CELLS: Final = list(itertools.product((False, True), ("new", "stepped"), SOURCES))
"""Combinations of named and numbered optimizers, conditions of the target, and writers of the checkpoint."""


def objects(make: Make | None) -> tuple[torch.nn.Module, Any, Any]:
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, momentum=0.8)
    return model, optimizer, None if make is None else make(optimizer)


def train(optimizer: Any, scheduler: Any, steps: int) -> list[Any]:
    """Run steps. Return the rates and momenta after each step."""
    rates = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
        rates.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
    return rates


def save(location: Path, source: str, state: dict[str, Any]) -> None:
    if source not in ("DCP of PyTorch", "torch.save"):
        ckptcore.save(location, state, layout=source)
        return
    dicts = {name: value.state_dict() for name, value in state.items()}
    if source == "torch.save":
        torch.save(dicts, location)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns if no process group exists
        dcp.save(dicts, checkpoint_id=location)


def tree(model: torch.nn.Module, optimizer: Any, scheduler: Any, *, named: bool) -> dict[str, Any]:
    held = NamedOptimizer(model, optimizer) if named else optimizer
    return {"optimizer": held} if scheduler is None else {"optimizer": held, "scheduler": scheduler}


def resume(name: str, named: bool, condition: str, source: str, location: Path) -> None:
    model, optimizer, scheduler = objects(SCHEDULERS[name])
    train(optimizer, scheduler, 3)
    ours = source not in ("DCP of PyTorch", "torch.save")
    save(location, source, tree(model, optimizer, scheduler, named=named and ours))
    other, its, again = objects(SCHEDULERS[name])
    if condition == "stepped":
        train(its, again, 1)
    ckptcore.load_into(location, tree(other, its, again, named=named))
    assert train(its, again, 6) == train(optimizer, scheduler, 6)


def some_cells() -> Iterator[Any]:
    for number, name in enumerate(name for name in SCHEDULERS for _ in range(2)):
        mark = pytest.mark.brings(f"`{name}`", "torch", "same")
        yield pytest.param(name, *CELLS[number * 7 % len(CELLS)], marks=mark)


@pytest.mark.parametrize(("name", "named", "condition", "source"), list(some_cells()))
def test_the_next_rates_are_the_same(name: str, named: bool, condition: str, source: str, tmp_path: Path) -> None:
    resume(name, named, condition, source, tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize(("named", "condition", "source"), CELLS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_all_ways(name: str, named: bool, condition: str, source: str, tmp_path: Path) -> None:
    resume(name, named, condition, source, tmp_path / "c")


@pytest.mark.brings("optimizer, saved without the scheduler that it has now", "torch", "same")
@pytest.mark.parametrize("named", [False, True], ids=["numbered", "named"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_scheduler_that_is_new(named: bool, source: str, tmp_path: Path) -> None:
    """The new scheduler added `initial_lr` to the groups, which the checkpoint lacks."""
    model, optimizer, _ = objects(None)
    train(optimizer, None, 3)
    ours = source not in ("DCP of PyTorch", "torch.save")
    save(tmp_path / "c", source, tree(model, optimizer, None, named=named and ours))
    other, its, scheduler = objects(SCHEDULERS["StepLR"])
    ckptcore.load_into(tmp_path / "c", tree(other, its, None, named=named))
    expected = train(optimizer, SCHEDULERS["StepLR"](optimizer), 6)
    assert train(its, scheduler, 6) == expected


@pytest.mark.brings("optimizer, saved with a scheduler that it lacks now", "torch", "same")
@pytest.mark.parametrize("named", [False, True], ids=["numbered", "named"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_scheduler_that_no_longer_exists(named: bool, source: str, tmp_path: Path) -> None:
    """The saved scheduler added `initial_lr` to the groups. A scheduler that is created after the load uses it."""
    model, optimizer, scheduler = objects(SCHEDULERS["ExponentialLR"])
    train(optimizer, scheduler, 3)
    ours = source not in ("DCP of PyTorch", "torch.save")
    save(tmp_path / "c", source, tree(model, optimizer, None, named=named and ours))
    other, its, _ = objects(None)
    ckptcore.load_into(tmp_path / "c", tree(other, its, None, named=named))
    assert [group["initial_lr"] for group in its.param_groups] == [0.2, 0.1]
    resumed = schedulers.ExponentialLR(its, 0.9, last_epoch=2)
    if Version(torch.__version__) < Version("2.8"):  # older versions decay once more when a scheduler is created
        scheduler = schedulers.ExponentialLR(optimizer, 0.9, last_epoch=2)
    assert train(its, resumed, 4) == train(optimizer, scheduler, 4)


def test_every_scheduler_of_torch_is_tried() -> None:
    """If a later PyTorch has a new scheduler, add it to `SCHEDULERS`."""
    abstract = {schedulers.LRScheduler, schedulers._LRScheduler}
    kinds = {value for _, value in inspect.getmembers(schedulers, inspect.isclass)} - abstract
    known = {kind for kind in kinds if issubclass(kind, schedulers.LRScheduler)}
    assert known == {type(objects(make)[2]) for make in SCHEDULERS.values()}
