"""Keras with `CkptcoreCheckpoint` on both backends: kills and resumes, loads with Keras itself, and retention."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from plugins.integrations.tests.trainers.trainer_jobs import environment

pytestmark = pytest.mark.system


def start(backend: str, call: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a function of `keras_program` in a new process, because Keras chooses its backend at import."""
    variables = {**environment(), "KERAS_BACKEND": backend}
    program = f"import keras_program as k; from pathlib import Path; d = Path({str(directory)!r}); k.{call}"
    return subprocess.run([sys.executable, "-c", program], env=variables, check=False, capture_output=True, text=True)


def run(backend: str, call: str, directory: Path) -> Any:
    """Run a function, and return the JSON in the last line of its output."""
    ended = start(backend, call, directory)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.brings("model with Adam, dropout and batch normalization, on JAX and PyTorch", "keras", "same")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, backend: str) -> None:
    whole = run(backend, "train(d)", tmp_path / "whole")
    ended = start(backend, "kill_in_third_save(d)", tmp_path / "killed")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = run(backend, "train(d)", tmp_path / "killed")
    assert resumed["began"] == 2  # epochs 0 and 1 had been saved
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["order"] == whole["order"][2:]
    assert resumed["variables"] == whole["variables"]
    assert ckptcore.verify(tmp_path / "killed" / "3").ok


def test_a_killed_job_is_continued_without_locks(tmp_path: Path) -> None:
    """Without locks, as on FUSE, the next job waits until the lease has expired."""
    assert len(run("torch", "train_after_a_killed_job(d)", tmp_path)["losses"]) == 4
    assert ckptcore.verify(tmp_path / "3").ok


@pytest.mark.brings("counters of `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`", "keras", "same")
@pytest.mark.brings("`fit(shuffle=True)` on arrays: the order of the data after an epoch", "keras", "same")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_callbacks_and_shuffled_data_resume_bit_for_bit(tmp_path: Path, backend: str) -> None:
    """The callback is first in the list, but saves the counters and the learning rate that later callbacks change."""
    whole = run(backend, "train_with_callbacks(d)", tmp_path / "whole")
    ended = start(backend, "kill_with_callbacks(d)", tmp_path / "killed")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = run(backend, "train_with_callbacks(d)", tmp_path / "killed")
    assert resumed["began"] == 2 and len(whole["losses"]) < 10  # a callback stops the training early
    assert resumed["losses"] == whole["losses"][2:] and resumed["rates"] == whole["rates"][2:]
    assert len(set(whole["rates"])) > 1
    assert resumed["counters"] == whole["counters"]
    assert resumed["variables"] == whole["variables"]


@pytest.mark.brings("averages of weights by `SwapEMAWeights`, in the model between epochs", "keras", "same")
@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_swapped_averages_resume_bit_for_bit(tmp_path: Path, backend: str) -> None:
    assert run(backend, "train_with_averages(d)", tmp_path)


@pytest.mark.brings("a new training in a directory with steps, without `resume`", "keras", "refused")
@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "torch"])
def test_an_interrupted_training_owns_nothing(tmp_path: Path, backend: str) -> None:
    outcome = run(backend, "interrupted(d)", tmp_path)
    assert "has steps up to 0, and this training would save step 0" in outcome["message"]
    assert outcome["batches"] == 0 and outcome["step"] == 0 and outcome["newest"] == 3


def test_another_training_in_the_directory_is_an_error(tmp_path: Path) -> None:
    message = run("torch", "beside_another(d)", tmp_path)
    assert "another program has saved step 7 since this training began" in message


def test_keras_and_orbax_load_the_checkpoints(tmp_path: Path) -> None:
    assert run("jax", "keras_loads(d)", tmp_path) == {"same": True, "config": 1274}


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_arguments(tmp_path: Path, backend: str) -> None:
    assert run(backend, "arguments(d)", tmp_path) == {
        "latest": ["3"],
        "all": ["0", "1", "2", "3"],
        "best": ["0"],
        "batches": ["3", "6", "9", "12", "15"],
        "policy": ["1", "3"],
        "weights": ["non_trainable_variables", "trainable_variables"],
        "printed": 4,
        "hosts": [False, True],
        "refused": [
            "save_freq='day': expected 'epoch' or a number of batches",
            "preservation_policy chooses what to keep: pass max_to_keep=None with it",
        ],
        "nothing": None,
    }


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_model_that_cannot_be_saved_is_refused_before_the_training(tmp_path: Path, backend: str) -> None:
    assert run(backend, "refused(d)", tmp_path) == {"steps": 0, "paths": [True, True]}


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_programs_of_the_guide_run(tmp_path: Path, backend: str) -> None:
    page = Path(__file__).parents[4] / "docs/how-to/with-keras.md"
    assert run(backend, f"guide(d, Path({str(page)!r}))", tmp_path) == "done"
