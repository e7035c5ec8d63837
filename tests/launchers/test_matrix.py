"""Jobs of several launchers and frameworks. Each job saves in every layout, and every job loads all checkpoints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from tests.launchers.states import ARRAYS, LAYOUTS, STEP

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
JOBS = ("torch_fsdp", "torch_mesh", "jax_mesh", "ray_actors")


def _commands(job: str) -> list[list[str]]:
    """Return the commands of a job: one command, or one for each process if the job has no launcher."""
    program = str(HERE / f"{job}.py")
    if job.startswith("torch"):
        return [[*TORCHRUN, program]]
    return [[sys.executable, program]] * (2 if job == "jax_mesh" else 1)  # Ray starts the actors itself


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all jobs at once. Each job saves, waits for the others, and loads their checkpoints."""
    directory = tmp_path_factory.mktemp("jobs")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[tuple[str, subprocess.Popen[bytes]]] = []
    try:
        for job in JOBS:
            port = str(_free_port())
            for rank, command in enumerate(_commands(job)):
                arguments = [str(directory), ",".join(JOBS), str(rank), port]
                with (directory / f"{job}.{rank}.log").open("wb") as log:
                    process = subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log)
                started.append((f"{job}.{rank}", process))
        for name, process in started:
            process.wait(timeout=420)
            log_text = (directory / f"{name}.log").read_text(errors="replace")
            reasons = "".join(path.read_text() for path in sorted(directory.glob("*.failed")))
            assert process.returncode == 0, f"{name}: {reasons or log_text[-4000:]}"
    finally:
        for _, process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    return directory


@pytest.mark.slow
def test_one_process_loads_the_checkpoints_of_every_job(saved: Path) -> None:
    """The fixture fails if a job cannot load a checkpoint. This is one test, so that only one worker runs the jobs."""
    problems = []
    for job in JOBS:
        for layout in LAYOUTS:
            location = saved / f"{job}-{layout}"
            assert ckptcore.verify(location).ok, location
            loaded = ckptcore.load(location)
            assert loaded["step"] == STEP, location
            for name, array in {**loaded["params"], "i": loaded["i"]}.items():
                if array.dtype != ARRAYS[name].dtype or not np.array_equal(array, ARRAYS[name]):
                    problems.append(f"{location.name}: {name} is {array}")
    assert not problems, "\n".join(problems)
