"""The demo of a trainer in PyTorch and a server in JAX that follows its weights: all claims hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("ckptcore_versions", "jax", "torch"):
    pytest.importorskip(module)

from examples.serving.network import VERSIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_logits_of_the_server_are_those_of_the_trainer_at_each_version(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "examples.serving"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "✗" not in finished.stdout
    assert finished.stdout.count("✓") == VERSIONS + 2
