"""The replacement for torch.distributed.checkpoint in jobs of several processes, and killed in the middle of a save."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from tests.jobs.torch_scripts import run_script, run_torchrun

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
PROGRAM = HERE / "torch_dcp_job.py"


def run(size: int, task: str, directory: Path, start: Callable[..., Any] = run_script) -> None:
    """Run a task that must succeed on every rank."""
    done = start(size, PROGRAM, task, directory)
    assert done.returncode == 0, done.stderr[-6000:]
    assert len(list(directory.glob(f"{task}.*"))) == size


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_library_loads_what_the_other_saved(tmp_path: Path, size: int) -> None:
    run(size, "both_ways", tmp_path)


def test_groups_of_a_job(tmp_path: Path) -> None:
    run(4, "groups", tmp_path)


def test_another_dtype_on_each_rank(tmp_path: Path) -> None:
    run(2, "dtypes", tmp_path, run_torchrun)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_raises_the_error_of_one(tmp_path: Path, size: int) -> None:
    run(size, "failing", tmp_path)


@pytest.mark.parametrize(
    ("victim", "event"), [(0, 4), *[pytest.param(*one, marks=pytest.mark.slow) for one in ((0, 1), (1, 1), (1, 2))]]
)
def test_a_killed_rank_leaves_the_old_checkpoint(tmp_path: Path, victim: int, event: int) -> None:
    done = run_script(2, PROGRAM, "killed", tmp_path, str(victim), str(event))
    assert done.codes[victim] == -signal.SIGKILL, done.stderr[-6000:]
    assert ckptcore.verify(tmp_path / "saved").ok
    assert ckptcore.load(tmp_path / "saved")["step"] == 1


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", ["save", *[pytest.param(way, marks=pytest.mark.slow) for way in ("async_save", "Writer")]]
)
def test_a_kill_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, way: str, every: int) -> None:
    """A process forks for each moment: it takes long to import torch."""
    program = [sys.executable, str(HERE / "kills.py"), "torch_dcp", way, str(tmp_path), str(every)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    kills, *found = done.stdout.split()
    assert int(kills) > 5
    assert set(found) <= {"none", "1", "2"}
    assert found[0] == "1"
    assert found[-1] == "2"
    assert "none" not in found  # a file system that exchanges directories
