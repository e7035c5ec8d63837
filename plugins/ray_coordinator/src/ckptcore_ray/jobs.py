"""`RayJob`: creates, observes and stops a job, for the driver."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ckptcore.errors import PluginError, RankFailedError
from ckptcore_ray.job_actor import JobActor
from ckptcore_ray.progress import JobProgress

__all__ = ["RayJob", "find_job", "lost_job_message", "make_job"]

_WAITS_PER_RANK: Final = 64
"""Assumed maximum of simultaneous exchanges of one rank. Each thread that saves has one exchange at a time."""


@dataclass(frozen=True, slots=True)
class RayJob:
    """A job of several ranks. If it is used in a ``with`` statement, the job stops at the end of the block.

    The driver must keep a reference to the object that `make_job` returned. Ray terminates the
    actor of the job when this object is deleted.

    Attributes:
        name: name of the job.
        size: number of ranks.
        namespace: Ray namespace of the job's actor; None for the namespace of the driver.
        actor: handle of the actor through which the ranks communicate.
    """

    name: str
    size: int
    namespace: str | None
    actor: Any

    def progress(self) -> JobProgress:
        """Return the progress of the ranks: which ranks have joined, are waiting or have failed. Blocks briefly.

        Raises:
            RankFailedError: if the job's actor has failed.
        """
        try:
            progress: JobProgress = self.actor.progress.remote().future().result()
        except RayError as error:
            raise RankFailedError(lost_job_message(self.name, self.size, error)) from error
        return progress

    def stop(self) -> None:
        """Stop the job. Later exchanges, and ranks that wait now, raise an error."""
        ray.kill(self.actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def make_job(name: str, size: int, *, namespace: str | None = None) -> RayJob:
    """Create a job that actors can join. Call this in the driver. Blocks until the actor of the job runs.

    That actor requests no CPUs from Ray, and runs on the node of the driver if possible. The driver
    needs no accelerator.

    Args:
        name: name of the job, unique in the namespace.
        size: number of ranks.
        namespace: Ray namespace of the job; None for the namespace of the driver.

    Raises:
        PluginError: if a job of this name exists, or if its actor does not start.
        ValueError: if the size is less than 1.
    """
    if size < 1:
        raise ValueError(f"make_job({name!r}, size={size}): expected at least 1 rank")
    actor_class: Any = ray.remote(JobActor)
    options = actor_class.options(
        name=_actor_name(name),
        namespace=namespace,
        num_cpus=0,
        # Every waiting exchange occupies one call of the actor. 1000 is Ray's default for
        # asynchronous actors.
        max_concurrency=1000 + _WAITS_PER_RANK * size,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
    )
    try:
        actor = options.remote(name, size)
    except ValueError as error:
        raise PluginError(
            f"make_job({name!r}): Ray refused its actor: {error}; if a job of this name "
            f"exists, stop it with find_job({name!r}).stop(), or use another name"
        ) from error
    try:
        actor.size.remote().future().result()
    except RayError as error:
        raise PluginError(
            f"make_job({name!r}): its actor did not start: {error}; install ckptcore-ray on every node"
        ) from error
    return RayJob(name, size, namespace, actor)


def find_job(name: str, *, namespace: str | None = None) -> RayJob:
    """Return the job of this name, in any Ray process. The result does not keep the job alive.

    Args:
        name: name of the job.
        namespace: Ray namespace of the job; None for the namespace of this process.

    Raises:
        PluginError: if there is no such job.
        RankFailedError: if the job's actor has failed.
    """
    try:
        actor: Any = ray.get_actor(_actor_name(name), namespace)
    except ValueError as error:
        where = "this process's namespace" if namespace is None else f"the namespace {namespace!r}"
        raise PluginError(
            f"no job {name!r} in {where} of Ray: call job = make_job({name!r}, size) in the "
            "driver first, and keep the result while the job runs"
        ) from error
    try:
        size: int = actor.size.remote().future().result()
    except RayError as error:
        raise RankFailedError(lost_job_message(name, None, error)) from error
    return RayJob(name, size, namespace, actor)


def _actor_name(job: str) -> str:
    """Return the name of a job's actor in Ray."""
    return f"ckptcore job {job}"


def lost_job_message(job: str, size: int | None, error: Exception) -> str:
    """Return the error message for a job whose actor has failed."""
    return (
        f"the actor of the job {job!r} cannot be reached: {' '.join(str(error).split())}; call "
        f"make_job({job!r}, {'size' if size is None else size}) in the driver again, and join "
        "again on every rank"
    )
