"""`select` with objects: they keep leaves that are not selected. An object without selected leaves is untouched."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptcore
from ckptcore import PLACEHOLDER, LoadAs, select
from ckptcore.errors import TreeMismatchError
from ckptcore.loading import selections
from ckptcore.results import LoadReport
from ckptcore.tree.flattening import Flat


def trained(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Return an optimizer after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def network(value: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))
    with torch.no_grad():
        for held in model.state_dict().values():
            held.fill_(value)
    return model


def values(module: nn.Module) -> dict[str, float]:
    return {name: held.flatten()[0].item() for name, held in module.state_dict().items()}


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt"])
def test_a_selected_part_of_a_module_is_restored(tmp_path: Path, layout: str) -> None:
    ckptcore.save(tmp_path / "c", {"model": network(1.0).state_dict(), "step": np.array(3)}, layout=layout)
    model, report = network(2.0), LoadReport()
    state = {"model": model, "step": np.array(0)}
    ckptcore.load_into(tmp_path / "c", state, select=select.glob("model/0.*"), report=report)
    assert values(model) == {name: 1.0 if name.startswith("0.") else 2.0 for name in model.state_dict()}
    assert state["step"] == 0 and len(report.restored) == 2
    meta = network(2.0)
    meta[2].to("meta")
    ckptcore.load_into(tmp_path / "c", {"model": meta, "step": 0}, select=select.glob("model/0.*", "model/1.*"))
    assert meta[2].weight.is_meta and meta.state_dict()["0.weight"][0, 0] == 1.0


def test_one_selected_object_of_several_is_restored(tmp_path: Path) -> None:
    """The others are neither restored nor compared, so they may be of any kind."""
    model = network(1.0)
    ckptcore.save(tmp_path / "c", {"model": model, "opt": trained(model), "rng": np.random.default_rng(1)})
    new, rng = network(2.0), np.random.default_rng(2)
    before = copy.deepcopy(rng.bit_generator.state)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    target = {"model": new, "opt": other, "rng": rng}
    ckptcore.load_into(tmp_path / "c", target, select=select.names("model"))
    assert values(new) == values(model)
    assert rng.bit_generator.state == before and other.param_groups[0]["lr"] == 0.5
    loaded = ckptcore.load(tmp_path / "c", target, select=select.names("model"))
    assert loaded["opt"] is PLACEHOLDER and loaded["model"].keys() == new.state_dict().keys()


def test_a_selected_part_of_an_optimizer_is_restored(tmp_path: Path) -> None:
    """Select the moments without the options, and the reverse. A new optimizer has no moments to keep."""
    model = network(1.0)
    optimizer = trained(model, lr=0.25)
    ckptcore.save(tmp_path / "c", {"opt": optimizer})
    other = trained(network(3.0), lr=0.75)
    moments = [slots["exp_avg"].clone() for slots in other.state.values()]
    ckptcore.load_into(tmp_path / "c", {"opt": other}, select=select.glob("opt/param_groups/**"))
    assert other.param_groups[0]["lr"] == 0.25
    assert all(map(torch.equal, moments, [slots["exp_avg"] for slots in other.state.values()]))
    other.param_groups[0]["lr"] = 0.75
    ckptcore.load_into(tmp_path / "c", {"opt": other}, select=~select.glob("opt/param_groups/**"))
    assert other.param_groups[0]["lr"] == 0.75
    saved = [slots["exp_avg"] for slots in optimizer.state.values()]
    assert all(map(torch.equal, saved, [slots["exp_avg"] for slots in other.state.values()]))
    other.step()
    new = torch.optim.AdamW(network(2.0).parameters(), lr=0.75)
    with pytest.raises(TreeMismatchError, match="has no value there to keep. Select all of opt or nothing of it"):
        ckptcore.load_into(tmp_path / "c", {"opt": new}, select=select.glob("opt/param_groups/**"))
    assert new.param_groups[0]["lr"] == 0.75 and not new.state
    ckptcore.load_into(tmp_path / "c", {"opt": new}, select=select.names("opt"))
    assert new.param_groups[0]["lr"] == 0.25


def test_objects_without_selected_leaves_are_not_called(tmp_path: Path) -> None:
    """`load_state_dict` of an object, as of a scheduler, is not called if none of its leaves is selected."""

    class Counter:
        def __init__(self, count: int) -> None:
            self.state = {"count": count, "history": [count, [count]]}
            self.calls = 0

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls += 1
            self.state = dict(state)

    ckptcore.save_checkpointables(tmp_path / "c", {"state": {"a": Counter(1), "b": Counter(1)}})
    for names, expected in (
        (["a"], [{"count": 1, "history": [1, [1]]}, {"count": 2, "history": [2, [2]]}]),
        (["a/count"], [{"count": 1, "history": [2, [2]]}, {"count": 2, "history": [2, [2]]}]),
        (["b/history/1"], [{"count": 2, "history": [2, [2]]}, {"count": 2, "history": [2, [1]]}]),
    ):
        state = {"a": Counter(2), "b": Counter(2)}
        ckptcore.load_checkpointables(tmp_path / "c", into={"state": LoadAs(state, select=select.names(*names))})
        assert [counter.state for counter in state.values()] == expected
        assert [counter.calls for counter in state.values()] == [int(names[0][0] == name) for name in "ab"]


def test_steps_of_a_run(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_blocking(1, {"model": network(1.0), "step": 1})
        model = network(2.0)
        checkpointer.load_into({"model": model, "step": 0}, select=select.glob("model/2.*"))
    assert values(model) == {name: 1.0 if name.startswith("2.") else 2.0 for name in model.state_dict()}


def test_a_selected_part_of_a_flax_module_is_restored(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")

    def module(value: float) -> Any:
        return nnx.Dict(a=nnx.Param(np.full(2, value)), b=nnx.Dict(w=nnx.Param(np.full(2, value))))

    ckptcore.save(tmp_path / "c", {"model": module(1.0)})
    model = module(2.0)
    ckptcore.load_into(tmp_path / "c", {"model": model}, select=select.names("model/a"))
    assert (model.a[...] == 1.0).all() and (model.b.w[...] == 2.0).all()


def test_the_setter_of_a_state_tree_gets_the_whole_tree(tmp_path: Path) -> None:
    """Leaves that are not selected keep their current values in the tree, as for models of Keras."""

    class Model:
        def __init__(self, value: float) -> None:
            self.tree = {"variables": {"kernel": np.full(2, value), "bias": np.full(2, value)}}

        def get_state_tree(self) -> dict[str, Any]:
            return self.tree

        def set_state_tree(self, tree: dict[str, Any]) -> None:
            self.tree = tree

    ckptcore.save(tmp_path / "c", {"model": Model(1.0)})
    model = Model(2.0)
    ckptcore.load_into(tmp_path / "c", {"model": model}, select=select.glob("**/kernel"))
    assert {name: held[0] for name, held in model.tree["variables"].items()} == {"kernel": 1.0, "bias": 2.0}


def test_paths_are_listed_once_for_all_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the paths for each object would take time quadratic in the number of objects."""
    calls, paths, keeping_objects = 0, Flat.paths, selections.keeping_objects

    def counted(flat: Flat) -> Any:
        nonlocal calls
        calls += 1
        return paths(flat)

    def observed(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Flat, "paths", counted)
            return keeping_objects(*args)

    monkeypatch.setattr(selections, "keeping_objects", observed)
    modules = {name: nn.Linear(1, 1) for name in "abcde"}
    ckptcore.save(tmp_path / "c", modules)
    ckptcore.load_into(tmp_path / "c", modules, select=select.glob("*/weight"))
    assert calls == 1
