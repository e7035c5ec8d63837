"""What the driver has of a job: it makes it, follows it and stops it."""

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

__all__ = ["RayJob", "find_job", "gone", "make_job"]

_WAITS_PER_RANK: Final = 64
"""How many exchanges of one rank can be open at once: each thread that saves has one."""


@dataclass(frozen=True, slots=True)
class RayJob:
    """A job of several ranks. `make_job` gives it; as a context manager it stops the job at the end.

    The driver keeps it: the job's actor ends when nobody has the one that `make_job` gave, as Ray's actors do.

    Attributes:
        name: of the job.
        size: how many ranks it has.
        namespace: that of its actor; None: that of the driver's Ray job.
        actor: Ray's handle of the actor through which the ranks agree.
    """

    name: str
    size: int
    namespace: str | None
    actor: Any

    def progress(self) -> JobProgress:
        """Where the ranks are: who has joined, who is in which exchange of which save, who is dead. Blocks shortly.

        Raises:
            RankFailedError: if the job's actor is gone.
        """
        try:
            told: JobProgress = self.actor.progress.remote().future().result()
        except RayError as error:
            raise RankFailedError(gone(self.name, self.size, error)) from error
        return told

    def stop(self) -> None:
        """End the job: ranks that wait, or come later, are told so."""
        ray.kill(self.actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def make_job(name: str, size: int, *, namespace: str | None = None) -> RayJob:
    """Make a job that actors can join. For the driver, which needs nothing of what they work with; returns once it is there.

    It takes no CPU in Ray's count, and runs on the driver's node if it can.

    Args:
        name: of the job, one at a time of this name.
        size: how many ranks it has.
        namespace: Ray's namespace for it; None: that of the driver, where its own actors find it.

    Raises:
        PluginError: if there is a job of this name.
        ValueError: if a job cannot have this size.
    """
    if size < 1:
        raise ValueError(f"make_job({name!r}, size={size}): expected at least 1 rank")
    actor_class: Any = ray.remote(JobActor)
    options = actor_class.options(
        name=_actor_name(name),
        namespace=namespace,
        num_cpus=0,
        max_concurrency=1000 + _WAITS_PER_RANK * size,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
    )
    try:
        actor = options.remote(name, size)
    except ValueError as error:
        raise PluginError(
            f"make_job({name!r}): Ray refused its actor: {error}; if there is a job of this name, stop it by "
            f"find_job({name!r}).stop(), or take another name"
        ) from error
    try:
        actor.size.remote().future().result()
    except RayError as error:
        raise PluginError(
            f"make_job({name!r}): its actor did not start: {error}; ckptcore-ray must be installed on every node"
        ) from error
    return RayJob(name, size, namespace, actor)


def find_job(name: str, *, namespace: str | None = None) -> RayJob:
    """The job of this name, from any process of Ray. Holding it does not keep the job.

    Args:
        name: that `make_job` was given.
        namespace: that `make_job` was given.

    Raises:
        PluginError: if there is none.
        RankFailedError: if its actor is gone.
    """
    try:
        actor: Any = ray.get_actor(_actor_name(name), namespace)
    except ValueError as error:
        where = "this process's namespace" if namespace is None else f"the namespace {namespace!r}"
        raise PluginError(
            f"there is no job {name!r} in {where} of Ray: make it in the driver first, job = make_job({name!r}, size), and keep "
            "what that gives as long as the job lasts"
        ) from error
    try:
        size: int = actor.size.remote().future().result()
    except RayError as error:
        raise RankFailedError(gone(name, None, error)) from error
    return RayJob(name, size, namespace, actor)


def _actor_name(job: str) -> str:
    """The name of a job's actor in Ray."""
    return f"ckptcore job {job}"


def gone(job: str, size: int | None, error: Exception) -> str:
    """What to say where the actor of a job is gone: the text of an error."""
    return (
        f"the job {job!r} is over, as its actor cannot be reached: {' '.join(str(error).split())}; let the driver make it again, "
        f"make_job({job!r}, {'size' if size is None else size}), and every rank join it again"
    )
