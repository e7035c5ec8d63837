"""Exports for other software exclude the optimizer of a training state, unless it is requested."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ckptcore_tools.subtrees import find_optimizers
from ckptcore_transforms import Drop
from safetensors.numpy import load_file

import ckptcore
from ckptcore import AbstractArray, Export, StepExport, StepExports, WithExports
from ckptcore.errors import TreeMismatchError
from plugins.tools.tests.cli.conftest import Run

FAST = ckptcore.Context(durability="none")
W = np.ones((2, 2), np.float32)


class AdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def trained() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "adam": optimizer, "step": 3}


@pytest.mark.parametrize(
    ("state", "optimizers", "others"),
    [
        ({"model": {"w": W}, "optimizer": {"m": W}, "ema": {"w": W}, "step": W}, ["optimizer"], ["model", "ema"]),
        ({"params": {"w": W}, "opt_state": (AdamState(W, {"w": W}, {"w": W}),)}, ["opt_state"], ["params"]),
        ({"run": {"net": {"w": W}, "a": {"state": {"0": W}, "param_groups": [{"lr": 1}]}}}, ["run/a"], ["run/net"]),
        ({"state": {"0": {"m": W}}, "param_groups": [{"lr": 1}]}, [""], []),
        ({"model.w": W, "optim.state.w.m": W, "optim.state.b.m": W}, ["optim"], []),
        ({"model": {"optimizer_gate": W}, "optimizer": {"lr": 0.1}, "state": {"w": W}}, None, None),
        ({"a": {"b": {"c": {"d": {"optimizer": {"m": W}}}}}}, None, None),
        ({"w": W, "adapter": {"w": W}}, None, None),
        ({"w": W, "adam": (AdamState(W, {"w": W}, {"w": W}),)}, ["adam/0"], []),
        ({"model": {"opt": {"weight": W}, "sar": {"weight": W}}}, None, None),
        ({"opt.weight": W, "sar.weight": W}, None, None),
        ({"opt": {"exp_avg": W}, "head": {"w": W}}, ["opt"], ["head"]),
    ],
)
def test_subtrees_of_optimizers_are_recognized(tmp_path: Path, state: Any, optimizers: Any, others: Any) -> None:
    ckptcore.save(tmp_path / "c", state, context=FAST)
    subtrees = find_optimizers(ckptcore.metadata(tmp_path / "c").tree)
    assert (
        (None, None) == (optimizers, others)
        if subtrees is None
        else (subtrees.optimizers, subtrees.others)
        == (
            optimizers,
            others,
        )
    )


def test_the_command_names_the_subtrees_and_the_command(run: Run, tmp_path: Path) -> None:
    state = trained()
    ckptcore.save(tmp_path / "a run", state, context=FAST)
    result = run("consolidate", tmp_path / "a run", tmp_path / "hf")
    assert result.exit_code == 6 and not (tmp_path / "hf").exists()
    assert "the state of an optimizer in 'adam'" in result.stderr
    weights, everything = map(shlex.split, re.findall("`(ckptcore consolidate .*?)`", result.stderr))
    assert run(*weights[1:]).exit_code == 0
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"weight", "bias"}
    assert run(*everything[1:], "--overwrite").exit_code == 0
    names = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert {"model.weight", "adam.state.0.exp_avg"} <= names


def test_a_state_without_an_optimizer_needs_no_subtree(run: Run, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": W, "epoch": 1}, context=FAST)
    assert run("consolidate", tmp_path / "c", tmp_path / "hf").exit_code == 0


def test_names_with_dots_are_dropped_by_a_transform(run: Run, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"model.w": W, "optim.w.m": W}, layout="dcp", context=FAST)
    result = run("consolidate", tmp_path / "c", tmp_path / "hf")
    assert result.exit_code == 6 and "transforms=[Drop('optim.**')]" in result.stderr
    ckptcore.copy(tmp_path / "c", tmp_path / "hf", layout="safetensors", transforms=[Drop("optim.**")], context=FAST)
    assert ckptcore.load(tmp_path / "hf").keys() == {"model.w"}


def test_a_conversion_keeps_the_optimizer_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ckptcore can load the result. But other software would read the optimizer as weights."""
    ckptcore.save(tmp_path / "c", trained(), context=FAST)
    with caplog.at_level(logging.WARNING, "ckptcore"):
        ckptcore.copy(tmp_path / "c", tmp_path / "d", layout="safetensors", context=FAST)
        assert "an optimizer in 'adam', and so has the copy" in caplog.text and "subtree='model'" in caplog.text
        caplog.clear()
        ckptcore.copy(tmp_path / "c", tmp_path / "e", layout="safetensors", transforms=[Drop("adam/**")], context=FAST)
        ckptcore.copy(tmp_path / "c", tmp_path / "f", layout="zarr3", context=FAST)
        ckptcore.copy(tmp_path / "c", tmp_path / "g", subtree="model", context=FAST)
    assert not caplog.records


def test_exports_name_the_part_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TreeMismatchError, match=r"exports\[0\]: there is .* in 'adam'.*subtree='model'") as caught:
        ckptcore.save(tmp_path / "c", trained(), strategy=WithExports([Export(location=tmp_path / "e")]), context=FAST)
    assert "subtree=() for everything" in str(caught.value) and list(tmp_path.iterdir()) == []
    for number, subtree in enumerate(("model", ())):
        export = Export(location=tmp_path / f"e{number}", subtree=subtree)
        ckptcore.save(tmp_path / f"c{number}", trained(), strategy=WithExports([export]), context=FAST)
        assert ("adam" in ckptcore.load(tmp_path / f"e{number}", framework="torch")) == (subtree == ())
    export = Export(location=tmp_path / "z", layout="zarr3")
    ckptcore.save(tmp_path / "d", trained(), strategy=WithExports([export]), context=FAST)
    ckptcore.save(tmp_path / "p", {"a": W}, strategy=WithExports([Export(location=tmp_path / "q")]), context=FAST)


def test_exports_of_steps_name_the_part(tmp_path: Path) -> None:
    exports = StepExports([StepExport(directory=tmp_path / "weights")])
    with ckptcore.Checkpointer(tmp_path / "run", strategy=exports, context=FAST) as checkpointer:
        with pytest.raises(TreeMismatchError, match=r"exports\[0\].*subtree='model'"):
            checkpointer.save_blocking(1, trained())
        assert checkpointer.steps == ()
    exports = StepExports([StepExport(directory=tmp_path / "weights", subtree="model")])
    with ckptcore.Checkpointer(tmp_path / "run", strategy=exports, context=FAST) as checkpointer:
        checkpointer.save_blocking(1, trained())
    shapes = {"weight": AbstractArray((2, 2), "float32"), "bias": AbstractArray((2,), "float32")}
    assert ckptcore.load(tmp_path / "weights" / "1", shapes).keys() == shapes.keys()


def test_the_suggested_pattern_keeps_names_with_the_same_prefix(tmp_path: Path) -> None:
    """A pattern `opt**` would drop the weights of an optic nerve."""
    names = ("opt.exp_avg", "optic_nerve.weight", "options_embed.weight", "head.weight")
    flat = {name: W.copy() for name in names}
    nested = {"opt": {"exp_avg": W.copy()}, "optics": {"weight": W.copy()}}
    for number, (state, kept) in enumerate([(flat, list(flat)[1:]), (nested, ["optics.weight"])]):
        source = tmp_path / f"c{number}"
        ckptcore.save(source, state, context=FAST)
        subtrees = find_optimizers(ckptcore.metadata(source).tree)
        assert subtrees is not None
        drops = [Drop(pattern) for pattern in subtrees.drops]
        ckptcore.copy(source, tmp_path / f"w{number}", layout="safetensors", transforms=drops)
        assert sorted(load_file(tmp_path / f"w{number}" / "model.safetensors")) == sorted(kept)
