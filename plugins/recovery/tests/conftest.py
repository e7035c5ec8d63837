"""Fixtures: a job whose hosts have memory servers on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_recovery.peers.joining import MemoryOptions
from ckptcore_recovery.peers.session import Session

from plugins.recovery.tests.host_directories import kill_servers
from plugins.recovery.tests.job_hosts import Hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Return a job without servers. They are killed at the end."""
    job = Hosts(tmp_path / "hosts", MemoryOptions(limit=1 << 28, idle_seconds=60.0))
    yield job
    job.close()


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Return the process on one of three hosts, which all tests of a module share."""
    job = Hosts(tmp_path_factory.mktemp("hosts"), MemoryOptions(limit=1 << 30))
    yield job.join("a", "b", "c")[1]
    job.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """Return the directory of a job, with a directory for each host. Its memory servers are killed at the end."""
    yield tmp_path
    kill_servers(tmp_path)
