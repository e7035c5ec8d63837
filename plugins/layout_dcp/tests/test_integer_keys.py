"""Objects whose states have integer keys, loaded from DCP checkpoints, in which all keys are text."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import lr_scheduler as schedulers

import ckptcore

_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 4, 4]),
    "MultiStepLR with other milestones": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 4, 4]),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer, total_iters=2), schedulers.MultiStepLR(optimizer, [1, 2])], [2]
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(optimizer, 0.9), schedulers.MultiStepLR(optimizer, [2, 4])]
    ),
}


def _rates(scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def _save_with_torch(state: dict[str, Any], location: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if no process group exists
        dcp.save(state, checkpoint_id=location)


@pytest.mark.parametrize("name", _SCHEDULERS)
def test_a_scheduler_resumes(name: str, tmp_path: Path) -> None:
    first = _SCHEDULERS[name](_optimizer())
    _rates(first, 1)
    _save_with_torch({"optimizer": first.optimizer.state_dict(), "scheduler": first.state_dict()}, tmp_path / "c")
    other = "other milestones" in name
    second = schedulers.MultiStepLR(_optimizer(), [3]) if other else _SCHEDULERS[name](_optimizer())
    ckptcore.load_into(tmp_path / "c", {"optimizer": second.optimizer, "scheduler": second})
    assert _rates(second, 6) == _rates(first, 6)


class _Counts:
    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


@pytest.mark.brings("object with integer keys, from torch.distributed.checkpoint", "torch", "same")
@pytest.mark.parametrize(
    ("own", "loaded"),
    [
        ({"seen": {7: 0}}, {"seen": {3: 1, -4: 2}}),
        ({"seen": Counter({3: 0})}, {"seen": Counter({3: 1, -4: 2})}),
        ({"seen": {"3": 0}}, {"seen": {"3": 1, "-4": 2}}),
        ({"seen": {3: 0, "other": 0}}, {"seen": {3: 1, "-4": 2}}),
        ({"seen": {}}, {"seen": {"3": 1, "-4": 2}}),
    ],
    ids=repr,
)
def test_keys_are_those_of_the_object(own: Any, loaded: Any, tmp_path: Path) -> None:
    _save_with_torch({"counts": {"seen": {3: 1, -4: 2}}}, tmp_path / "c")
    counts = _Counts(own)
    ckptcore.load_into(tmp_path / "c", {"counts": counts})
    assert counts.state == loaded
    assert type(counts.state["seen"]) is type(loaded["seen"])
