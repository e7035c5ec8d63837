"""One rank of a job of Ray actors, agreeing with the others through the job's actor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.exceptions import RayError

from ckptcore.errors import CoordinationTimeoutError, PluginError, RankFailedError
from ckptcore_ray.job_actor import process_token
from ckptcore_ray.jobs import find_job, gone
from ckptcore_ray.outcomes import Delivered, Lost, Missing, Outcome, Over, Seat

__all__ = ["RayCoordinator"]

_ANSWER_SECONDS: Final = 60.0
"""How much longer than its deadline an exchange may take until the job's actor has answered."""


class RayCoordinator:
    """A rank of a job. Making one joins the job. Any thread; not the event loop of an asynchronous actor.

    A rank that joins twice, being started again or beginning again, begins the next incarnation of the job: whoever joined
    before is told so at its next exchange, and joins again by a new coordinator: that goes into a new Context, which goes to a
    new Checkpointer. `ckptcore_ray.membership.join_job` is for Contexts that need not be new.
    """

    def __init__(
        self, job: str, rank: int, size: int, *, timeout_seconds: float = 600.0, namespace: str | None = None
    ) -> None:
        """Join the job. Blocks shortly, and waits for no other rank.

        Args:
            job: the name that the driver gave to `ckptcore_ray.jobs.make_job`.
            rank, size: which rank of how many this is; rank 0 leads.
            timeout_seconds: how long an exchange waits for the others.
            namespace: Ray's namespace of the job; None: that of this process, which its driver's other actors are in.

        Raises:
            PluginError: if there is no such job, or it has not such a rank.
            RankFailedError: if the job's actor is gone.
        """
        found = find_job(job, namespace=namespace)
        if size != found.size or not 0 <= rank < size:
            raise PluginError(
                f"RayCoordinator({job!r}, rank={rank}, size={size}): the job was made for the ranks 0 to {found.size - 1}, size "
                f"{found.size}; give each actor one of them, or make the job of the size that is wanted"
            )
        context = ray.get_runtime_context()
        self._in_actor: Final = context.get_actor_id() is not None
        self._job: Final = job
        self._rank: Final = rank
        self._size: Final = size
        self._timeout_seconds: Final = timeout_seconds
        self._actor: Final[Any] = found.actor
        # Ray counts the handle that an actor has of itself as none: the job keeps no actor alive.
        member = context.current_actor if self._in_actor else None
        try:
            self._seat: Final[Seat] = self._actor.join.remote(rank, member, process_token()).future().result()
        except RayError as error:
            raise RankFailedError(gone(job, size, error)) from error

    @property
    def rank(self) -> int:
        """Which of the ranks."""
        return self._rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._size

    @property
    def incarnation(self) -> int:
        """Which incarnation of the job was joined, from 1."""
        return self._seat.incarnation

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """See `ckptcore.protocols.Coordinator`; only the leader waits.

        Raises:
            RankFailedError: if a rank that is waited for died, or the job has another incarnation by now.
        """
        if self._size == 1:
            return [payload]
        given = payload if self._rank else b""
        payloads = self._exchange(key, self._actor.gather, given)
        return None if self._rank else [payload, *payloads]

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """See `ckptcore.protocols.Coordinator`; the leader does not wait.

        Raises:
            RankFailedError: if a rank that is waited for died, or the job has another incarnation by now.
        """
        if (payload is None) == (self._rank == 0):
            raise PluginError(f"broadcast {key!r}: the leader, and nobody else, gives the payload")
        if self._size == 1 and payload is not None:
            return payload
        payloads = self._exchange(key, self._actor.broadcast, payload)
        return payloads[0] if payload is None else payload

    def _exchange(self, key: str, method: Any, payload: bytes | None) -> tuple[bytes, ...]:
        if self._in_actor and _on_event_loop():
            raise PluginError(
                f"the exchange {key!r} was to run on the event loop of an asynchronous actor, which it would stop until the "
                "other ranks come: call what saves or loads on a thread, as in await asyncio.to_thread(ckptcore.save, location, state)"
            )
        answer = method.remote(self._seat, key, payload, self._timeout_seconds).future()
        try:
            # Not by ray.get, which warns in any thread of an asynchronous actor.
            outcome: Outcome = answer.result(self._timeout_seconds + _ANSWER_SECONDS)
        except RayError as error:
            raise RankFailedError(gone(self._job, self._size, error)) from error
        except TimeoutError as error:
            raise CoordinationTimeoutError(
                f"after {self._timeout_seconds + _ANSWER_SECONDS:g} s the actor of the job {self._job!r} had not answered in the "
                f"exchange {key!r}; look whether its node can be reached"
            ) from error
        if isinstance(outcome, Delivered):
            return outcome.payloads
        raise self._error(key, outcome)

    def _error(self, key: str, outcome: Missing | Lost | Over) -> Exception:
        again = f"RayCoordinator({self._job!r}, rank, {self._size})"
        if isinstance(outcome, Lost):
            return RankFailedError(
                f"the exchange {key!r} cannot take place: rank {outcome.rank} of the job {self._job!r} is dead: {outcome.reason}; "
                f"start an actor for it again, let every rank join again by a new {again}, and load the newest checkpoint"
            )
        if isinstance(outcome, Over):
            return RankFailedError(
                f"rank {self._rank} joined incarnation {self.incarnation} of the job {self._job!r}, which is over: "
                f"{outcome.reason}, and incarnation {outcome.incarnation} began; let this rank join again by a new {again}, and "
                f"load the newest checkpoint (the exchange {key!r})"
            )
        if outcome.ranks == (self._rank,):
            return CoordinationTimeoutError(
                f"rank {self._rank} came to the exchange {key!r} of the job {self._job!r} after the leader had given up on it; "
                "look at what it was doing, or give every rank a longer timeout_seconds",
                outcome.ranks,
            )
        return CoordinationTimeoutError(
            f"after {self._timeout_seconds:g} s of the exchange {key!r}, {len(outcome.ranks)} of {self._size} ranks of the job "
            f"{self._job!r} had not come: {list(outcome.ranks)}; look at what they were doing (find_job({self._job!r}).progress())",
            outcome.ranks,
        )


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
