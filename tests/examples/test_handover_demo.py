"""The demo of a run that PyTorch starts and JAX continues: all claims hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("grain", "jax", "optax", "sklearn", "torch"):
    pytest.importorskip(module)

import ckptcore
from examples.handover.digits import SAVE_EVERY
from examples.handover.killing import hidden_directories, train_and_kill

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_claim_holds(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.handover"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "✗" not in finished.stdout
    assert finished.stdout.count("✓") == 9
    assert "<title>ckptcore</title>" in (tmp_path / "report.html").read_text()
    assert "claims hold" in finished.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_trainer_can_be_killed_during_a_save(tmp_path: Path) -> None:
    killed = train_and_kill(tmp_path / "run", after=SAVE_EVERY)
    assert killed.step > SAVE_EVERY
    assert hidden_directories(tmp_path / "run") == [killed.leftover]
    assert ckptcore.CheckpointReader(tmp_path / "run").latest == killed.step - SAVE_EVERY
    assert len(killed.losses) >= killed.step
