"""Real processes of jax.distributed: one of them reads data and sends it to the others."""

from __future__ import annotations

import json
import pickle
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
from plugins.jax_backend.tests.test_jax_jobs import succeed

pytestmark = pytest.mark.system

T = TypeVar("T")

PROGRAM = Path(__file__).with_name("broadcast_jax_job.py")


@pytest.mark.slow
class TestDeviceCollectives(CollectivesTests):
    def run(self, job: Callable[[Collectives], T], *, timeout_seconds: float) -> Sequence[T]:
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            (directory / "work").write_bytes(pickle.dumps(job))
            succeed(self.size, 1, "conformance", directory, PROGRAM)
            return [pickle.loads((directory / f"{rank}.result").read_bytes()) for rank in range(self.size)]

    @pytest.mark.skip(reason="JAX has no deadline for a computation: it ends a job one of whose processes is gone")
    def test_a_missing_rank_is_an_error_on_the_others(self) -> None:
        """Skipped: see the reason above."""


def _state() -> dict[str, Any]:
    """Return the state of the job's program. Importing the program would set JAX flags."""
    generator = np.random.default_rng(5)
    import ml_dtypes

    return {
        "w": generator.standard_normal((1024, 1024)).astype(np.float32),
        "e": generator.standard_normal((512, 2048)).astype(ml_dtypes.bfloat16),
        "b": generator.standard_normal(300_000),
        "i": np.arange(300_000) << 30,
    }


def test_two_processes_read_each_byte_once(tmp_path: Path) -> None:
    """On a mesh of 2 x 2, the processes request halves, columns that both need, and whole arrays."""
    state = _state()
    ckptcore.save(tmp_path / "saved", state)
    succeed(2, 2, "loads", tmp_path, PROGRAM)
    read = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    stored = sum(array.nbytes for array in state.values())
    assert sum(rank["broadcast"] for rank in read) == stored
    assert sum(rank["all"] for rank in read) == stored + state["e"].nbytes + state["b"].nbytes


def test_without_a_job_there_are_no_collectives() -> None:
    assert ckpt_collectives() is None
