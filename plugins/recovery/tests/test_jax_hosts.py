"""jax.distributed jobs with steps in memory: killed, started again with fewer processes, and in other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE

import ckptcore
from plugins.recovery.tests.framework_jobs import JOB, die, lose, whole_array
from plugins.recovery.tests.host_directories import server_pid
from tests.jobs.processes import run_job

_JAX: Final = "plugins.recovery.tests.jax_hosts"
_TORCH: Final = "plugins.recovery.tests.torch_hosts"

pytestmark = pytest.mark.system


def test_fewer_processes_of_another_framework_go_on(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die(_JAX, job, "save and die", 3)
    before = [server_pid(job / f"host-{number}", JOB) for number in range(2)]
    lose(job, "host-2")
    # A program with NumPy alone reads the step on a host of the job.
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(job / "host-1"))
    loaded = ckptcore.load(f"peers://{JOB}/steps/4")
    np.testing.assert_array_equal(loaded["sharded"], whole_array(4))
    assert run_job(_TORCH, "load", job, size=2) == [4] * 2
    assert run_job(_JAX, "load", job, size=2) == [14] * 2
    assert [server_pid(job / f"host-{number}", JOB) for number in range(2)] == before


@pytest.mark.slow
def test_more_processes_go_on_after_a_host_was_lost(job: Path) -> None:
    die(_TORCH, job, "save and die", 2)
    lose(job, "host-0")
    assert run_job(_JAX, "load", job, size=4) == [4] * 4
