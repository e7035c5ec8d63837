"""The replacement for Orbax v1 in jobs of several processes, which are also killed during saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ckptcore_testing.servers import free_port

import ckptcore

pytestmark = pytest.mark.system

HERE = Path(__file__).parent


def start(size: int, task: str, directory: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start a task in several processes."""
    port = free_port()
    command = [sys.executable, str(HERE / "orbax_v1_job.py"), task, str(directory), str(port), str(size)]
    return [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def run(size: int, task: str, directory: Path) -> None:
    """Run a task that must succeed in every process."""
    job = start(size, task, directory)
    try:
        errors = [process.communicate(timeout=300)[1] for process in job]
        assert [process.returncode for process in job] == [0] * size, "\n".join(errors)[-6000:]
    finally:
        for process in job:
            process.kill()
    assert len(list(directory.glob(f"{task}.*"))) == size


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_library_loads_checkpoints_of_the_other(tmp_path: Path, size: int) -> None:
    run(size, "both_ways", tmp_path)


def test_each_library_continues_the_run_of_the_other(tmp_path: Path) -> None:
    run(2, "training", tmp_path)


@pytest.mark.parametrize(("victim", "event"), [(0, 4), (1, 2)])
def test_a_killed_process_leaves_the_old_checkpoint(tmp_path: Path, victim: int, event: int) -> None:
    job = start(2, "killed", tmp_path, str(victim), str(event))
    try:
        assert job[victim].wait(timeout=300) == -signal.SIGKILL
    finally:
        for process in job:
            process.kill()
            process.communicate()
    assert ckptcore.verify(tmp_path / "saved").ok
    assert ckptcore.load(tmp_path / "saved" / "state")["n"] == 1


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", ["save", *[pytest.param(way, marks=pytest.mark.slow) for way in ("save_async", "Checkpointer")]]
)
def test_a_kill_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, way: str, every: int, full: bool
) -> None:
    """The program imports JAX once, because that is slow, and forks a process for each kill."""
    if every == 1 and not full:
        every = 3
    program = [sys.executable, str(HERE / "kills.py"), "orbax_v1", way, str(tmp_path), str(every)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    kills, *steps = done.stdout.split()
    assert int(kills) > 5
    assert set(steps) <= {"1", "2"}
    assert steps[0] == "1"
    assert steps[-1] == "2"
