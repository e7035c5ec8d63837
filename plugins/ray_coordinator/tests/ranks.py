"""Ray actors that act as the ranks of a job in the tests."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ckptcore_ray.coordinator import RayCoordinator
from ckptcore_ray.jobs import RayJob, make_job

import ckptcore
from ckptcore.protocols import Coordinator

T = TypeVar("T")


def new_name() -> str:
    """Return an unused job name."""
    return f"job {uuid.uuid4().hex[:8]}"


class Rank:
    """An actor that can be a rank of any job. Runs one method at a time."""

    def __init__(self) -> None:
        self._coordinator: RayCoordinator | None = None

    def run(self, job: str, rank: int, size: int, timeout_seconds: float, work: Callable[[Coordinator], T]) -> T:
        """Join a job, and return the result of the work."""
        return work(RayCoordinator(job, rank, size, timeout_seconds=timeout_seconds))

    def join(self, job: str, rank: int, size: int, timeout_seconds: float = 60.0) -> int:
        """Join a job for the methods below. Return its incarnation."""
        self._coordinator = RayCoordinator(job, rank, size, timeout_seconds=timeout_seconds)
        return self._coordinator.incarnation

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Run a gather."""
        return self._joined().gather(key, payload)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Run a broadcast."""
        return self._joined().broadcast(key, payload)

    def save(self, location: Path, step: int) -> None:
        """Take part in a save by all ranks of the job."""
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=self._joined()))
        ckptcore.save(location, state(step), context=context)

    def sleep(self, seconds: float) -> None:
        """Keep the actor busy, so that it runs no other method."""
        time.sleep(seconds)

    def process(self) -> int:
        """Return the process id."""
        return os.getpid()

    def die(self) -> None:
        """End the process abruptly."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _joined(self) -> RayCoordinator:
        assert self._coordinator is not None, "this actor has joined no job"
        return self._coordinator


def state(step: int) -> dict[str, Any]:
    """Return the state that a rank saves."""
    return {"weights": np.arange(12.0) + step, "step": step}


class Ranks:
    """Numbered actors, created on first use."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._jobs: dict[int, RayJob] = {}
        self._class: Any = ray.remote(num_cpus=0)(Rank)

    def new(self, **options: object) -> Any:
        """Create an actor for one test."""
        return self._class.options(**options).remote()

    def first(self, count: int) -> list[Any]:
        """Return actors that are reused after the test."""
        while len(self._actors) < count:
            self._actors.append(self.new())
        return self._actors[:count]

    def run(self, size: int, work: Callable[[Coordinator], T], *, timeout_seconds: float) -> list[T]:
        """Run the work on every rank of a job.

        One job of each size is reused: ranks that join again begin a new incarnation.
        """
        if size not in self._jobs:
            self._jobs[size] = make_job(new_name(), size)
        name = self._jobs[size].name
        actors = self.first(size)
        done = [actor.run.remote(name, rank, size, timeout_seconds, work) for rank, actor in enumerate(actors)]
        ray.wait(done, num_returns=size)
        results: list[T] = ray.get(done)
        return results
