"""Names with another prefix: the error proposes the transform, which loads everything. No load is of nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_transforms import Rename
from safetensors.torch import save_file
from torch import nn

import ckptcore
from ckptcore import PLACEHOLDER, Matching, select
from ckptcore.errors import TreeMismatchError
from ckptcore.results import LoadReport

KEEP = Matching(missing="keep", unexpected="ignore")


class Network(nn.Module):
    """Modules, a module with one parameter, a parameter of its own, and a module with a loader of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.token = nn.Parameter(torch.randn(4))


def within(name: str, module: nn.Module, head: bool = False) -> nn.Module:
    """Return a module that has another one under a name with dots, and perhaps a head."""
    for part in reversed(name.split(".")):
        outer = nn.Module()
        outer.add_module(part, module)
        module = outer
    if head:
        module.add_module("head", nn.Linear(4, 2, bias=False))
    return module


def with_head(module: nn.Module) -> nn.Module:
    module.add_module("head", nn.Linear(4, 2, bias=False))
    return module


def followed(path: Path, target: Any) -> LoadReport:
    """Load with the transforms and options that the error proposes."""
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(path, target)
    text = str(caught.value)
    names: dict[str, Any] = {"Rename": Rename, "Matching": Matching}
    transforms = eval(text.partition("transforms=")[2].partition("]")[0] + "]", names)
    _, found, code = text.rpartition("matching=")
    matching = eval(code.partition(")")[0] + ")", names) if found else Matching()
    report = LoadReport()
    ckptcore.load_into(path, target, transforms=transforms, matching=matching, report=report)
    return report


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(held, other[name]) for name, held in one.items())


@pytest.mark.parametrize("prefix", ["model", "module", "_orig_mod", "base_model.model", "student.encoder"])
def test_a_prefix_to_remove_and_to_add(tmp_path: Path, prefix: str) -> None:
    plain, outer = Network(), within(prefix, Network())
    ckptcore.save(tmp_path / "outer", {"model": outer, "step": 7})
    ckptcore.save(tmp_path / "plain", {"model": plain, "step": 7})
    for path, target in ((tmp_path / "outer", Network()), (tmp_path / "plain", within(prefix, Network()))):
        state = {"model": target, "step": 0}
        report = followed(path, state)
        assert state["step"] == 7 and not report.defaulted and not report.ignored
        saved = outer if path.name == "outer" else plain
        assert all(map(torch.equal, target.state_dict().values(), saved.state_dict().values()))


@pytest.mark.parametrize("head", [True, False])
def test_a_file_of_safetensors(tmp_path: Path, head: bool) -> None:
    """The base of a language model, from the file of the whole model; and the reverse."""
    saved = within("model", Network(), head=head).state_dict()
    save_file(saved, tmp_path / "model.safetensors")
    target = Network()
    assert followed(tmp_path / "model.safetensors", target).ignored == ["['head.weight']"] * head
    assert all(torch.equal(held, saved[f"model.{name}"]) for name, held in target.state_dict().items())
    save_file(target.state_dict(), tmp_path / "base.safetensors")
    outer = within("model", Network(), head=head)
    assert followed(tmp_path / "base.safetensors", outer).defaulted == ["['head.weight']"] * head
    assert all(torch.equal(outer.state_dict()[f"model.{name}"], held) for name, held in target.state_dict().items())


def test_a_prefix_beside_names_that_stay(tmp_path: Path) -> None:
    plain, outer = with_head(Network()), within("model", Network(), head=True)
    ckptcore.save(tmp_path / "plain", plain)
    ckptcore.save(tmp_path / "outer", outer)
    for path, saved, target in (
        (tmp_path / "plain", plain, within("model", Network(), head=True)),
        (tmp_path / "outer", outer, with_head(Network())),
    ):
        assert not followed(path, target).defaulted
        assert all(map(torch.equal, target.state_dict().values(), saved.state_dict().values()))


def test_another_prefix_and_one_leaf(tmp_path: Path) -> None:
    saved, target = within("module", Network()), within("_orig_mod", Network())
    ckptcore.save(tmp_path / "c", dict(saved.state_dict()))
    followed(tmp_path / "c", target)
    assert all(map(torch.equal, target.state_dict().values(), saved.state_dict().values()))
    one, single = nn.Linear(2, 2, bias=False), within("model", nn.Linear(2, 2, bias=False))
    ckptcore.save(tmp_path / "one", single)
    followed(tmp_path / "one", one)
    assert same({"model.weight": one.weight}, single.state_dict())


def test_names_of_a_file_for_a_nested_tree(tmp_path: Path) -> None:
    saved = {"model.layers.0.w": torch.ones(2), "model.layers.0.b": torch.ones(3)}
    save_file(saved, tmp_path / "c.safetensors")
    target = {"layers": {"0": {"w": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}}}
    followed(tmp_path / "c.safetensors", target)
    assert target["layers"]["0"]["w"].tolist() == [1, 1]


def test_which_of_two_parts_is_meant_is_not_guessed(tmp_path: Path) -> None:
    both = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)})
    ckptcore.save(tmp_path / "c", both)
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(tmp_path / "c", nn.Linear(2, 2))
    assert "moved" not in str(caught.value) and "No requested leaf is stored" in str(caught.value)
    assert "matching=" not in str(caught.value)


@pytest.mark.parametrize(
    "saved", [within("model", Network()), {}, {"other": np.ones(2)}], ids=["renamed", "empty", "x"]
)
def test_a_load_of_nothing_is_an_error_whatever_is_allowed(tmp_path: Path, saved: Any) -> None:
    ckptcore.save(tmp_path / "c", saved)
    target = Network()
    before = {name: held.clone() for name, held in target.state_dict().items()}
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(tmp_path / "c", target, matching=KEEP)
    assert "matching=" not in str(caught.value) and same(before, target.state_dict())
    with pytest.raises(TreeMismatchError, match="not stored"):
        ckptcore.load(tmp_path / "c", {"w": 1}, matching=Matching(missing="placeholder", unexpected="ignore"))


def test_nothing_of_a_module_beside_others(tmp_path: Path) -> None:
    """The counter would be restored, and the module would not. With PLACEHOLDER in its place, that is intended."""
    ckptcore.save(tmp_path / "c", {"model": Network(), "step": 7})
    target: dict[str, Any] = {"model": nn.Linear(2, 2), "step": 0}
    for matching in (Matching(), KEEP):
        with pytest.raises(TreeMismatchError, match="No leaf of model is stored") as caught:
            ckptcore.load_into(tmp_path / "c", target, matching=matching)
        assert "put PLACEHOLDER in its place" in str(caught.value) and "matching=" not in str(caught.value)
    assert target["step"] == 0
    assert ckptcore.load_into(tmp_path / "c", {**target, "model": PLACEHOLDER})["step"] == 7


def test_a_selection_of_which_nothing_is_requested(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(TreeMismatchError, match="no selected leaf is requested|b is stored and not requested"):
        ckptcore.load_into(
            tmp_path / "c", {"a": np.zeros(2)}, select=select.names("b"), matching=Matching(unexpected="ignore")
        )


def test_less_than_half_of_a_module_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nnx = pytest.importorskip("flax.nnx")
    layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(5)]
    ckptcore.save(tmp_path / "c", {"torch": nn.Sequential(nn.Linear(2, 2)), "flax": nnx.List(layers[:1])})
    for wanted, warned in ((2, []), (3, ["only 2 of the 6 leaves of torch", "only 2 of the 6 leaves of flax"])):
        caplog.clear()
        state = {
            "torch": nn.Sequential(*[nn.Linear(2, 2) for _ in range(wanted)]),
            "flax": nnx.List(layers[:wanted]),
        }
        with caplog.at_level(logging.WARNING, "ckptcore"):
            ckptcore.load_into(tmp_path / "c", state, matching=Matching(missing="keep"))
            ckptcore.load_into(tmp_path / "c", state, select=select.names("torch"), matching=Matching(missing="keep"))
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == len(warned)
        assert all(any(text in message for message in messages) for text in warned)
