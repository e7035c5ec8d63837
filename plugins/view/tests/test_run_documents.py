"""Documents about runs: events, the best step, logs of the Trainer, and folders of runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ckptcore_view.documents.checkpoint import summary_of
from ckptcore_view.shardings import sharding_text
from safetensors.numpy import save_file

import ckptcore
from ckptcore.model import ArrayRecord, ArraySpec
from plugins.view.tests.conftest import Load

Documents = Callable[..., Load]
OWNER = Path(".ckptcore/owner/owner.json")


def save(run: Path, steps: range, value: Any = 1.0, **metrics: float) -> None:
    """Save steps as one job, which owns the run meanwhile."""
    with ckptcore.Checkpointer(run) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": value}, metrics=metrics or {"loss": 1 / step})


def kill(run: Path) -> None:
    """Mark the record of the owner as not released, as a killed process leaves it."""
    record = json.loads((run / OWNER).read_bytes())
    (run / OWNER).write_text(json.dumps({**record, "released": False}))


def trainer_run(run: Path, **state: Any) -> Path:
    """Create a run as the Trainer of Hugging Face saves it."""
    history = [{"step": step, "epoch": step / 10, "loss": 1 / step, "learning_rate": 1e-3} for step in range(1, 21)]
    history += [{"step": 10, "eval_loss": 0.5}, {"step": 20, "eval_loss": 0.7, "eval_runtime": 3.0}]
    for step in (10, 20):
        (run / f"checkpoint-{step}").mkdir(parents=True)
        save_file({"w": np.ones(3)}, run / f"checkpoint-{step}" / "model.safetensors")
    text = json.dumps({"log_history": history, "best_global_step": 10, "best_metric": 0.5, **state})
    (run / "checkpoint-20" / "trainer_state.json").write_text(text)
    return run


def test_restarts_kills_and_frameworks(tmp_path: Path, documents: Documents) -> None:
    save(tmp_path, range(10, 12), torch.ones(3))
    kill(tmp_path)
    save(tmp_path, range(12, 13), jnp.ones(3))
    save(tmp_path, range(13, 14), np.ones(3))
    events = documents(tmp_path)("run")["events"]
    first = {"kind": "restart", "step": 12, "after": 11, "from": "PyTorch", "to": "JAX", "killed": True}
    assert events == [first, {**first, "step": 13, "after": 12, "from": "JAX", "to": None, "killed": False}]


def test_a_run_that_was_killed_and_not_resumed(tmp_path: Path, documents: Documents) -> None:
    save(tmp_path, range(10, 12))
    kill(tmp_path)
    (tmp_path / ".12.0123456789abcdef.ckptcore").mkdir()
    document = documents(tmp_path)("run")
    assert [(event["kind"], event["step"]) for event in document["events"]] == [("death", 11), ("unfinished", 12)]
    assert document["is_running"] is False


def test_a_step_that_was_saved_again(tmp_path: Path, documents: Documents) -> None:
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        for overwrite in (False, True):
            checkpointer.save(1, {"w": 1}, overwrite=overwrite)
    assert documents(tmp_path)("run")["events"] == [{"kind": "again", "step": 1}]


@pytest.mark.parametrize(
    ("metrics", "policy", "best"),
    [
        ({"loss": [3.0, 1.0, 2.0]}, "", ("loss", 2)),
        (
            {"loss": [3.0, 1.0, 2.0], "eval_accuracy": [0.1, 0.3, 0.2]},
            "best_n=1:eval_accuracy:max",
            ("eval_accuracy", 2),
        ),
        ({"loss": [3.0, 1.0, 2.0]}, "latest_n=1,best_n=2:loss:max", ("loss", 1)),
        ({"train_loss": [1.0, 2.0, 3.0], "eval_loss": [3.0, 2.0, 1.0]}, "", ("eval_loss", 3)),
        ({"accuracy": [0.1, 0.9, float("nan")]}, "", ("accuracy", 2)),
        ({"tokens": [1.0, 2.0, 3.0]}, "", None),
        ({"loss": [1.0, 2.0, 3.0]}, "best_n=1:missing:min", None),
    ],
)
def test_the_best_step(
    metrics: Mapping[str, list[float]], policy: str, best: Any, tmp_path: Path, documents: Documents
) -> None:
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": 1}, metrics={name: values[step - 1] for name, values in metrics.items()})
    document = documents(tmp_path)("run", policy=policy)["best"]
    assert (document and (document["metric"], document["step"])) == best


def test_the_log_of_the_trainer(tmp_path: Path, documents: Documents) -> None:
    document = documents(trainer_run(tmp_path / "run"))("run")
    assert sorted(document["log"]) == ["eval_loss", "learning_rate", "loss"]
    assert document["log"]["loss"][-1] == [20, 0.05]
    assert document["steps"][-1]["metrics"] == {"loss": 0.05, "learning_rate": 1e-3, "eval_loss": 0.7}
    assert document["best"] == {"metric": "eval_loss", "mode": "min", "step": 10, "value": 0.5, "by": "the Trainer"}


def test_the_best_step_by_the_log_of_the_trainer(tmp_path: Path, documents: Documents) -> None:
    document = documents(trainer_run(tmp_path / "run", best_metric=None))("run")["best"]
    assert (document["metric"], document["step"], document["by"]) == ("eval_loss", 10, "")


@pytest.mark.parametrize(
    "state",
    [
        {"log_history": None},
        {"log_history": [1, {}, {"step": "x"}, {"step": -1, "loss": 1.0}, {"step": True, "loss": 1.0}]},
        {"log_history": [{"step": 1, "loss": "x"}, {"step": 2, "loss": [1]}], "best_metric": "x"},
        {"log_history": [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf")}]},
    ],
)
def test_malformed_logs_are_ignored(state: Mapping[str, Any], tmp_path: Path, documents: Documents) -> None:
    assert documents(trainer_run(tmp_path / "run", **state))("run")["log"] == {}


def test_long_logs_are_thinned(tmp_path: Path, documents: Documents) -> None:
    rows = [{"step": step, "loss": 1.0, **{f"m{number}": 1.0 for number in range(80)}} for step in range(2)]
    rows += [{"step": step, "loss": float(step)} for step in range(50_000)]
    log = documents(trainer_run(tmp_path / "run", log_history=rows))("run")["log"]
    assert (len(log), len(log["loss"])) == (64, 16_667)


def test_a_folder_of_runs(tmp_path: Path, documents: Documents) -> None:
    save(tmp_path / "a", range(1, 3))
    trainer_run(tmp_path / "b")
    ckptcore.save(tmp_path / "c", {"w": 1})
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    load = documents(tmp_path)
    assert load("view")["kind"] == "runs"
    assert load("view")["children"] == {"a": "run", "b": "run", "c": "checkpoint"}
    a, b, c = load("runs", policy="latest_n=1")["runs"]
    assert ([step["kept"] for step in a["steps"]], b["best"]["step"], c["kind"]) == ([False, True], 10, "checkpoint")
    save(tmp_path / "new", range(1, 2))
    assert [run["name"] for run in load("runs")["runs"]] == ["a", "b", "c", "new"]
    assert load("run", at="a")["steps"] == load("run", at="a", policy="")["steps"]
    assert load("checkpoint", at="a/2")["metrics"] == {"loss": 0.5}


def test_parameters_and_optimizer_states_are_counted_separately(tmp_path: Path) -> None:
    w = np.ones((4, 3), np.float32)
    value = {
        "params": {"w": w.copy(), "ids": np.ones(2, np.int64)},
        "opt_state": {"mu": {"w": w.copy()}},
        "dotted": {"optimizer.state.w": w.copy(), "exp_avg": w.copy(), "optimal": w.copy()},
    }
    ckptcore.save(tmp_path / "c", value)
    summary = summary_of("", ckptcore.metadata(tmp_path / "c").tree)
    assert summary["roles"] == {"parameters": [2, 24, 96], "other": [1, 2, 16], "optimizer": [3, 36, 144]}
    assert summary["dtypes"] == {"float32": [5, 60, 240], "int64": [1, 2, 16]}
    assert [array["nbytes"] for array in summary["largest"]] == [48, 48, 48, 48, 48, 16]


def test_optimizer_states_are_counted_in_their_own_checkpointable(tmp_path: Path, documents: Documents) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": {"w": np.ones(3)}, "optimizer": {"step": np.ones(2)}})
    load = documents(tmp_path / "c")
    roles = [load("checkpoint", at=place)["summary"]["roles"] for place in ("", "model", "optimizer")]
    model, optimizer = {"parameters": [1, 3, 24]}, {"optimizer": [1, 2, 16]}
    assert roles == [{**model, **optimizer}, model, optimizer]


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ({}, None),
        ({"sharding": {"type": "SingleDeviceSharding", "device": "cpu:0"}}, "not sharded, on the device cpu:0"),
        (
            {"sharding": {"type": "NamedSharding", "mesh": {"x": 2, "y": 4}, "spec": [["x", "y"], None]}},
            "mesh x=2 × y=4; axes: x and y, not divided",
        ),
        ({"dtensor": {"mesh": [2, 2], "placements": [{"kind": "Shard", "dim": 0}, {"kind": "Replicate"}]}},
         "mesh 2 × 2; Shard(0), Replicate"),
        ({"sharding": {"type": "NamedSharding", "mesh": 3, "spec": None}}, None),
        ({"dtensor": {"mesh": None}}, None),
    ],
)  # fmt: skip
def test_shardings_in_words(notes: Any, text: str | None) -> None:
    assert sharding_text(ArrayRecord(ArraySpec((4, 4), "float32"), notes=notes)) == text
