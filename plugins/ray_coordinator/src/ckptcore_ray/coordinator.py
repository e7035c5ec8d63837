"""`RayCoordinator`: one rank of a job of Ray actors. The ranks communicate through the job's actor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.exceptions import RayError

from ckptcore.errors import CoordinationTimeoutError, PluginError, RankFailedError
from ckptcore_ray.exchanges import Delivered, EndedIncarnation, LostRank, MissingRanks, Outcome, RankMembership
from ckptcore_ray.job_actor import process_token
from ckptcore_ray.jobs import find_job, lost_job_message
from ckptcore_ray.progress import JobProgress

__all__ = ["RayCoordinator"]

_ANSWER_SECONDS: Final = 60.0
"""Time in seconds to wait for the answer of the job's actor, in addition to the timeout of an exchange."""


class RayCoordinator:
    """A rank of a job. Thread-safe.

    An exchange that is called on the event loop of an asynchronous actor raises an error, because
    it would block the loop.

    The constructor joins the job. If a rank joins a second time, for example after a restart, the
    next incarnation of the job begins. The current or next exchange of every other rank then raises
    an error. Each of these ranks must join again, with a new coordinator in a new Context and a new
    Checkpointer. Ranks that joined with `ckptcore_ray.membership.join_job` can keep their Contexts.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
    """

    def __init__(
        self, job: str, rank: int, size: int, *, timeout_seconds: float = 600.0, namespace: str | None = None
    ) -> None:
        """Join the job. Blocks briefly, but does not wait for other ranks.

        Args:
            job: name passed to `ckptcore_ray.jobs.make_job`.
            rank, size: number of this rank, and number of ranks. Rank 0 leads.
            timeout_seconds: maximum time that an exchange waits for other ranks.
            namespace: Ray namespace of the job; None for the namespace of this process.

        Raises:
            PluginError: if the job does not exist, has another size or lacks this rank.
            RankFailedError: if the job's actor has failed.
        """
        known = find_job(job, namespace=namespace)
        if size != known.size or not 0 <= rank < size:
            raise PluginError(
                f"RayCoordinator({job!r}, rank={rank}, size={size}): the job has size "
                f"{known.size} and ranks 0 to {known.size - 1}; give each actor one of these "
                "ranks, or create the job with another size"
            )
        context = ray.get_runtime_context()
        self._in_actor: Final = context.get_actor_id() is not None
        self._job: Final = job
        self.rank: Final = rank
        self.size: Final = size
        self._timeout_seconds: Final = timeout_seconds
        self._actor: Final[Any] = known.actor
        # Ray does not count an actor's handle to itself as a reference, so the job does not keep
        # the actors of its ranks alive.
        member = context.current_actor if self._in_actor else None
        try:
            self._membership: Final[RankMembership] = (
                self._actor.join.remote(rank, member, process_token()).future().result()
            )
        except RayError as error:
            raise RankFailedError(lost_job_message(job, size, error)) from error

    @property
    def incarnation(self) -> int:
        """Incarnation of the job that this rank joined, from 1."""
        return self._membership.incarnation

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Gather payloads at the leader; only the leader waits.

        See `ckptcore.protocols.Coordinator`.

        Raises:
            RankFailedError: if a required rank failed, or if a new incarnation of the job began.
        """
        if self.size == 1:
            return [payload]
        given = payload if self.rank else b""
        payloads = self._exchange(key, self._actor.gather, given)
        return None if self.rank else [payload, *payloads]

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Send the leader's payload to all; the leader does not wait.

        See `ckptcore.protocols.Coordinator`.

        Raises:
            RankFailedError: if a required rank failed, or if a new incarnation of the job began.
        """
        if (payload is None) == (self.rank == 0):
            raise PluginError(f"broadcast {key!r}: the leader must pass a payload, and other ranks must not")
        if self.size == 1 and payload is not None:
            return payload
        payloads = self._exchange(key, self._actor.broadcast, payload)
        return payloads[0] if payload is None else payload

    def awaited(self, key: str) -> Sequence[int]:
        """Return the ranks for which this rank waits in an exchange. See `ckptcore.protocols.ReportsAwaited`.

        Raises:
            RankFailedError: if the job's actor has failed.
        """
        try:
            progress: JobProgress = self._actor.progress.remote().future().result(_ANSWER_SECONDS)
        except (RayError, TimeoutError) as error:
            raise RankFailedError(lost_job_message(self._job, self.size, error)) from error
        waits = progress.ranks[self.rank].waiting
        return next((wait.for_ranks for wait in waits if wait.key == key), ())

    def _exchange(self, key: str, method: Any, payload: bytes | None) -> tuple[bytes, ...]:
        if self._in_actor and _on_event_loop():
            raise PluginError(
                f"the exchange {key!r} would block the event loop of an asynchronous actor; "
                "save and load on a thread, as in await asyncio.to_thread(ckptcore.save, "
                "location, state)"
            )
        answer = method.remote(self._membership, key, payload, self._timeout_seconds).future()
        try:
            # Not `ray.get`, which logs a warning in every thread of an asynchronous actor.
            outcome: Outcome = answer.result(self._timeout_seconds + _ANSWER_SECONDS)
        except RayError as error:
            raise RankFailedError(lost_job_message(self._job, self.size, error)) from error
        except TimeoutError as error:
            raise CoordinationTimeoutError(
                f"the actor of the job {self._job!r} did not answer in the exchange {key!r} "
                f"within {self._timeout_seconds + _ANSWER_SECONDS:g} s; check that its node "
                "can be reached"
            ) from error
        if isinstance(outcome, Delivered):
            return outcome.payloads
        raise self._outcome_error(key, outcome)

    def _outcome_error(self, key: str, outcome: MissingRanks | LostRank | EndedIncarnation) -> Exception:
        again = f"RayCoordinator({self._job!r}, rank, {self.size})"
        if isinstance(outcome, LostRank):
            return RankFailedError(
                f"rank {outcome.rank} of the job {self._job!r} failed, so the exchange {key!r} "
                f"cannot complete: {outcome.reason}; restart its actor, join again on every "
                f"rank with a new {again}, and load the newest checkpoint"
            )
        if isinstance(outcome, EndedIncarnation):
            return RankFailedError(
                f"incarnation {self.incarnation} of the job {self._job!r}, which rank "
                f"{self.rank} joined, has ended: {outcome.reason}, and incarnation "
                f"{outcome.incarnation} began; join again with a new {again}, and load the "
                f"newest checkpoint (the exchange {key!r})"
            )
        if outcome.ranks == (self.rank,):
            return CoordinationTimeoutError(
                f"rank {self.rank} reached the exchange {key!r} of the job {self._job!r} "
                "after the leader's timeout; check why it was late, or set a longer "
                "timeout_seconds on every rank",
                outcome.ranks,
            )
        return CoordinationTimeoutError(
            f"{len(outcome.ranks)} of {self.size} ranks of the job {self._job!r} did not "
            f"reach the exchange {key!r} within {self._timeout_seconds:g} s: "
            f"{list(outcome.ranks)}; check their logs, and find_job({self._job!r}).progress(). If they were only "
            "late, set a longer timeout_seconds on every rank",
            outcome.ranks,
        )


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
