"""Trainers that are killed at random moments lose no checkpoint: Keras, TorchTitan, Accelerate and Ray Train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
SEED = 36


def run(command: list[str], kills: int) -> None:
    """Run a program that kills trainers, and check that no checkpoint was lost."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *sys.path]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    done = subprocess.run(
        [sys.executable, *command, str(SEED), str(kills)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    print(done.stdout)
    assert json.loads(done.stdout.splitlines()[-1])["kills"] >= kills


@pytest.mark.parametrize(
    ("job", "kills"),
    [
        ("Titan", 4),
        ("KerasOnTorch", 4),
        pytest.param("Titan", 40, marks=pytest.mark.slow),
        pytest.param("KerasOnTorch", 40, marks=pytest.mark.slow),
        pytest.param("KerasOnJax", 25, marks=pytest.mark.slow),
        pytest.param("Accelerate", 30, marks=pytest.mark.slow),
    ],
)
def test_no_checkpoint_is_lost(tmp_path: Path, job: str, kills: int) -> None:
    pytest.importorskip("torchtitan" if job == "Titan" else "torch")
    run([str(HERE.parent / "random_kills.py"), f"killed_trainers:{job}", str(tmp_path)], kills)


@pytest.mark.slow
def test_workers_and_drivers_of_ray_lose_no_checkpoint(tmp_path: Path) -> None:
    run([str(HERE / "killed_ray.py"), str(tmp_path)], 20)
