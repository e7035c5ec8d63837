"""Join a job as a rank, for saves and loads without a coordinator in their Context."""

from __future__ import annotations

import functools

from ckptcore_ray.coordinator import RayCoordinator

__all__ = ["join_job", "joined_coordinator", "leave_job"]


class _Membership:
    """The latest coordinator of this process. Thread-safe."""

    def __init__(self) -> None:
        self.coordinator: RayCoordinator | None = None


@functools.cache
def _membership() -> _Membership:
    return _Membership()


def join_job(
    job: str, rank: int, size: int, *, timeout_seconds: float = 600.0, namespace: str | None = None
) -> RayCoordinator:
    """Join a job as a rank. Afterwards saves and loads without a coordinator run on the whole job.

    After a restart of one rank, every rank must join again. Contexts without a coordinator then use
    the new incarnation of the job. A Checkpointer belongs to one incarnation: create a new one.

    Args:
        job, rank, size, timeout_seconds, namespace: see `RayCoordinator`.

    Raises:
        PluginError, RankFailedError: see `RayCoordinator`.
    """
    membership = _membership()
    membership.coordinator = None
    coordinator = RayCoordinator(job, rank, size, timeout_seconds=timeout_seconds, namespace=namespace)
    membership.coordinator = coordinator
    return coordinator


def leave_job() -> None:
    """Make saves and loads of this process independent of the job. The opposite of `join_job`.

    The rank stays a member of the job, so other ranks still wait for it.
    """
    _membership().coordinator = None


def joined_coordinator() -> RayCoordinator | None:
    """Return the coordinator of the job that this process joined last, or None."""
    return _membership().coordinator
