"""The exchanges of one incarnation of a job, on one event loop. Nothing of Ray is here."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ckptcore_ray.outcomes import Delivered, Lost, Missing, Outcome
from ckptcore_ray.progress import JobProgress, RankProgress, Waiting

__all__ = ["Exchanges"]

_Kind: TypeAlias = Literal["gather", "broadcast"]


@dataclass(slots=True, eq=False)
class _Exchange:
    """One exchange that not every rank is through with.

    Attributes:
        key: of the exchange.
        needed: the ranks whose payloads are waited for.
        came: the ranks that came to it.
        done: those of them that want nothing more of it.
        payloads: what was given and not fetched, by rank.
        given_up: whether the leader stopped waiting for what it gathers.
        waiting: by rank that waits, what tells it and since when it waits.
    """

    key: str
    needed: frozenset[int]
    came: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    payloads: dict[int, bytes] = field(default_factory=dict)
    given_up: bool = False
    waiting: dict[int, tuple[asyncio.Future[Outcome], float]] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks whose payloads are not here."""
        return tuple(sorted(self.needed - self.payloads.keys()))

    def delivered(self) -> Delivered:
        """What they gave, in order of rank; none is missing."""
        return Delivered(tuple(self.payloads[rank] for rank in sorted(self.needed)))

    def tell(self, outcome: Outcome) -> None:
        """Let everyone who waits go."""
        for future, _ in self.waiting.values():
            if not future.done():
                future.set_result(outcome)


class Exchanges:
    """Gathers and broadcasts among the ranks of one incarnation. Rank 0 leads.

    A key may come again: the ranks' first uses of it are one exchange, their second ones the next. What a rank gives to an
    exchange on which the leader has given up reaches no later one. A rank that waited in vain for a broadcast and comes again waits
    for the same; if it does not come, what the leader gave is held until the incarnation ends.

    Not thread-safe: everything is called on one event loop.
    """

    def __init__(self, size: int) -> None:
        """Begin without any exchange.

        Args:
            size: how many ranks there are.
        """
        self._size = size
        self._open: dict[tuple[_Kind, str], deque[_Exchange]] = {}
        self._dead: dict[int, str] = {}
        self._over: Outcome | None = None
        self._counts = dict.fromkeys(range(size), 0)
        self._last: dict[int, str] = {}

    async def gather(self, rank: int, key: str, payload: bytes, seconds: float) -> Outcome:
        """Give a payload, or as the leader, which gives none, wait for those of all others.

        Args:
            rank: who comes.
            key: of the exchange.
            payload: what the rank gives; the leader keeps its own to itself.
            seconds: how long the leader waits.
        """
        exchange = self._come("gather", rank, key, frozenset(range(1, self._size)))
        try:
            if rank == 0:
                return await self._wait(exchange, rank, seconds)
            if exchange.given_up:
                return Missing((rank,))
            if self._over is not None:
                return self._over
            exchange.payloads[rank] = payload
            if not exchange.missing:
                exchange.tell(Delivered())
            return Delivered()
        finally:
            if rank == 0:
                exchange.given_up = True
                exchange.payloads.clear()
            self._leave("gather", exchange, rank)

    async def broadcast(self, rank: int, key: str, payload: bytes | None, seconds: float) -> Outcome:
        """As the leader, give a payload; as another, wait for it.

        Args:
            rank: who comes.
            key: of the exchange.
            payload: what the leader gives; None from the others.
            seconds: how long the others wait.
        """
        exchange = self._come("broadcast", rank, key, frozenset({0}))
        try:
            if payload is None:
                outcome = await self._wait(exchange, rank, seconds)
                if isinstance(outcome, Missing):
                    exchange.came.remove(rank)  # it may wait once more: the leader can be a deadline later than it
                return outcome
            if self._over is not None:
                return self._over
            exchange.payloads[0] = payload
            exchange.tell(Delivered())
            return Delivered()
        finally:
            if rank in exchange.came:
                self._leave("broadcast", exchange, rank)

    def lose(self, rank: int, reason: str) -> None:
        """A rank is dead: who waits for it is told so, and with them all who wait.

        What was given is still handed out, so that who is late learns of a commit that took place. An exchange that does
        not need the dead rank goes on until somebody needs it.
        """
        self._dead.setdefault(rank, reason)
        if rank in self.awaited():
            self.end(Lost(rank, self._dead[rank]))

    def end(self, outcome: Outcome) -> None:
        """Let everyone who waits, and whoever still comes, go with an outcome; the first one stays."""
        if self._over is None:
            self._over = outcome
        for exchange in self._exchanges():
            exchange.tell(self._over)

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be agreed on."""
        return self._over is not None

    def awaited(self) -> frozenset[int]:
        """The ranks that others wait for now."""
        return frozenset(rank for exchange in self._exchanges() if exchange.waiting for rank in exchange.missing)

    def progress(self, name: str, incarnation: int, joined: frozenset[int]) -> JobProgress:
        """Where the ranks are.

        Args:
            name: of the job.
            incarnation: which one this is.
            joined: the ranks that have joined it.
        """
        now = time.monotonic()
        return JobProgress(
            name,
            incarnation,
            tuple(
                RankProgress(
                    rank,
                    "dead" if rank in self._dead else "joined" if rank in joined else "absent",
                    self._dead.get(rank, ""),
                    self._counts[rank],
                    self._last.get(rank),
                    tuple(self._waits_of(rank, now)),
                )
                for rank in range(self._size)
            ),
            sum(len(payload) for exchange in self._exchanges() for payload in exchange.payloads.values()),
        )

    def _waits_of(self, rank: int, now: float) -> Iterator[Waiting]:
        waited = [exchange for exchange in self._exchanges() if rank in exchange.waiting]
        for exchange in sorted(waited, key=lambda exchange: exchange.waiting[rank][1]):
            yield Waiting(exchange.key, exchange.missing, now - exchange.waiting[rank][1])

    def _exchanges(self) -> list[_Exchange]:
        return [exchange for queue in self._open.values() for exchange in queue]

    def _come(self, kind: _Kind, rank: int, key: str, needed: frozenset[int]) -> _Exchange:
        """The exchange that the rank's use of a key belongs to: the first to which it has not come."""
        queue = self._open.setdefault((kind, key), deque())
        exchange = next((exchange for exchange in queue if rank not in exchange.came), None)
        if exchange is None:
            exchange = _Exchange(key, needed)
            queue.append(exchange)
        exchange.came.add(rank)
        self._counts[rank] += 1
        self._last[rank] = key
        return exchange

    def _leave(self, kind: _Kind, exchange: _Exchange, rank: int) -> None:
        """A rank wants nothing more of an exchange; the last one frees what it holds."""
        exchange.done.add(rank)
        if len(exchange.done) == self._size:
            queue = self._open[kind, exchange.key]
            queue.remove(exchange)
            if not queue:
                del self._open[kind, exchange.key]

    async def _wait(self, exchange: _Exchange, rank: int, seconds: float) -> Outcome:
        """Wait until the payloads are there; give them."""
        if exchange.missing and self._over is None:
            dead = next((missing for missing in exchange.missing if missing in self._dead), None)
            if dead is not None:
                self.end(Lost(dead, self._dead[dead]))
        if not exchange.missing:
            return exchange.delivered()
        if self._over is not None:
            return self._over
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        exchange.waiting[rank] = future, time.monotonic()
        try:
            outcome = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            outcome = Missing(exchange.missing) if exchange.missing else Delivered()
        finally:
            del exchange.waiting[rank]
        return exchange.delivered() if isinstance(outcome, Delivered) else outcome
