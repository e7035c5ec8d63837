"""Actor of a job: registers ranks, runs their exchanges, and checks that awaited ranks are alive."""

from __future__ import annotations

import asyncio
import functools
import uuid
from typing import Any, Final

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from ckptcore_ray.exchanges import EndedIncarnation, Exchanges, Outcome, RankMembership
from ckptcore_ray.progress import JobProgress

_POLL_SECONDS: Final = 0.5
"""Interval of the checks of awaited ranks."""


@functools.cache
def process_token() -> str:
    """Return an id of this process. A restarted actor has a different id."""
    return uuid.uuid4().hex


def _return_token(member: object) -> str:
    """Return the token of a rank's process. Ray runs this in the actor of the rank, between calls of its methods."""
    return process_token()


class JobActor:
    """Asynchronous Ray actor for the ranks of one job.

    `RayCoordinator` and `RayJob` call its methods.

    A job has one incarnation at a time. If a rank joins again, for example after a restart of its
    process, the next incarnation begins, and all exchanges of the previous one end. Therefore
    messages of earlier processes cannot reach exchanges of the new incarnation.
    """

    def __init__(self, name: str, size: int) -> None:
        """Start without ranks.

        Args:
            name: name of the job.
            size: number of ranks.
        """
        self._name = name
        self._size = size
        self._incarnation = 0
        self._ended = "no rank has joined"
        self._exchanges = Exchanges(size)
        self._members: dict[int, tuple[Any, str]] = {}
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._polling: asyncio.Task[None] | None = None

    async def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    async def join(self, rank: int, member: Any, token: str) -> RankMembership:
        """Add a rank to the current incarnation, and return its membership.

        If the rank has already joined the current incarnation, or if the exchanges of that incarnation have ended, the
        next incarnation begins first.

        Args:
            rank: number of the rank.
            member: handle of the actor in which the rank runs; None if the rank is not in an actor.
            token: result of `process_token` in the rank's process.
        """
        if self._incarnation == 0 or rank in self._members or self._exchanges.is_over:
            self._begin(f"rank {rank} joined the job again")
        self._members[rank] = member, token
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_ranks())
        return RankMembership(rank, self._incarnation)

    async def gather(self, membership: RankMembership, key: str, payload: bytes, seconds: float) -> Outcome:
        """See `Exchanges.gather`."""
        return self._ended_outcome(membership) or await self._exchanges.gather(membership.rank, key, payload, seconds)

    async def broadcast(self, membership: RankMembership, key: str, payload: bytes | None, seconds: float) -> Outcome:
        """See `Exchanges.broadcast`."""
        return self._ended_outcome(membership) or await self._exchanges.broadcast(
            membership.rank, key, payload, seconds
        )

    async def progress(self) -> JobProgress:
        """Return the progress of the ranks."""
        return self._exchanges.progress(self._name, self._incarnation, frozenset(self._members))

    def _begin(self, reason: str) -> None:
        """Begin the next incarnation, without members."""
        self._incarnation += 1
        self._ended = reason
        self._exchanges.end(EndedIncarnation(self._incarnation, reason))
        self._exchanges = Exchanges(self._size)
        self._members = {}
        self._probes = {}

    def _ended_outcome(self, membership: RankMembership) -> EndedIncarnation | None:
        return None if membership.incarnation == self._incarnation else EndedIncarnation(self._incarnation, self._ended)

    async def _poll_ranks(self) -> None:
        """Probe the actors of awaited ranks. Each has at most one pending probe, because a busy actor answers late."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for rank in self._exchanges.awaited() & self._members.keys():
                member, token = self._members[rank]
                if member is not None and (rank not in self._probes or self._probes[rank].done()):
                    self._probes[rank] = asyncio.create_task(self._probe(self._exchanges, rank, member, token))

    async def _probe(self, exchanges: Exchanges, rank: int, member: Any, token: str) -> None:
        """Probe an actor once. Its rank is lost if the actor failed or was restarted in another process."""
        try:
            current_token = await member.__ray_call__.remote(_return_token)
        except ActorUnavailableError:
            return  # restarting or unreachable: wait for the next probe
        except RayActorError as error:
            exchanges.lose(rank, f"its actor died: {' '.join(str(error).split())}")
        except RayError:
            return  # only the call failed, not the actor; the timeout of the exchange still applies
        else:
            if current_token != token:
                exchanges.lose(rank, "its actor died and was restarted by Ray")
