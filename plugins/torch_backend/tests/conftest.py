"""Fixtures for jobs of several processes, and for a process group of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch.distributed as dist


class Torchrun(Protocol):
    """A function that runs a program with torchrun, and asserts that all processes succeed."""

    def __call__(self, processes: int, program: str | Path, *arguments: str | Path, max_restarts: int = 0) -> None: ...


@pytest.fixture(scope="session")
def torchrun() -> Torchrun:
    """Return a function that runs a program with torchrun, and asserts that all processes succeed."""

    def run(processes: int, program: str | Path, *arguments: str | Path, max_restarts: int = 0) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["--max-restarts", str(max_restarts), str(program), *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-6000:]

    return run


@pytest.fixture
def alone() -> Iterator[None]:
    """Run in a process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
