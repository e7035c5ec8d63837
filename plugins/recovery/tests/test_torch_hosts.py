"""torch.distributed jobs with steps in memory: killed, started again on other hosts, with fewer processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE

import ckptcore
from plugins.recovery.tests.torch_hosts import JOB
from tests.jobs.processes import run_job

_PROGRAM: Final = "plugins.recovery.tests.torch_hosts"

pytestmark = pytest.mark.system


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """Return the directory of a job. Its memory servers are killed at the end."""
    yield tmp_path
    for described in tmp_path.glob(f"*/{JOB}/server.json"):
        _kill(described)


def _kill(described: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(json.loads(described.read_bytes())["pid"], signal.SIGKILL)


def lose(job: Path, *hosts: str) -> None:
    """Lose hosts: their servers and their memory."""
    for host in hosts:
        _kill(job / host / JOB / "server.json")
        shutil.rmtree(job / host)


def die(job: Path, task: str, size: int, layouts: Sequence[str] = ()) -> None:
    """Run a job until its processes kill themselves."""
    with pytest.raises(AssertionError, match=r"ended with \["):
        run_job(_PROGRAM, task, job, size=size, layouts=layouts)


def place(job: Path, *hosts: str) -> None:
    """Choose the hosts of the next job."""
    (job / "hosts.json").write_text(json.dumps(hosts))


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3"])
def test_a_killed_host_is_replaced_by_a_spare(job: Path, layout: str) -> None:
    die(job, "save and die", 3, [layout])
    lose(job, "host-1")
    place(job, "host-0", "spare", "host-2")
    assert run_job(_PROGRAM, "load", job, size=3, layouts=[layout]) == [3] * 3


def test_the_job_becomes_smaller(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die(job, "save and die", 4)
    lose(job, "host-2")
    # Another program, with NumPy alone, reads the step on a host of the job.
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(job / "host-0"))
    loaded = ckptcore.load(f"peers://{JOB}/steps/3")
    assert (loaded["sharded"].ravel()[:600_000] == range(3, 600_003)).all()
    assert run_job(_PROGRAM, "load", job, size=2) == [3] * 2


def test_the_loss_of_too_many_hosts_falls_back_to_the_directory(job: Path) -> None:
    place(job, "host-0", "host-1", "host-2")
    die(job, "die in a save", 3)
    lose(job, "host-0", "host-1", "host-2")
    step, *_ = run_job(_PROGRAM, "load", job, size=3)
    assert step == 10


def test_a_step_that_was_reported_is_loaded_after_any_kill(job: Path) -> None:
    die(job, "die in a save", 4)
    reported = [max(map(int, path.read_text().split())) for path in job.glob("reported-*")]
    lose(job, "host-3")
    step, *_ = run_job(_PROGRAM, "load", job, size=2)
    assert step >= max(reported)
