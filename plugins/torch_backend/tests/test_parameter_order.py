"""Loads of optimizer states whose parameters have another order, other groups or shapes, or are on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_torch.named_optimizers import NamedOptimizer

import ckptcore
from ckptcore import Matching
from ckptcore.errors import TreeMismatchError

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, 0.1),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "Adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


class _Layers(torch.nn.Module):
    """Layers of the same shape, created in a given order."""

    def __init__(self, *names: str, size: int = 3) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(size, size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for name in sorted(name for name, _ in self.named_children()):
            inputs = torch.tanh(self.get_submodule(name)(inputs))
        return inputs


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    size = next(model.parameters()).shape[-1]
    optimizer.zero_grad()
    model(torch.randn(4, size, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def _values(model: torch.nn.Module) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


def _groups(model: torch.nn.Module, *, first: str) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    groups = [
        {"params": [(name, held) for name, held in named if name.endswith("weight")], "weight_decay": 0.5},
        {"params": [(name, held) for name, held in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    return groups if first == "weight" else groups[::-1]


@pytest.mark.brings("optimizer with `param_names`, layers in another order", "torch", "same")
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in DataParallel"])
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_named_parameters_in_another_order_keep_their_states(name: str, wrapped: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Layers("a", "b", "c")
    optimizer = _OPTIMIZERS[name](model.named_parameters())
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = _Layers("c", "a", "b")
    again = _OPTIMIZERS[name]((torch.nn.DataParallel(other) if wrapped else other).named_parameters())
    ckptcore.load_into(tmp_path / "c", {"model": other, "optimizer": again})
    _step(model, optimizer, 2)
    _step(other, again, 2)
    assert _values(other) == _values(model)
    assert again.param_groups[0]["param_names"] == [
        name for name, _ in (torch.nn.DataParallel(other) if wrapped else other).named_parameters()
    ]


@pytest.mark.brings("optimizer with `param_names`, groups in another order", "torch", "same")
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
def test_groups_in_another_order_keep_their_options(stepped: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Layers("a", "b")
    optimizer = torch.optim.AdamW(_groups(model, first="weight"))
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = _Layers("b", "a")
    again = torch.optim.AdamW(_groups(other, first="bias"))
    if stepped:
        _step(other, again, 5)
    ckptcore.load_into(tmp_path / "c", {"model": other, "optimizer": again})
    assert [group["weight_decay"] for group in again.param_groups] == [0.0, 0.5]
    _step(model, optimizer, 2)
    _step(other, again, 2)
    assert _values(other) == _values(model)


def test_a_loaded_state_dict_has_the_parameter_order_of_the_optimizer(tmp_path: Path) -> None:
    model = _Layers("a", "b")
    optimizer = torch.optim.Adam(model.named_parameters())
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", optimizer)
    other = _Layers("b", "a")
    again = torch.optim.Adam(other.named_parameters())
    again.load_state_dict(ckptcore.load(tmp_path / "c", again))
    for name, parameter in other.named_parameters():
        assert torch.equal(again.state[parameter]["exp_avg"], optimizer.state[model.get_parameter(name)]["exp_avg"])


@pytest.mark.brings("optimizer with `param_names`, of other parameters", "torch", "refused")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.optim.Adam(_Layers("a", "x").named_parameters()), "'b.bias' is only in the checkpoint"),
        (lambda: torch.optim.Adam(_Layers("a", "b", "c").named_parameters()), "'c.bias' is only in the optimizer"),
        (lambda: torch.optim.Adam(_groups(_Layers("a", "b"), first="weight")), "has other parameters"),
    ],
    ids=["renamed", "added", "other groups"],
)
def test_other_parameters_are_refused(make: Callable[[], torch.optim.Optimizer], message: str, tmp_path: Path) -> None:
    model = _Layers("a", "b")
    optimizer = torch.optim.Adam(model.named_parameters())
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"optimizer": optimizer})
    other = make()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(TreeMismatchError, match=message):
        ckptcore.load_into(tmp_path / "c", {"optimizer": other})
    assert other.state_dict() == before


def test_the_remedy_for_other_names_loads_by_position(tmp_path: Path) -> None:
    model = _Layers("a", "b")
    optimizer = torch.optim.Adam(model.named_parameters())
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"optimizer": optimizer})
    other = _Layers("x", "y")
    with pytest.raises(TreeMismatchError, match=r"create it with model.parameters\(\)"):
        ckptcore.load_into(tmp_path / "c", {"optimizer": torch.optim.Adam(other.named_parameters())})
    again = torch.optim.Adam(other.parameters())
    ckptcore.load_into(tmp_path / "c", {"optimizer": again})
    for saved, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(again.state[loaded]["exp_avg"], optimizer.state[saved]["exp_avg"])


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_named_states_of_another_shape_are_refused(name: str, tmp_path: Path) -> None:
    model = _Layers("a", size=3)
    optimizer = _OPTIMIZERS[name](model.parameters())
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"optimizer": NamedOptimizer(model, optimizer)})
    other = _Layers("a", size=4)
    again = NamedOptimizer(other, _OPTIMIZERS[name](other.parameters()))
    with pytest.raises(TreeMismatchError, match=r"optimizer/state\['a.bias'\]/"):
        ckptcore.load_into(tmp_path / "c", {"optimizer": again})


@pytest.mark.brings("optimizer of parameters with other shapes", "torch", "refused")
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_states_of_parameters_of_another_shape_are_refused(name: str, stepped: bool, tmp_path: Path) -> None:
    model = _Layers("a", size=3)
    optimizer = _OPTIMIZERS[name](model.parameters())
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"optimizer": optimizer})
    other = _Layers("a", size=4)
    again = _OPTIMIZERS[name](other.parameters())
    if stepped:
        _step(other, again, 1)
    before = copy.deepcopy(again.state_dict())
    with pytest.raises(TreeMismatchError, match=r"optimizer/state\[1\]/"):
        ckptcore.load_into(tmp_path / "c", {"optimizer": again})
    assert repr(again.state_dict()) == repr(before)


@pytest.mark.brings("optimizer of parameters that are padded on request", "torch", "same")
def test_states_are_padded_as_their_parameters_are(tmp_path: Path) -> None:
    model = _Layers("a", size=3)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = _Layers("a", size=4)
    again = torch.optim.Adam(other.parameters())
    ckptcore.load_into(tmp_path / "c", {"model": other, "optimizer": again}, matching=Matching(shapes={"pad"}))
    for saved, loaded in zip(model.parameters(), other.parameters(), strict=True):
        padded = again.state[loaded]["exp_avg"]
        assert padded.shape == loaded.shape
        assert torch.equal(padded[tuple(slice(size) for size in saved.shape)], optimizer.state[saved]["exp_avg"])
        assert padded.count_nonzero() == optimizer.state[saved]["exp_avg"].count_nonzero()
    _step(other, again, 2)


@pytest.mark.brings("optimizer of parameters on the meta device, loaded with its model", "torch", "refused")
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_of_parameters_that_the_load_replaces_is_refused(name: str, tmp_path: Path) -> None:
    model = _Layers("a")
    optimizer = _OPTIMIZERS[name](model.parameters())
    _step(model, optimizer, 1)
    ckptcore.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        other = _Layers("a")
    again = _OPTIMIZERS[name](other.parameters())
    with pytest.raises(TreeMismatchError, match="create the optimizer with its new parameters"):
        ckptcore.load_into(tmp_path / "c", {"model": other, "optimizer": again})
    assert all(parameter.is_meta for parameter in other.parameters())

    ckptcore.load_into(tmp_path / "c", {"model": other}, matching=Matching(unexpected="ignore"))
    again = _OPTIMIZERS[name](other.parameters())
    ckptcore.load_into(tmp_path / "c", {"optimizer": again}, matching=Matching(unexpected="ignore"))
    _step(model, optimizer, 2)
    _step(other, again, 2)
    assert _values(other) == _values(model)


@pytest.mark.brings("optimizer of an older PyTorch, without some options", "torch", "same")
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_options_that_are_not_stored_keep_their_values(name: str, tmp_path: Path) -> None:
    """Older versions of PyTorch stored fewer options, and optimizers without a scheduler store no initial_lr."""
    model = _Layers("a")
    optimizer = _OPTIMIZERS[name](model.parameters())
    _step(model, optimizer, 1)
    state = optimizer.state_dict()
    for option in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        state["param_groups"][0].pop(option, None)
    ckptcore.save(tmp_path / "c", {"optimizer": state, "model": model})
    other = _Layers("a")
    again = _OPTIMIZERS[name](other.parameters())
    torch.optim.lr_scheduler.StepLR(again, 10)  # adds `initial_lr`
    rate = again.param_groups[0]["initial_lr"]
    ckptcore.load_into(tmp_path / "c", {"optimizer": again, "model": other})
    assert again.param_groups[0]["initial_lr"] == rate
    _step(model, optimizer, 2)
    _step(other, again, 2)
    assert _values(other) == _values(model)
