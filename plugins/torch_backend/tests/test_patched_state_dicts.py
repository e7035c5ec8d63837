"""Models and optimizers that torch.distributed.checkpoint has patched, and optimizers that contain others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_torch.named_optimizers import NamedOptimizer
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
)

import ckptcore
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")

Job = dict[str, Any]


def job(seed: int, *, flat: bool | None = None) -> Job:
    """Create a model with its optimizer, patched unless `flat` is None."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    if flat is not None:
        _patch_model_state_dict(model)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        _patch_optimizer_state_dict(model, optimizers=(optimizer,), options=options)
    return {"model": model, "optimizer": optimizer}


class Both(torch.optim.Optimizer):
    """An optimizer that delegates to other optimizers."""

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        self.each = [torch.optim.AdamW(part.parameters(), lr=rate) for part in model.children()]
        super().__init__(model.parameters(), {"lr": rate})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.each:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {f"part {number}": optimizer.state_dict() for number, optimizer in enumerate(self.each)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, optimizer in enumerate(self.each):
            optimizer.load_state_dict(state[f"part {number}"])


def train(made: Job) -> list[float]:
    losses = []
    for _ in range(3):
        loss = made["model"](torch.ones(2, 3)).square().mean()
        made["optimizer"].zero_grad()
        loss.backward()
        made["optimizer"].step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_patched_state_dicts_resume(tmp_path: Path, layout: str, used: bool, flat: bool) -> None:
    first, second = job(0, flat=flat), job(1, flat=flat)
    train(first)
    ckptcore.save(tmp_path / "x", first, layout=layout)
    if used:
        train(second)
    ckptcore.load_into(tmp_path / "x", second)
    assert train(second) == train(first)


@pytest.mark.parametrize("used", [False, True])
def test_a_container_of_optimizers_resumes(tmp_path: Path, used: bool) -> None:
    first, second = job(0), job(1)
    for made, rate in ((first, 0.1), (second, 0.7)):
        made["optimizer"] = Both(made["model"], rate)
    train(first)
    ckptcore.save(tmp_path / "x", first)
    if used:
        train(second)
    ckptcore.load_into(tmp_path / "x", second)
    assert train(second) == train(first)


def test_states_by_numbers_and_by_names_are_not_mixed(tmp_path: Path) -> None:
    plain, patched = job(0), job(0, flat=False)
    for name, made in (("plain", plain), ("patched", patched)):
        train(made)
        ckptcore.save(tmp_path / name, made["optimizer"])
    with pytest.raises(TreeMismatchError, match="the stored state numbers the parameters.*before .* patches it"):
        ckptcore.load_into(tmp_path / "plain", patched["optimizer"])
    with pytest.raises(TreeMismatchError, match=r"names the parameters \('0.weight'\).*NamedOptimizer"):
        ckptcore.load_into(tmp_path / "patched", plain["optimizer"])
    with pytest.raises(UnsupportedLeafError, match="does not number its parameters"):
        ckptcore.save(tmp_path / "named", NamedOptimizer(patched["model"], patched["optimizer"]))
