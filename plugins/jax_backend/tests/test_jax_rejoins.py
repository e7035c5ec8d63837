"""Processes that leave a job of JAX and join another one.

Each process counts the exchanges of the new job from 0, like a process that has just started.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ckptcore_jax.key_value_coordinator import JobService, _JobCoordinators
from ckptcore_jax.plugin import ckpt_coordinator
from jax._src import distributed

import ckptcore
from ckptcore import Context
from ckptcore.job.agreement import ExchangeCounts
from ckptcore.protocols import Rejoinable
from ckptcore.runtime import runtime_of

pytestmark = pytest.mark.system

REJOINED = Path(__file__).with_name("rejoined_jax_job.py")


class _Client:
    """Client of a service that no test uses."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        raise NotImplementedError

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        raise NotImplementedError

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        raise NotImplementedError

    def key_value_delete(self, key: str) -> None:
        raise NotImplementedError


def test_each_job_has_its_own_coordinator() -> None:
    counts, coordinators = ExchangeCounts(), _JobCoordinators()
    counted, incarnations = [], []
    for _ in range(2):
        client = _Client()
        coordinator = coordinators.of(JobService(client, 1, 2))
        assert isinstance(coordinator, Rejoinable) and coordinators.of(JobService(client, 1, 2)) is coordinator
        counted.append([counts.key(coordinator, "run"), counts.key(coordinator, "run")])
        incarnations.append(coordinator.incarnation)
    assert counted == [["run#0", "run#1"]] * 2 and incarnations == [1, 2]


def test_job_that_was_shut_down_is_released() -> None:
    coordinators = _JobCoordinators()
    assert coordinators.of(JobService(_Client(), 0, 2)) is not None
    assert coordinators.of(None) is None
    assert coordinators._client is None and coordinators._coordinator is None
    assert coordinators.of(JobService(_Client(), 0, 1)) is None, "one process is no job"


def test_coordinator_changes_with_the_client_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.global_state, "client", _Client())
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)
    job = ckpt_coordinator()
    assert runtime_of(Context()).job() is job and ckpt_coordinator() is job
    monkeypatch.setattr(distributed.global_state, "client", _Client())
    assert ckpt_coordinator() is not job
    monkeypatch.setattr(distributed.global_state, "client", None)
    assert ckpt_coordinator() is None and runtime_of(Context()).job().size == 1


@pytest.mark.slow
def test_continuing_process_saves_together_with_a_new_one(tmp_path: Path) -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = [str(listener.getsockname()[1]) for listener in (first, second)]
    begun = [
        subprocess.Popen([sys.executable, str(REJOINED), who, str(tmp_path), *ports], stderr=subprocess.PIPE, text=True)
        for who in ("stays", "leaves", "comes")
    ]
    try:
        told = [process.communicate(timeout=300)[1] for process in begun]
    finally:
        for process in begun:
            process.kill()
    assert [process.returncode for process in begun] == [0, 0, 0], "\n".join(told)[-6000:]
    assert ckptcore.load(tmp_path / "run")["life"] == 1
