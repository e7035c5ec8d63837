"""Names with another prefix: the error proposes a transform that loads all leaves. Loads without a leaf fail."""

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
    """A module with a parameter and submodules. One submodule has a single parameter, and one has hooks of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.token = nn.Parameter(torch.randn(4))


def within(name: str, module: nn.Module, head: bool = False) -> nn.Module:
    """Return a module that contains another one under a name with dots, and optionally a head."""
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


def followed(path: Path, target: Any, given: Matching | None = None) -> LoadReport:
    """Load with the transforms and options that the error proposes."""
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(path, target, matching=given or Matching())
    text = str(caught.value)
    names: dict[str, Any] = {"Rename": Rename, "Matching": Matching}
    transforms = eval(text.partition("transforms=")[2].partition("]")[0] + "]", names)
    _, separator, code = text.rpartition("matching=")
    matching = given or (eval(code.partition(")")[0] + ")", names) if separator else Matching())
    report = LoadReport()
    ckptcore.load_into(path, target, transforms=transforms, matching=matching, report=report)
    return report


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return list(first) == list(second) and all(torch.equal(held, second[name]) for name, held in first.items())


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
    """The file of a whole language model loads into its base model, and the reverse."""
    saved = within("model", Network(), head=head).state_dict()
    save_file(saved, tmp_path / "model.safetensors")
    target = Network()
    assert followed(tmp_path / "model.safetensors", target).ignored == ["['head.weight']"] * head
    assert all(torch.equal(held, saved[f"model.{name}"]) for name, held in target.state_dict().items())
    save_file(target.state_dict(), tmp_path / "base.safetensors")
    outer = within("model", Network(), head=head)
    assert followed(tmp_path / "base.safetensors", outer).defaulted == ["['head.weight']"] * head
    assert all(torch.equal(outer.state_dict()[f"model.{name}"], held) for name, held in target.state_dict().items())


def test_a_prefix_next_to_names_that_stay(tmp_path: Path) -> None:
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
    linear, single = nn.Linear(2, 2, bias=False), within("model", nn.Linear(2, 2, bias=False))
    ckptcore.save(tmp_path / "one", single)
    followed(tmp_path / "one", linear)
    assert same({"model.weight": linear.weight}, single.state_dict())


def test_names_of_a_file_for_a_nested_tree(tmp_path: Path) -> None:
    saved = {"model.layers.0.w": torch.ones(2), "model.layers.0.b": torch.ones(3)}
    save_file(saved, tmp_path / "c.safetensors")
    target = {"layers": {"0": {"w": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}}}
    followed(tmp_path / "c.safetensors", target)
    assert target["layers"]["0"]["w"].tolist() == [1, 1]


def test_an_ambiguous_part_is_not_guessed(tmp_path: Path) -> None:
    both = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)})
    ckptcore.save(tmp_path / "c", both)
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(tmp_path / "c", nn.Linear(2, 2))
    assert "moved" not in str(caught.value) and "No requested leaf is stored" in str(caught.value)
    assert "matching=" not in str(caught.value)


@pytest.mark.parametrize(
    "saved", [within("model", Network()), {}, {"other": np.ones(2)}], ids=["renamed", "empty", "x"]
)
def test_a_load_without_a_leaf_is_always_an_error(tmp_path: Path, saved: Any) -> None:
    ckptcore.save(tmp_path / "c", saved)
    target = Network()
    before = {name: held.clone() for name, held in target.state_dict().items()}
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(tmp_path / "c", target, matching=KEEP)
    assert "matching=" not in str(caught.value) and same(before, target.state_dict())
    with pytest.raises(TreeMismatchError, match="not stored"):
        ckptcore.load(tmp_path / "c", {"w": 1}, matching=Matching(missing="placeholder", unexpected="ignore"))


def test_a_module_without_a_stored_leaf_next_to_other_values(tmp_path: Path) -> None:
    """A load that restores the counter but not the module is an error, except with PLACEHOLDER for the module."""
    ckptcore.save(tmp_path / "c", {"model": Network(), "step": 7})
    target: dict[str, Any] = {"model": nn.Linear(2, 2), "step": 0}
    for matching in (Matching(), KEEP):
        with pytest.raises(TreeMismatchError, match="No leaf of model is stored") as caught:
            ckptcore.load_into(tmp_path / "c", target, matching=matching)
        assert "put PLACEHOLDER in its place" in str(caught.value) and "matching=" not in str(caught.value)
    assert target["step"] == 0
    assert ckptcore.load_into(tmp_path / "c", {**target, "model": PLACEHOLDER})["step"] == 7


def test_a_selection_without_a_requested_leaf(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(TreeMismatchError, match="no selected leaf is requested|b is stored and not requested"):
        ckptcore.load_into(
            tmp_path / "c", {"a": np.zeros(2)}, select=select.names("b"), matching=Matching(unexpected="ignore")
        )


def test_loading_less_than_half_of_a_module_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def arrays(value: float, **sizes: int) -> dict[str, Any]:
    return {name: np.full(size, value) for name, size in sizes.items()}


@pytest.mark.parametrize("kind", ["module", "arrays", "at the root", "deeper", "nested names"])
def test_a_renamed_part_next_to_a_value_with_its_stored_name(tmp_path: Path, kind: str) -> None:
    """A load that restores no leaf of a model is an error, even with an option for missing leaves.

    PLACEHOLDER in place of the model permits it.
    """
    ones, zeros = (arrays(value, w=3, b=2) for value in (1, 0))
    module = nn.Linear(2, 2)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "module": ({"net": nn.Linear(2, 2)}, {"model": module}),
        "arrays": ({"net": ones}, {"model": zeros}),
        "at the root": (ones, {"model": zeros}),
        "deeper": ({"state": {"net": ones, "step": 5}}, {"state": {"model": zeros, "step": 0}}),
        "nested names": ({"params": {"params": ones}}, {"params": zeros}),
    }
    stored, requested = cases[kind]
    ckptcore.save(tmp_path / "c", {**stored, "epoch": 3})
    target: dict[str, Any] = {**requested, "epoch": 0}
    report = followed(tmp_path / "c", target, KEEP)
    assert target["epoch"] == 3 and not report.defaulted and not report.ignored
    if kind == "module":
        assert same(module.state_dict(), stored["net"].state_dict())
    else:
        assert all(map(np.array_equal, zeros.values(), ones.values()))
    name = next(iter(requested))
    empty = {"state": {"model": PLACEHOLDER, "step": 0}} if kind == "deeper" else {name: PLACEHOLDER}
    assert ckptcore.load_into(tmp_path / "c", {**empty, "epoch": 0}, matching=KEEP)["epoch"] == 3


def test_a_renamed_part_with_more_names_than_an_error_proposes(tmp_path: Path) -> None:
    values = {f"w{i}": np.full(2, i) for i in range(30)}
    ckptcore.save(tmp_path / "c", {**values, "step": 3})
    target: dict[str, Any] = {"model": {name: np.zeros(2, int) for name in values}, "step": 0}
    with pytest.raises(TreeMismatchError, match="No leaf of model is stored: if only the names differ") as caught:
        ckptcore.load_into(tmp_path / "c", target, matching=KEEP)
    assert "moved" not in str(caught.value) and target["step"] == 0
    rename = Rename("w{number}", "model/w{number}")
    ckptcore.load_into(tmp_path / "c", target, transforms=[rename])
    assert all(map(np.array_equal, target["model"].values(), values.values()))


def test_new_parts_keep_their_values(tmp_path: Path) -> None:
    """No stored leaves fit the new part: they do not exist, belong to another part, or have other names or shapes."""
    plain = arrays(1, w=3, b=2)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"old": nn.Linear(2, 5)}, {"head": nn.Linear(2, 3)}),  # a head with other classes
        ({}, {"ema": Network()}),  # a copy of the loaded module
        ({"note": 1}, {"opt": torch.optim.AdamW(nn.Linear(2, 2).parameters())}),
        ({"old": {"kernel": np.ones(2), "b": np.ones(3)}}, {"head": arrays(0, w=3, b=2)}),
        ({"old": plain, "older": plain}, {"head": arrays(0, w=3, b=2)}),  # ambiguous: two stored parts fit
        ({"old": {"w": np.ones(3)}}, {"head": {"w": np.zeros(3)}}),  # a single leaf is not enough
        (
            {"net": {"body": [plain, plain], "old": plain}},
            {"net": {"body": [arrays(0, w=3, b=2), arrays(0, w=3, b=2)], "head": arrays(0, w=3, b=2)}},
        ),
        (
            {"net": nn.ModuleDict({"a": nn.Linear(2, 2), "old": nn.Linear(2, 2)})},
            {"net": nn.ModuleDict({"a": nn.Linear(2, 2), "head": nn.Linear(2, 2)})},
        ),
    ]
    for number, (stored, new) in enumerate(cases):
        path = tmp_path / str(number)
        model, target = Network(), Network()
        ckptcore.save(path, {**stored, "model": model})
        report = LoadReport()
        ckptcore.load_into(path, {**new, "model": target}, matching=KEEP, report=report)
        assert report.defaulted and same(model.state_dict(), target.state_dict())


def test_a_container_without_a_loaded_leaf_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning appears only if the checkpoint has other leaves in place of the container."""
    ckptcore.save(tmp_path / "c", {"params": {"x": arrays(1, w=3, b=2)}, "step": 3})
    for new, warned in (
        ({"y": {"a": np.ones(2), "b": np.ones(9)}}, ["only 0 of the 2 leaves of params, a dict"]),
        ({}, []),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ckptcore"):
            ckptcore.load_into(tmp_path / "c", {"params": new, "other": {"a": np.ones(2)}, "step": 0}, matching=KEEP)
        assert [record.getMessage().partition("c: ")[2].partition(", are")[0] for record in caplog.records] == warned


def test_a_head_for_another_task(tmp_path: Path) -> None:
    """The error also says how to keep the new head, whether or not it has the size of the old head."""
    ckptcore.save(tmp_path / "c", {"body": nn.Linear(2, 2), "heads": nn.ModuleDict({"old": nn.Linear(2, 2)})})
    new = {"body": nn.Linear(2, 2), "heads": nn.ModuleDict({"new": nn.Linear(2, 2)})}
    with pytest.raises(TreeMismatchError, match="present values of heads instead, put PLACEHOLDER in its place"):
        ckptcore.load_into(tmp_path / "c", new, matching=KEEP)
    ckptcore.load_into(tmp_path / "c", {**new, "heads": PLACEHOLDER})


def test_a_head_of_another_size(tmp_path: Path) -> None:
    saved, model, head = with_head(Network()), Network(), nn.Linear(4, 5, bias=False)
    ckptcore.save(tmp_path / "c", {"model": saved, "size": np.ones(2)})
    model.add_module("head", head)
    before = head.weight.clone()
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(tmp_path / "c", {"model": model, "size": np.zeros(2)})
    code = str(caught.value).partition("select=")[2].partition(")")[0] + ")"
    assert code == "~ckptcore.select.names('model/head.weight')"
    target: dict[str, Any] = {"model": model, "size": np.zeros(2)}
    ckptcore.load_into(tmp_path / "c", target, select=eval(code, {"ckptcore": ckptcore}))
    expected = {**saved.state_dict(), "head.weight": before}
    assert same(model.state_dict(), expected) and target["size"].tolist() == [1, 1]
    with pytest.raises(TreeMismatchError) as caught:  # a single array has nothing else to load
        ckptcore.load_into(tmp_path / "c", {"model": with_head(Network()), "size": np.zeros(3)})
    assert "select=" not in str(caught.value)
