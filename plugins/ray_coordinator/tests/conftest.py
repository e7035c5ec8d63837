"""Fixtures that start Ray once per test process, and actors that act as ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray

from plugins.ray_coordinator.tests.ranks import Ranks

CLUSTER = """
import sys
import ray
context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
print("address", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
"""A program that runs Ray until its standard input ends.

Ray runs in a separate process because it forks, and a process that uses JAX must not fork.
"""


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Run Ray on this machine."""
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        address = next(line.split()[1] for line in cluster.stdout if line.startswith("address "))
        ray.init(address, log_to_driver=False, configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()
            cluster.stdin.close()
            cluster.wait(60)


@pytest.fixture(scope="session")
def ranks(ray_session: None) -> Ranks:
    """Actors that all tests of the session reuse."""
    return Ranks()
