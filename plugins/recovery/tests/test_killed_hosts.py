"""Hosts, servers and processes are killed at random moments: no step that was reported as saved is lost."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.recovery.tests.killed_hosts import KilledHosts
from plugins.recovery.tests.networks import BridgedNetwork, LoopbackNetwork

pytestmark = pytest.mark.system

KILLS = 10


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a directory in memory with a short name. It is removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="hosts-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def bridge() -> Iterator[BridgedNetwork]:
    """Return a network of 18 hosts. It is removed at the end."""
    try:
        network = BridgedNetwork(18)
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"hosts cannot be network namespaces: {error}")
    yield network
    network.close()


def test_a_few_kills_on_one_interface(tmp_path: Path, memory: Path) -> None:
    job = KilledHosts(tmp_path, memory, LoopbackNetwork(), 0, sizes=[3, 4])
    try:
        job.run(2)
    finally:
        job.close()
    assert job.reported


def test_a_few_kills_of_namespaces(tmp_path: Path, memory: Path, bridge: BridgedNetwork) -> None:
    job = KilledHosts(tmp_path, memory, bridge, 1, sizes=[3, 4])
    try:
        job.run(2)
    finally:
        job.close()
    assert job.reported


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(32, 35))
def test_kills_of_hosts_with_fragments(tmp_path: Path, memory: Path, seed: int) -> None:
    job = KilledHosts(tmp_path, memory, LoopbackNetwork(), seed, sizes=[6, 5, 4], copies=2, needed=2)
    try:
        job.run(KILLS)
    finally:
        job.close()
    assert job.reported


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 32))
def test_many_kills(tmp_path: Path, memory: Path, bridge: BridgedNetwork, seed: int) -> None:
    """On 16 hosts with 2 spares. Even seeds have one copy and lose one host, odd seeds have two and lose two."""
    job = KilledHosts(tmp_path, memory, bridge, seed, sizes=[16, 12, 8], copies=1 + seed % 2)
    try:
        job.run(KILLS)
    finally:
        job.close()
        print(json.dumps({"seed": seed, **job.counts}))
    assert job.reported
