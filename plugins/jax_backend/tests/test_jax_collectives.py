"""Real processes of jax.distributed that send data that one of them has read."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from ckptcore_jax.plugin import ckpt_collectives
from ckptcore_testing import CollectivesTests

import ckptcore
from ckptcore.protocols import Collectives

pytestmark = pytest.mark.system

T = TypeVar("T")

PROGRAM = Path(__file__).with_name("broadcast_jax_job.py")


def _process(arguments: Sequence[str], errors: str) -> None:
    """The job's program, in a process that has imported JAX but not started a backend."""
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = [str(PROGRAM), *arguments]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def _run(size: int, devices: int, task: str, directory: Path) -> None:
    """Run a task in a job of `size` processes with `devices` devices each."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    logs = [directory / f"{rank}.log" for rank in range(size)]
    processes = [
        context.Process(
            target=_process, args=([address, str(rank), str(size), str(devices), task, str(directory)], str(log))
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=180)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * size, "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
class TestDeviceCollectives(CollectivesTests):
    def run(self, job: Callable[[Collectives], T], *, timeout_seconds: float) -> Sequence[T]:
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            (directory / "work").write_bytes(pickle.dumps(job))
            _run(self.size, 1, "conformance", directory)
            return [pickle.loads((directory / f"{rank}.result").read_bytes()) for rank in range(self.size)]

    @pytest.mark.skip(reason="JAX has no deadline for a computation: it ends a job one of whose processes is gone")
    def test_a_missing_rank_is_an_error_on_the_others(self) -> None:
        """See the reason."""


def _state() -> dict[str, Any]:
    """The state of the job's program, which is not imported because its import sets JAX flags."""
    generator = np.random.default_rng(5)
    import ml_dtypes

    return {
        "w": generator.standard_normal((1024, 1024)).astype(np.float32),
        "e": generator.standard_normal((512, 2048)).astype(ml_dtypes.bfloat16),
        "b": generator.standard_normal(300_000),
        "i": np.arange(300_000) << 30,
    }


def test_two_processes_read_each_byte_once(tmp_path: Path) -> None:
    """On a mesh of 2 x 2, processes need halves, columns that two of them share, and whole arrays."""
    state = _state()
    ckptcore.save(tmp_path / "saved", state)
    _run(2, 2, "loads", tmp_path)
    read = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    stored = sum(array.nbytes for array in state.values())
    assert sum(rank["broadcast"] for rank in read) == stored
    assert sum(rank["all"] for rank in read) == stored + state["e"].nbytes + state["b"].nbytes


def test_no_job_has_no_collectives() -> None:
    assert ckpt_collectives() is None
