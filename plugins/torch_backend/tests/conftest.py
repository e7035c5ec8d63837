"""Fixtures for jobs of several processes, and for a process group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.jobs.torch_groups import process_group
from tests.jobs.torch_scripts import run_script, run_torchrun


class Torchrun(Protocol):
    """A function that runs a program as torchrun does, and asserts that all processes succeed."""

    def __call__(self, processes: int, program: str | Path, *arguments: str | Path, max_restarts: int = 0) -> None: ...


@pytest.fixture(scope="session")
def torchrun() -> Torchrun:
    """Return a function that runs a program as torchrun does, and asserts that all processes succeed.

    Only jobs with restarts are started by torchrun itself, because that takes seconds longer.
    """

    def run(processes: int, program: str | Path, *arguments: str | Path, max_restarts: int = 0) -> None:
        done: Any
        if max_restarts:
            done = run_torchrun(processes, program, *arguments, max_restarts=max_restarts, timeout=300)
        else:
            done = run_script(processes, program, *arguments, timeout=300)
        assert done.returncode == 0, done.stderr[-6000:]

    return run


@pytest.fixture
def alone() -> Iterator[None]:
    """Run in a process group of one process."""
    with process_group():
        yield
