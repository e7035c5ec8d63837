"""Without a Context, a process takes part in the job of its process group."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import ckptcore_torch
import numpy as np
import pytest
import torch.distributed as dist
from ckptcore_torch.store_coordinator import StoreCoordinator, _GroupCoordinators

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions
from ckptcore.errors import PluginError
from ckptcore.job.agreement import ExchangeCounts
from ckptcore.protocols import Rejoinable
from ckptcore.runtime import runtime_of
from plugins.torch_backend.tests.conftest import Torchrun
from tests.jobs.torch_groups import process_group

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("coordinated_job.py")
RESTARTED = Path(__file__).with_name("restarted_job.py")
REJOINED = Path(__file__).with_name("rejoined_job.py")


def test_a_process_without_a_group_forms_a_job_of_one() -> None:
    assert not dist.is_initialized()
    assert ckptcore_torch.ckpt_coordinator() is None
    assert runtime_of(Context()).job().size == 1


def test_a_group_of_one_process_needs_no_coordinator() -> None:
    with process_group():
        assert ckptcore_torch.ckpt_coordinator() is None


def test_group_without_a_store_raises_an_error_with_a_remedy_in_an_exchange(tmp_path: Path) -> None:
    """The test uses the fake backend instead of mpi, which most builds of torch lack.

    Loads that read alone need no coordinator.
    """
    ckptcore.save(tmp_path / "c", {"w": np.ones(3)})
    with process_group("fake", size=4):
        assert runtime_of(Context()).job().size == 4
        assert ckptcore.load(tmp_path / "c", context=Context(job=JobOptions(reads="alone")))["w"].tolist() == [1, 1, 1]
        with pytest.raises(PluginError, match=r"4 processes.*'fake'.*JobOptions\(coordinator="):
            ckptcore.load(tmp_path / "c")
        for save in (ckptcore.save, ckptcore.save_async):
            with pytest.raises(PluginError, match=r"4 processes.*'fake'.*JobOptions\(coordinator="):
                save(tmp_path / "d", {"w": np.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_coordinator_of_a_context_has_precedence() -> None:
    mine = StoreCoordinator(dist.HashStore(), 0, 1)
    with process_group("fake", size=4):
        assert runtime_of(Context(job=JobOptions(coordinator=mine))).job() is mine


def test_each_process_group_has_its_own_coordinator() -> None:
    """A process that stays in the job counts exchanges of the new group from 0, as a new process does."""
    counts, coordinators = ExchangeCounts(), _GroupCoordinators()
    counted = []
    for _ in range(2):
        with process_group():
            coordinator = coordinators.of(dist.group.WORLD)
            assert isinstance(coordinator, Rejoinable) and coordinators.of(dist.group.WORLD) is coordinator
            counted.append([counts.key(coordinator, "run"), counts.key(coordinator, "run")])
    assert counted == [["run#0", "run#1"]] * 2


@pytest.mark.slow
def test_continuing_process_saves_together_with_a_new_one(tmp_path: Path) -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = [str(bound.getsockname()[1]) for bound in (first, second)]
    begun = [
        subprocess.Popen([sys.executable, str(REJOINED), who, str(tmp_path), *ports], stderr=subprocess.PIPE, text=True)
        for who in ("stays", "leaves", "comes")
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in begun]
    finally:
        for process in begun:
            process.kill()
    assert [process.returncode for process in begun] == [0, 0, 0], "\n".join(errors)[-6000:]
    loaded = ckptcore.load(tmp_path / "run")
    assert loaded["life"].tolist() == [1, 1, 1] and loaded["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_job_saves_and_loads_without_a_context(torchrun: Torchrun, tmp_path: Path, size: int) -> None:
    torchrun(size, PROGRAM, tmp_path)
    assert {str(rank) for rank in range(size)} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_job_restarted_with_the_same_store_continues(torchrun: Torchrun, tmp_path: Path) -> None:
    torchrun(3, RESTARTED, tmp_path, max_restarts=1)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "heard", "asks-1", "asks-2", "1-0", "1-1", "1-2"}
    assert ckptcore.CheckpointReader(tmp_path / "run").steps == (1, 2, 3, 4)
