"""TorchTitan with `CkptcoreManager`: kills and resumes, both managers on one run, and exports for Hugging Face."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ckptcore_integrations.torchtitan import _called_in
from ckptcore_testing.servers import free_port
from safetensors.torch import load_file

import ckptcore
from plugins.integrations.tests.trainers.trainer_jobs import environment

pytestmark = pytest.mark.system


def train(call: str, size: int = 1, *, function: str = "run") -> list[int]:
    """Call `run`, or another function of the program, in a job. Return the exit statuses of the ranks."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = {**environment(), "WORLD_SIZE": str(size), **address}
    program = f"from pathlib import Path; import titan_program as t; t.{function}({call})"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(size)
    ]
    return [rank.wait(240) for rank in ranks]


def read_report(report: Path) -> Any:
    return json.loads(report.with_suffix(".0").read_text())


def assert_continued(whole: Any, rest: Any) -> None:
    """Compare losses, data, weights, moments and the schedule, bit for bit."""
    assert [row[0] for row in rest["seen"]] == list(range(5, 13))
    assert rest["seen"] == whole["seen"][4:]
    assert rest["full"] == whole["full"]
    assert rest["rate"] == whole["rate"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run with TorchTitan's own manager."""
    folder = tmp_path_factory.mktemp("plain")
    assert train(f"Path({str(folder)!r}), Path({str(folder / 'report')!r}), 'CheckpointManager'") == [0]
    return read_report(folder / "report"), folder


@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_a_killed_run_resumes_bit_for_bit(uninterrupted: Any, tmp_path: Path, mode: str) -> None:
    arguments = f"Path({str(tmp_path)!r}), Path({str(tmp_path / 'report')!r})"
    assert train(f"{arguments}, 'Killed', async_mode={mode!r}") == [-signal.SIGKILL]
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-4"]
    assert train(f"{arguments}, async_mode={mode!r}") == [0]
    assert_continued(uninterrupted[0], read_report(tmp_path / "report"))
    assert ckptcore.verify(tmp_path / "checkpoint" / "step-12").ok


@pytest.mark.brings("parameters without a gradient, never or not yet", "torchtitan", "same")
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_without_a_gradient_resume(tmp_path: Path, size: int) -> None:
    """If a parameter has its first gradient after the resume, the optimizer treats this as its first step."""

    def run(directory: Path, options: str) -> Any:
        arguments = f"Path({str(directory)!r}), Path({str(directory / 'report')!r}), models='WithUnused'"
        assert train(f"{arguments}, {options}", size) == [0] * size
        return read_report(directory / "report")

    whole = run(tmp_path / "whole", "steps=12")
    run(tmp_path / "resumed", "steps=4")
    rest = run(tmp_path / "resumed", "steps=12")
    assert not [name for name in whole["full"] if name.startswith("state.unused.")]
    assert "state.late.weight.exp_avg" in whole["full"]
    assert_continued(whole, rest)


@pytest.mark.parametrize("first", ["CheckpointManager", "CkptcoreManager"])
def test_each_manager_continues_a_run_of_the_other(uninterrupted: Any, tmp_path: Path, first: str) -> None:
    second = "CkptcoreManager" if first == "CheckpointManager" else "CheckpointManager"
    arguments = f"Path({str(tmp_path)!r}), Path({str(tmp_path / 'report')!r})"
    assert train(f"{arguments}, {first!r}, steps=4") == [0]
    assert train(f"{arguments}, {second!r}") == [0]
    assert_continued(uninterrupted[0], read_report(tmp_path / "report"))


def test_the_last_step_of_two_ranks_is_exported(tmp_path: Path) -> None:
    arguments = f"Path({str(tmp_path)!r}), Path({str(tmp_path / 'report')!r})"
    options = "keep_latest_k=2, last_save_model_only=True, last_save_in_hf=True"
    assert train(f"{arguments}, {options}, enable_first_step_checkpoint=True", 2) == [0, 0]
    steps = tmp_path / "checkpoint"
    assert sorted(path.name for path in steps.glob("s*")) == ["step-12", "step-4", "step-8"]
    exported = load_file(steps / "step-12" / "model.safetensors")
    weights = read_report(tmp_path / "report")["full"]
    assert set(exported) == {f"model.{name}" for name in weights if not name.startswith(("state.", "param_groups."))}
    for name, tensor in exported.items():
        assert tensor.tolist() == weights[name.removeprefix("model.")]


def test_shards_of_a_killed_export_on_an_object_store_are_replaced(tmp_path: Path) -> None:
    assert train(f"Path({str(tmp_path / 'report')!r})", function="run_exports") == [0]
    assert json.loads((tmp_path / "report").read_text()) == [2, 2]


def test_a_state_that_cannot_be_saved_is_refused_before_the_training(tmp_path: Path) -> None:
    arguments = f"Path({str(tmp_path)!r}), Path({str(tmp_path / 'report')!r})"
    assert train(arguments, function="run_refused") == [0]
    report = json.loads((tmp_path / "report").read_text())
    assert report["steps"] == 0
    assert "\n  others/lock" in report["message"]
    assert "\n  others/deep[0]" in report["message"]


def test_a_killed_job_is_continued_without_locks(tmp_path: Path) -> None:
    """Without locks, as on FUSE, the next job waits until the lease has expired."""
    arguments = f"Path({str(tmp_path)!r}), Path({str(tmp_path / 'report')!r})"
    assert train(arguments, function="run_after_a_killed_job") == [0]
    assert ckptcore.verify(tmp_path / "checkpoint/step-4").ok


def test_remedies(tmp_path: Path) -> None:
    arguments = f"Path({str(tmp_path)!r}), Path({str(tmp_path / 'report')!r})"
    assert train(arguments, function="run_remedies") == [0]
    report = json.loads((tmp_path / "report").read_text())
    adapter, step, names = report["messages"]
    assert adapter.endswith("Set last_save_in_hf=False")
    assert step.endswith("has no such step. Expected one of 4")
    assert names.startswith("checkpoint.exclude_from_loading has 'optimiser': expected names of ")
    assert len(report["loaded"]) == 5
    assert all(report["loaded"])
    assert report["same"]


def test_pickles_that_call_functions_are_detected() -> None:
    assert _called_in(pickle.dumps({"position": [1, 2.5, "a", None, b"x"]})) is None
    for protocol in range(6):
        assert _called_in(pickle.dumps({"called": os.getpid}, protocol)) is not None
