"""Jobs of several real processes with separate devices, which save and load together."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.servers import free_port

import ckptcore

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("coordinated_jax_job.py")


def _process(program: str, arguments: Sequence[str], errors: str) -> None:
    """Return a process that runs the job's program. It has imported JAX but not started a backend."""
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def run(
    size: int, devices: int, task: str, directory: Path, program: Path = PROGRAM
) -> tuple[Sequence[int | None], str]:
    """Run a task in a job of `size` processes. Return the exit status and the output of each process."""
    context = multiprocessing.get_context("forkserver")
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as place:
        files = [f"{place}/{rank}" for rank in range(size)]
        processes = [
            context.Process(
                target=_process,
                args=(str(program), [address, str(rank), str(size), str(devices), task, str(directory)], file),
            )
            for rank, file in enumerate(files)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(timeout=180)
            said = [Path(file).read_text(encoding="utf-8", errors="replace")[-6000:] for file in files]
            return [process.exitcode for process in processes], "\n".join(said)
        finally:
            for process in processes:
                process.kill()


def succeed(size: int, devices: int, task: str, directory: Path, program: Path = PROGRAM) -> None:
    """Run a task that must succeed in every process."""
    codes, said = run(size, devices, task, directory, program)
    assert codes == [0] * size, said


def test_two_processes_save_and_any_mesh_loads(tmp_path: Path) -> None:
    succeed(2, 2, "small", tmp_path)


@pytest.mark.slow
def test_a_checkpoint_moves_from_two_processes_to_four_to_one(tmp_path: Path) -> None:
    succeed(2, 2, "layouts", tmp_path)
    succeed(4, 1, "reshard", tmp_path)
    succeed(1, 1, "reshard", tmp_path)
    for name in ("zarr3", "zarr3-4", "ocdbt-4", "dcp-4", "ocdbt-1"):
        loaded = ckptcore.load(tmp_path / name)
        assert np.array_equal(loaded["both"], np.arange(96, dtype=np.float32).reshape(12, 8) + 3)
        assert ckptcore.verify(tmp_path / name).ok


@pytest.mark.slow
@pytest.mark.parametrize("task", ["once", "run", "part"])
def test_a_job_completes_each_task(task: str, tmp_path: Path) -> None:
    succeed(2, 2, task, tmp_path)


@pytest.mark.slow
def test_orbax_and_ckptcore_load_each_others_checkpoints_in_a_job(tmp_path: Path) -> None:
    succeed(2, 2, "orbax", tmp_path)
    ours, theirs = (ckptcore.load(tmp_path / name) for name in ("ours", "theirs"))
    for name in ("both", "across", "everywhere"):
        assert ours[name].tobytes() == theirs[name].tobytes()


@pytest.mark.slow
def test_process_that_fails_in_a_save_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    codes, said = run(2, 2, "killed", tmp_path)
    assert codes == [0, -signal.SIGKILL], said
    assert (tmp_path / "told").exists() and not (tmp_path / "killed").exists()
    succeed(2, 2, "again", tmp_path)


@pytest.mark.slow
def test_leader_that_fails_in_a_save_ends_the_job_and_nothing_is_committed(tmp_path: Path) -> None:
    codes, said = run(2, 2, "leader_killed", tmp_path)
    assert codes == [-signal.SIGKILL, -signal.SIGABRT], said
    assert not (tmp_path / "killed").exists()
    succeed(2, 2, "again", tmp_path)
