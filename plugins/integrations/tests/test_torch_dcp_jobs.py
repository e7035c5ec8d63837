"""The replacement for torch.distributed.checkpoint in jobs of several processes, which are also killed during saves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ckptcore
from tests.jobs.torch_scripts import run_script

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
PROGRAM = HERE / "torch_dcp_job.py"


def run(size: int, task: str, directory: Path) -> None:
    """Run a task that must succeed on every rank."""
    done = run_script(size, PROGRAM, task, directory)
    assert done.returncode == 0, done.stderr[-6000:]
    assert len(list(directory.glob(f"{task}.*"))) == size


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_library_loads_checkpoints_of_the_other(tmp_path: Path, size: int) -> None:
    run(size, "both_ways", tmp_path)


def test_groups_of_a_job(tmp_path: Path) -> None:
    run(4, "groups", tmp_path)


def test_another_dtype_on_each_rank(tmp_path: Path) -> None:
    run(2, "dtypes", tmp_path)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_raises_the_error_of_the_failed_rank(tmp_path: Path, size: int) -> None:
    run(size, "failing", tmp_path)


@pytest.mark.parametrize(
    ("victim", "event"),
    [(0, 4), *[pytest.param(*parameters, marks=pytest.mark.slow) for parameters in ((0, 1), (1, 1), (1, 2))]],
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
    """The program imports torch once, because that is slow, and forks a process for each kill."""
    program = [sys.executable, str(HERE / "kills.py"), "torch_dcp", way, str(tmp_path), str(every)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    kills, *steps = done.stdout.split()
    assert int(kills) > 5
    assert set(steps) <= {"none", "1", "2"}
    assert steps[0] == "1"
    assert steps[-1] == "2"
    assert "none" not in steps  # the file system of the test can exchange directories
