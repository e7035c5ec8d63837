"""A process is killed or stopped during a collective load: the others raise an error that names the checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.servers import free_port

import ckptcore

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("killed_load_job.py")
SIZE = 3


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP])
def test_surviving_processes_raise_an_error_that_names_the_checkpoint(tmp_path: Path, which: signal.Signals) -> None:
    ckptcore.save(tmp_path / "saved", {f"w{number}": np.full((256, 256), number) for number in range(24)})
    port = free_port()
    command = [sys.executable, str(PROGRAM)]
    job = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(port), str(int(which)), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in job[:-1]]
        assert [process.returncode for process in job[:-1]] == [0, 0], "\n".join(errors)[-6000:]
        assert job[-1].poll() == (-signal.SIGKILL if which == signal.SIGKILL else None), (
            "the last process ended without the signal"
        )
    finally:
        for process in job:
            process.kill()
            process.communicate()
    told = [(tmp_path / f"{rank}.told").read_text() for rank in range(SIZE - 1)]
    for error in told:  # a lost connection or a timed-out exchange, whichever the process detects first
        assert error.startswith(("RankFailedError", "CoordinationTimeoutError")) and str(tmp_path / "saved") in error, (
            told
        )
