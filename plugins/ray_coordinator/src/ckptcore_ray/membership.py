"""Which job this process joined, so that saves and loads without a Context find it."""

from __future__ import annotations

import functools

from ckptcore_ray.coordinator import RayCoordinator

__all__ = ["join_job", "joined_coordinator", "leave_job"]


class _Membership:
    """The coordinator that this process joined with last; any thread."""

    def __init__(self) -> None:
        self.coordinator: RayCoordinator | None = None


@functools.cache
def _membership() -> _Membership:
    return _Membership()


def join_job(
    job: str, rank: int, size: int, *, timeout_seconds: float = 600.0, namespace: str | None = None
) -> RayCoordinator:
    """Be a rank of a job from now on: what this process saves and loads without a coordinator, the job does together.

    Joining again takes the place of the former time: after the rank that died was started anew, every rank joins again. Contexts without a
    coordinator go on in the new incarnation of the job; a Checkpointer belongs to the former one, and a new one takes its place.

    Args:
        job, rank, size, timeout_seconds, namespace: those of `RayCoordinator`.

    Raises:
        PluginError, RankFailedError: as `RayCoordinator` does.
    """
    membership = _membership()
    membership.coordinator = None
    coordinator = RayCoordinator(job, rank, size, timeout_seconds=timeout_seconds, namespace=namespace)
    membership.coordinator = coordinator
    return coordinator


def leave_job() -> None:
    """Save and load alone again. The job goes on with the rank as it is: the others wait for it where they need it."""
    _membership().coordinator = None


def joined_coordinator() -> RayCoordinator | None:
    """The coordinator of the job that this process joined, the same until it joins again; None where it joined none."""
    return _membership().coordinator
