"""Hosts, servers and processes are killed at random moments: no step that was reported as saved is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.recovery.tests.killed_hosts import KilledHosts

pytestmark = pytest.mark.system


@pytest.fixture
def seed() -> int:
    """Return the seed of the quick test."""
    return 0


@pytest.fixture
def job(tmp_path: Path, seed: int) -> Iterator[KilledHosts]:
    """Return a job with one copy of each step. Its servers are killed at the end."""
    job = KilledHosts(tmp_path, seed, sizes=[2, 3, 4])
    yield job
    job.close()


def test_a_few_kills(job: KilledHosts) -> None:
    job.run(4)
    assert job.loaded[0] == 0
    assert all(job.loaded[1:])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 31))
def test_many_kills(job: KilledHosts, seed: int) -> None:
    job.run(11)
    assert all(job.loaded[1:])
