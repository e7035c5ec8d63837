"""torch.distributed jobs with steps in memory: killed, started again on other hosts, with fewer processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist

from plugins.recovery.tests.framework_jobs import JOB, die, lose, place_on
from plugins.recovery.tests.host_directories import server_pid
from tests.jobs.processes import run_job

_PROGRAM: Final = "plugins.recovery.tests.torch_hosts"
_SCRIPT: Final = Path(__file__).with_name("torchrun_hosts.py")
_SECONDS: Final = 300.0

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    "layout",
    ["safetensors", pytest.param("dcp", marks=pytest.mark.slow), pytest.param("zarr3", marks=pytest.mark.slow)],
)
def test_a_killed_host_is_replaced_by_a_spare(job: Path, layout: str) -> None:
    die(_PROGRAM, job, "save and die", 3, [layout])
    lose(job, "host-1")
    place_on(job, "host-0", "spare", "host-2")
    assert run_job(_PROGRAM, "load", job, size=3, layouts=[layout]) == [4] * 3


@pytest.mark.slow
def test_the_job_becomes_smaller(job: Path) -> None:
    die(_PROGRAM, job, "save and die", 4)
    lose(job, "host-2")
    assert run_job(_PROGRAM, "load", job, size=2) == [4] * 2


@pytest.mark.slow
def test_the_loss_of_too_many_hosts_falls_back_to_the_directory(job: Path) -> None:
    place_on(job, "host-0", "host-1", "host-2")
    die(_PROGRAM, job, "save and die", 3)
    lose(job, "host-0", "host-1", "host-2")
    step, *_ = run_job(_PROGRAM, "load", job, size=3)
    assert step == 3


class Torchrun:
    """Agents of torchrun, each in place of a host: two of them have a process of the job, and others are spare."""

    def __init__(self, directory: Path) -> None:
        store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # it is exported
        self._store = store  # of the rendezvous, on a machine that is not lost
        self._directory = directory
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str) -> None:
        """Start the agent of a host."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--max-restarts", "9", "--monitor-interval", "0.1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{self._store.port}", "--rdzv-id", "job",
            "--rdzv-conf", "is_host=0",
            str(_SCRIPT), str(self._directory), host,
        ]  # fmt: skip
        with (self._directory / f"{host}.log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.agents[host] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_for(self, name: str) -> str:
        """Wait for a file that a process writes. Return its text."""
        deadline = time.monotonic() + _SECONDS
        while not (self._directory / name).exists():
            ended = {host: agent.poll() for host, agent in self.agents.items()}
            assert time.monotonic() < deadline and not any(ended.values()), (ended, self._logs())
            time.sleep(0.02)
        return (self._directory / name).read_text()

    def kill(self, host: str) -> None:
        """Kill an agent and the process of the job that it started."""
        agent = self.agents.pop(host)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.kill()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        agent.wait()

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self._directory.glob("*.log"))


@pytest.fixture
def torchrun(job: Path) -> Iterator[Torchrun]:
    """Return agents of torchrun. They are killed at the end."""
    agents = Torchrun(job)
    yield agents
    for host in list(agents.agents):
        agents.kill(host) if agents.agents[host].poll() is None else agents.agents.pop(host)


@pytest.mark.lives(
    "memory of the hosts of a job (`peers://`)",
    "processes of torch and jax, agents of torchrun, actors and nodes of ray, containers: killed, with their memory",
    "saves, loads, runs; a step that was reported as saved survives the loss of as many hosts as it has copies",
    "lost if more hosts are lost; only hosts of the job read it",
)
@pytest.mark.slow
def test_torchrun_replaces_a_killed_host_by_a_spare(torchrun: Torchrun, job: Path) -> None:
    for host in ("host-0", "host-1"):
        torchrun.start(host)
    for host in ("host-0", "host-1"):
        assert torchrun.wait_for(f"{host}.saved") == "3"
    before = server_pid(job / "host-1", JOB)
    torchrun.kill("host-0")
    lose(job, "host-0")
    torchrun.start("spare")
    for host in ("host-1", "spare"):
        assert torchrun.wait_for(f"{host}.loaded") == "3"
        assert torchrun.agents[host].wait(_SECONDS) == 0
    assert server_pid(job / "host-1", JOB) == before, "torchrun restarted the process on this host, not its server"
