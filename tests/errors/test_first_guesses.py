"""Arguments and steps that users of other libraries try first. Each test follows the remedy in the error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptcore
from ckptcore import Matching, select
from ckptcore.errors import CheckpointNotFoundError


def hint(call: Callable[..., object], name: str) -> str:
    """Return the remedy for an unknown argument."""
    with pytest.raises(TypeError) as caught:
        call(**{name: 1})
    assert f"unexpected keyword argument {name!r}; use " in str(caught.value), name
    return str(caught.value).partition("; use ")[2]


@pytest.fixture
def model(tmp_path: Path) -> nn.Linear:
    model = nn.Linear(2, 2)
    ckptcore.save(tmp_path / "c", {"model": model, "step": 3})
    return model


FUNCTIONS = ("load", "load_async", "load_into", "load_checkpointables", "save", "save_async", "save_checkpointables")
METHODS = ("__init__", "load", "load_into", "load_checkpointables", "save", "save_blocking", "save_checkpointables")


@pytest.mark.parametrize(
    "name",
    ["map_location", "device", "dtype", "keys", "keep_last_n", "export", "weights_only", "strict", "max_to_keep"],
)
def test_every_function_has_a_hint(name: str) -> None:
    for function in FUNCTIONS:
        assert hint(getattr(ckptcore, function), name)
    for method in METHODS:
        assert hint(getattr(ckptcore.Checkpointer, method), name)
    assert hint(ckptcore.CheckpointReader, name)


def test_arguments_for_devices_and_dtypes(tmp_path: Path, model: nn.Linear) -> None:
    for name in ("map_location", "device", "dtype", "torch_dtype"):
        text = hint(ckptcore.load, name)
        assert all(
            part in text for part in ("abstract", "model.state_dict()", "framework='torch'", "load_into(path, m")
        )
    on_meta = {"model": nn.Linear(2, 2).half().to("meta").state_dict(), "step": 0}
    loaded = ckptcore.load(tmp_path / "c", on_meta, matching=Matching(cast="narrowing"))
    assert loaded["model"]["weight"].dtype == torch.float16
    loaded = ckptcore.load(tmp_path / "c", framework="torch")
    nn.Linear(2, 2).load_state_dict(loaded["model"])
    assert "filled where they are" in hint(ckptcore.load_into, "map_location")
    assert "Matching(cast=" in hint(ckptcore.load_into, "dtype")
    half = nn.Linear(2, 2).half()
    ckptcore.load_into(tmp_path / "c", {"model": half, "step": 0}, matching=Matching(cast="narrowing"))
    assert torch.equal(half.weight, model.weight.half())


def test_arguments_for_parts_and_steps(tmp_path: Path, model: nn.Linear) -> None:
    assert "select.names(name)" in hint(ckptcore.load, "keys")
    assert ckptcore.load(tmp_path / "c", select=select.names("step")) == {"step": 3}
    assert "CheckpointReader(directory).load(step)" in hint(ckptcore.load, "step")
    assert "load_into(path, target)" in hint(ckptcore.load, "target")
    assert hint(ckptcore.load_into, "state_dict") == "the second argument: the target"
    assert hint(ckptcore.Checkpointer.load_into, "state_dict") == "the first argument: the target"
    assert "FixedInterval" in hint(ckptcore.Checkpointer, "every")


def test_arguments_for_exports(tmp_path: Path, model: nn.Linear) -> None:
    of_save, of_runs = hint(ckptcore.save, "export").split("; for a Checkpointer ")
    names = {"ckptcore": ckptcore, "other": tmp_path / "e", "name": "model"}
    ckptcore.save(tmp_path / "d", {"model": model}, strategy=eval(of_save.removeprefix("strategy="), names))
    assert ckptcore.load(tmp_path / "e", framework="torch").keys() == {"weight", "bias"}
    names["other"] = tmp_path / "f"
    strategy = eval(of_runs.removeprefix("strategy="), names)
    with ckptcore.Checkpointer(tmp_path / "run", strategy=strategy) as checkpointer:
        checkpointer.save_blocking(1, {"model": model})
    assert ckptcore.load(tmp_path / "f" / "1", framework="torch").keys() == {"weight", "bias"}


def test_a_hint_is_logged_if_tensors_load_as_numpy_arrays(
    tmp_path: Path, model: nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    """`load_state_dict` refuses NumPy arrays. A hint is logged once, unless the caller requests NumPy arrays."""
    context = ckptcore.Context()
    ckptcore.load(tmp_path / "c", framework="numpy", context=context)
    ckptcore.load(tmp_path / "c", framework="torch", context=context)
    assert not caplog.records
    for _ in range(2):
        loaded = ckptcore.load(tmp_path / "c", context=context)
    with pytest.raises(RuntimeError, match=r"numpy\.ndarray"):
        model.load_state_dict(loaded["model"])
    (record,) = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert "framework='torch'" in record.getMessage() and "load_into(path, model)" in record.getMessage()
    ckptcore.save(tmp_path / "n", {"w": np.ones(2)})
    ckptcore.load(tmp_path / "n", context=ckptcore.Context())
    assert len(caplog.records) == 1


def test_an_optimizer_takes_tensors(tmp_path: Path, model: nn.Linear) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckptcore.save(tmp_path / "o", {"opt": optimizer})
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(ckptcore.load(tmp_path / "o", framework="torch")["opt"])
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


def test_the_best_and_the_latest_step(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as run:
        for step, loss in ((1, 0.5), (2, 0.25), (3, float("nan")), (4, 0.75), (5, 0.25)):
            run.save_blocking(step, {"step": step}, metrics={"loss": loss} if step != 4 else {"accuracy": loss})
        calls: list[Any] = [run.load, run.step_info, run.metadata, run.delete]
        for call in (*calls, lambda step: run.load_into({}, step=step)):
            with pytest.raises(TypeError, match=r"pass the step that best\(metric, mode\) returns"):
                call("best")
            with pytest.raises(TypeError, match=r"leave it out to load the newest valid step"):
                call("latest")
        assert run.load(step=run.best("loss", "min")) == {"step": 5}  # the later of two equal steps
        assert run.best("loss", "max") == 1 and run.best("accuracy", "max") == 4
        assert run.load() == run.load(run.latest) == {"step": 5}
        with pytest.raises(CheckpointNotFoundError, match="'los'; metrics of its steps: 'accuracy', 'loss'"):
            run.best("los", "min")
        with pytest.raises(ValueError, match="give 'min'"):
            run.best("loss", "lowest")  # type: ignore[arg-type]  # a guess
    (tmp_path / "run" / "5" / "checkpoint.json").write_text("{")
    assert ckptcore.CheckpointReader(tmp_path / "run").best("loss", "min") == 2
    with pytest.raises(CheckpointNotFoundError, match="metrics of its steps: none"):
        ckptcore.CheckpointReader(tmp_path / "empty").best("loss", "min")
