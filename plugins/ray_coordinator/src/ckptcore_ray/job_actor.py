"""The actor through which the ranks of a job agree: it seats them, holds their exchanges, and looks after those awaited."""

from __future__ import annotations

import asyncio
import functools
import uuid
from typing import Any, Final

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from ckptcore_ray.exchanges import Exchanges
from ckptcore_ray.outcomes import Outcome, Over, Seat
from ckptcore_ray.progress import JobProgress

__all__ = ["JobActor", "process_token"]

_LOOK_SECONDS: Final = 0.5
"""How often the actor looks whether ranks that are waited for live."""


@functools.cache
def process_token() -> str:
    """A name of this process that no other has, nor the one that Ray starts in its place."""
    return uuid.uuid4().hex


def _ask_for_token(member: object) -> str:
    """What a member's actor carries out between its own methods."""
    return process_token()


class JobActor:
    """The ranks of one job, as an asynchronous Ray actor. Its methods are for `RayCoordinator` and `RayJob`.

    A job has one incarnation at a time. A rank that joins and is in it already was started again, or begins again: the
    next incarnation begins with it, and the exchanges of the former one end. So nothing that a former process of a rank,
    or one that does not know yet, still says can reach the exchanges of the new one.
    """

    def __init__(self, name: str, size: int) -> None:
        """Wait for ranks.

        Args:
            name: of the job.
            size: how many ranks it has.
        """
        self._name = name
        self._size = size
        self._incarnation = 0
        self._ended = "no rank has joined"
        self._exchanges = Exchanges(size)
        self._members: dict[int, tuple[Any, str]] = {}
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def size(self) -> int:
        """How many ranks the job has."""
        return self._size

    async def join(self, rank: int, member: Any, token: str) -> Seat:
        """Give a rank a place.

        Args:
            rank: which.
            member: the handle of the actor that it is; None if it is none.
            token: the `process_token` of its process.
        """
        if self._incarnation == 0 or rank in self._members or self._exchanges.is_over:
            self._begin(f"rank {rank} joined the job again")
        self._members[rank] = member, token
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return Seat(rank, self._incarnation)

    async def gather(self, seat: Seat, key: str, payload: bytes, seconds: float) -> Outcome:
        """See `Exchanges.gather`."""
        return self._refused(seat) or await self._exchanges.gather(seat.rank, key, payload, seconds)

    async def broadcast(self, seat: Seat, key: str, payload: bytes | None, seconds: float) -> Outcome:
        """See `Exchanges.broadcast`."""
        return self._refused(seat) or await self._exchanges.broadcast(seat.rank, key, payload, seconds)

    async def progress(self) -> JobProgress:
        """Where the ranks are."""
        return self._exchanges.progress(self._name, self._incarnation, frozenset(self._members))

    def _begin(self, reason: str) -> None:
        """The next incarnation, of which nobody is a member."""
        self._incarnation += 1
        self._ended = reason
        self._exchanges.end(Over(self._incarnation, reason))
        self._exchanges = Exchanges(self._size)
        self._members = {}
        self._asked = {}

    def _refused(self, seat: Seat) -> Over | None:
        return None if seat.incarnation == self._incarnation else Over(self._incarnation, self._ended)

    async def _look(self) -> None:
        """Ask the actors that are waited for whether they live, each once at a time: while one works, its answer waits."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for rank in self._exchanges.awaited() & self._members.keys():
                member, token = self._members[rank]
                if member is not None and (rank not in self._asked or self._asked[rank].done()):
                    self._asked[rank] = asyncio.create_task(self._ask(self._exchanges, rank, member, token))

    async def _ask(self, exchanges: Exchanges, rank: int, member: Any, token: str) -> None:
        """Ask an actor once; if it is dead, or another process by now, its rank is lost."""
        try:
            found = await member.__ray_call__.remote(_ask_for_token)
        except ActorUnavailableError:
            return  # Ray cannot tell: it restarts, or cannot be reached; the next answer tells
        except RayActorError as error:
            exchanges.lose(rank, f"its actor died: {' '.join(str(error).split())}")
        except RayError:
            return  # the question failed there, and not the actor; the deadline is what is left
        else:
            if found != token:
                exchanges.lose(rank, "its actor died and was restarted by Ray")
