"""Which job this process joined, so that saves and loads without a Context find it."""

from __future__ import annotations

import functools

from ckptcore.errors import PluginError
from ckptcore_ray.coordinator import RayCoordinator

__all__ = ["join_job", "joined_coordinator", "leave_job"]


class _Membership:
    """The coordinator that this process joined with, and how often it has joined; any thread."""

    def __init__(self) -> None:
        self.coordinator: RayCoordinator | None = None
        self.joins = 0


@functools.cache
def _membership() -> _Membership:
    return _Membership()


def join_job(
    job: str, rank: int, size: int, *, timeout_seconds: float = 600.0, namespace: str | None = None
) -> RayCoordinator:
    """Be a rank of a job from now on: what this process saves and loads without a coordinator, the job does together.

    Joining again takes the place of the former time: after the rank that died was started anew, every rank joins again. A process
    that did gives what it is given to a new Context: Contexts count exchanges, and those that it had count on, where those of
    the rank that is new begin.

    Args:
        job, rank, size, timeout_seconds, namespace: those of `RayCoordinator`.

    Raises:
        PluginError, RankFailedError: as `RayCoordinator` does.
    """
    membership = _membership()
    membership.coordinator = None
    coordinator = RayCoordinator(job, rank, size, timeout_seconds=timeout_seconds, namespace=namespace)
    membership.coordinator = coordinator
    membership.joins += 1
    return coordinator


def leave_job() -> None:
    """Save and load alone again. The job goes on with the rank as it is: the others wait for it where they need it."""
    _membership().coordinator = None


def joined_coordinator() -> RayCoordinator | None:
    """The coordinator of the job that this process joined; None where it joined none.

    Raises:
        PluginError: if the process joined more than once, and its Contexts may be older than the incarnation that it is in.
    """
    membership = _membership()
    if membership.coordinator is not None and membership.joins > 1:
        raise PluginError(
            f"this process joined jobs of Ray {membership.joins} times, and a Context that is older than the last time counts other "
            "exchanges than the ranks that are new: give a new one what join_job gave, Context(coordinator=join_job(...)), and that "
            "to what saves and loads"
        )
    return membership.coordinator
