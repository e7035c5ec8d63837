"""Jobs that are killed at random moments lose no checkpoint: our own saves, and the replacements for DCP and Orbax."""

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


def run(job: str, directory: Path, kills: int) -> subprocess.CompletedProcess[str]:
    """Run the program that kills a job a number of times."""
    command = [sys.executable, str(HERE / "random_kills.py"), job, str(directory), str(SEED), str(kills)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("job", "kills"),
    [
        ("DcpSave", 2),
        ("OrbaxCheckpointer", 2),
        *[
            pytest.param(job, kills, marks=pytest.mark.slow)
            for job, kills in {
                "CoreSave": 60,
                "CoreCheckpointer": 60,
                "DcpSave": 60,
                "DcpSaveOfFour": 40,
                "DcpAsyncSave": 50,
                "DcpProcess": 30,
                "OrbaxSave": 40,
                "OrbaxSaveAsync": 40,
                "OrbaxCheckpointer": 50,
            }.items()
        ],
    ],
)
def test_no_checkpoint_is_lost(tmp_path: Path, job: str, kills: int) -> None:
    done = run(f"killed_jobs:{job}", tmp_path, kills)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    print(done.stdout)
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == kills


def test_a_save_that_first_deletes_the_old_checkpoint_is_detected(tmp_path: Path) -> None:
    done = run("killed_jobs:Careless", tmp_path, 100)
    assert done.returncode == 1
    assert f"seed {SEED}" in done.stderr
    assert "LostError" in done.stderr
