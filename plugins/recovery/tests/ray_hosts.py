"""A job of Ray actors with steps in memory, as a program: each node of a local cluster of Ray is a host.

``python -m plugins.recovery.tests.ray_hosts DIRECTORY SYSTEM_CONFIG`` prints one JSON object, which the test compares.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
from ckptcore_ray.jobs import make_job
from ckptcore_ray.membership import join_job
from ckptcore_recovery.peers import PeerMemory
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE
from ray.cluster_utils import Cluster

from ckptcore import Checkpointer, ShardedArray
from ckptcore.policies import SpecificSteps
from plugins.recovery.tests.host_directories import is_running, lose_host, server_pid

_STORE_BYTES: Final = 80 << 20
_ROWS: Final = 1000


JOB: Final = "ray"


class Worker:
    """An actor with half of the rows of an array."""

    def __init__(self, directory: Path, host: str) -> None:
        os.environ[DIRECTORY_VARIABLE] = str(directory / host)
        self._memory = PeerMemory(directory / "far", job=JOB, memory_bytes=1 << 28, upload_policy=SpecificSteps([]))

    def start(self, rank: int) -> tuple[int, int | None]:
        """Join the job, and load the newest step. Return the process and the step."""
        self._rank = rank
        join_job(JOB, rank, 2)
        self._run = Checkpointer(self._memory)
        if self._run.latest is not None:
            loaded = self._run.load_into(self._state(0))
            np.testing.assert_array_equal(loaded["w"].shards[0].elements, self._rows(loaded["step"]))
            assert loaded["step"] == self._run.restored_step
        return os.getpid(), self._run.restored_step

    def save(self, step: int) -> None:
        """Save a step."""
        self._run.save(step, self._state(step))
        self._run.wait()

    def _rows(self, step: int) -> Any:
        return np.random.default_rng(step + self._rank).standard_normal((_ROWS // 2, _ROWS), np.float32)

    def _state(self, step: int) -> dict[str, Any]:
        half = _ROWS // 2
        part = ShardedArray.part(self._rows(step), (half * self._rank, 0), (_ROWS, _ROWS), cuts=[[half], []])
        return {"w": part, "step": step}


class Hosts:
    """Nodes of Ray, each with memory of its own."""

    def __init__(self, directory: Path, system_config: dict[str, Any]) -> None:
        self.directory = directory
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False,
                "_system_config": system_config,
            },
        )  # fmt: skip
        # Before there are other nodes, so that this program is on the head.
        ray.init(self.cluster.address, log_to_driver=False, configure_logging=False)
        self.nodes = {
            name: self.cluster.add_node(num_cpus=1, resources={name: 1}, object_store_memory=_STORE_BYTES, wait=False)
            for name in ("a", "b", "spare")
        }
        self.cluster.wait_for_nodes()

    def shutdown(self) -> None:
        """End all nodes."""
        cluster: Any = self.cluster  # untyped
        cluster.shutdown()

    def start(self, *hosts: str) -> tuple[list[Any], list[int], list[int | None]]:
        """Start an actor on each host. Return them, their processes, and the steps that they loaded."""
        actor_class: Any = ray.remote(num_cpus=0)(Worker)
        actors = [actor_class.options(resources={host: 1}).remote(self.directory, host) for host in hosts]
        started = ray.get([actor.start.remote(rank) for rank, actor in enumerate(actors)])
        return actors, [process for process, _ in started], [step for _, step in started]

    def servers(self, *hosts: str) -> list[int]:
        """Return the processes of the servers on hosts."""
        return [server_pid(self.directory / host, JOB) for host in hosts]


def save(actors: Sequence[Any], step: int) -> None:
    """Save a step on all actors."""
    ray.get([actor.save.remote(step) for actor in actors])


def wait_for_end(*processes: int) -> None:
    """Wait until processes have ended."""
    while any(map(is_running, processes)):
        time.sleep(0.01)


def main(directory: Path, system_config: dict[str, Any]) -> None:
    """Kill actors, and start them again; end a node, lose its memory, and replace it by a spare one."""
    hosts = Hosts(directory, system_config)
    with make_job(JOB, 2):
        actors, processes, first = hosts.start("a", "b")
        save(actors, 1)
        before = hosts.servers("a", "b")
        ray.kill(actors[0])
        os.kill(processes[1], signal.SIGKILL)
        wait_for_end(*processes)
        actors, processes, second = hosts.start("a", "b")
        save(actors, 2)
        after = hosts.servers("a", "b")
        ray.kill(actors[1])
        hosts.cluster.remove_node(hosts.nodes["a"], allow_graceful=False)
        wait_for_end(*processes)
        (lost,) = hosts.servers("a")
        outlived_node = is_running(lost)
        lose_host(directory / "a", JOB)
        actors, _, third = hosts.start("spare", "b")
        save(actors, 3)
    ray.shutdown()
    hosts.shutdown()
    print(json.dumps({"loaded": [first, second, third], "same": before == after, "outlived node": outlived_node}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
