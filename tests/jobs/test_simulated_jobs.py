"""Simulated saves by hundreds of processes: every layout commits, and broadcasts do not grow with the job."""

from __future__ import annotations

import pytest

from benchmarks.scale import LAYOUTS, Measured, Simulation
from benchmarks.scale_job import TrainingJob
from ckptcore.planning.partition import ReplicaOptions

_BLOCKS = 4
_STAGES = 4


def _measured(size: int, layout: str, *, sharded: int) -> Measured:
    job = TrainingJob(8, sharded, size // (8 * sharded), layers=1)
    return Simulation(job, layout, replicas=ReplicaOptions(most=1)).run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_256_processes_save(layout: str) -> None:
    measured = _measured(256, layout, sharded=16)
    rows, arrays = 128, 12
    assert measured.chunks >= 4 * rows * (arrays - 3), "the norms are held by more"
    assert measured.messages["leader"] == _STAGES * (63 + _BLOCKS - 1) + _BLOCKS + _STAGES - 1
    assert measured.root_bytes > measured.chunks
    assert 0 < measured.sent["process"] < 10 * measured.sent["relay"]


def test_the_work_of_a_process_does_not_grow_with_the_job_except_on_the_leader() -> None:
    """With twice the replicas, each process writes half as many bytes and receives the same number of bytes."""
    small, large = (_measured(size, "dcp", sharded=16) for size in (256, 512))
    assert large.chunks == small.chunks
    assert large.sent["process"] <= small.sent["process"] and large.sent["relay"] <= small.sent["relay"]
    assert large.received["process"] <= small.received["process"] + 16, "but for digits of ranks"
    assert large.messages["process"] == small.messages["process"] == 2 * _STAGES
    assert large.messages["relay"] == small.messages["relay"]
    assert large.messages["leader"] - small.messages["leader"] == _BLOCKS * (_STAGES + 1), "one for each block more"
