"""One process of a jax.distributed job in which something fails."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ckptcore_jax import KeyValueCoordinator
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptcore.protocols import Coordinator
from tests.jobs.failing_job import PATIENCE_SECONDS, Cell, take_part, told_file


class _JaxJob:
    """See `Job`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        make: Any = PartitionSpec
        self._sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), make("x"))

    def coordinator(self, timeout_seconds: float) -> Coordinator:
        return KeyValueCoordinator.of_job(timeout_seconds=timeout_seconds)

    def state(self, number: int) -> dict[str, Any]:
        rows = np.full((12, 4), number, np.float32)
        sharded = jax.make_array_from_callback(rows.shape, self._sharding, lambda index: rows[index])
        return {"rows": sharded, "here": {str(self.rank): np.full(5, number)}, "step": number}

    def expect(self, state: Mapping[str, Any], number: int) -> None:
        rows = state["rows"]
        assert isinstance(rows, jax.Array) and rows.shape == (12, 4)
        assert all(bool((np.asarray(shard.data) == number).all()) for shard in rows.addressable_shards)
        assert (state["here"][str(self.rank)] == number).all() and state["step"] == number


def run(cell: Cell, rank: int, size: int, port: int, leader_serves: bool, place: Path, errors: str) -> None:
    """Run the process, and end it without waiting for other processes. The service of JAX always runs in rank 0."""
    assert leader_serves
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    config: Any = jax.config
    config.update("jax_platforms", "cpu")
    config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, cluster_detection_method="deactivate")
    take_part(cell, _JaxJob(rank), place)
    if rank == 0:  # the end of rank 0 ends the service, and with it all processes
        living = [other for other in range(size) if other != cell.victim or cell.action != "kill"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and any(not told_file(place, other).exists() for other in living):
            time.sleep(0.02)
    os._exit(0)
