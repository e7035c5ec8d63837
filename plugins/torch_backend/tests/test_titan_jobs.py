"""Jobs that save a tree of objects as TorchTitan does. Jobs of another size resume with the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("titan_job.py")


@pytest.mark.slow
def test_a_job_of_another_size_resumes(tmp_path: Path) -> None:
    for task, size in (("save", 4), ("load", 2)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        done = subprocess.run(
            [*command, str(PROGRAM), task, str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
