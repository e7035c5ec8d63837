"""The demo of a run on Ray that loses a worker: all claims hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("steps", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_every_claim_holds(steps: int) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "examples.with_ray", "--steps", str(steps)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "✗" not in finished.stdout
    assert finished.stdout.count("✓") == 5
    assert "claims hold" in finished.stdout.splitlines()[-1]
