"""Exchanges of one incarnation of a job, on one event loop. Independent of Ray."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ckptcore_ray.progress import JobProgress, RankProgress, Waiting


@dataclass(frozen=True, slots=True)
class RankMembership:
    """Membership of a rank in one incarnation. Each join returns a new membership.

    Attributes:
        rank: number of the rank.
        incarnation: number of the incarnation, from 1.
    """

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The exchange completed.

    Attributes:
        payloads: for the leader of a gather, the payloads of ranks 1 and up in order. For the other
            ranks of a broadcast, the payload of the leader. Otherwise empty.
    """

    payloads: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class MissingRanks:
    """Some ranks did not reach the exchange before the timeout.

    Attributes:
        ranks: the missing ranks, in order. A rank that reaches a gather after the timeout of the
            leader gets only its own number.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LostRank:
    """A required rank failed, which ended this incarnation.

    Attributes:
        rank: the failed rank.
        reason: how its actor failed.
    """

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndedIncarnation:
    """The rank belongs to an earlier incarnation.

    Attributes:
        incarnation: number of the current incarnation.
        reason: why the rank's incarnation ended.
    """

    incarnation: int
    reason: str


Outcome: TypeAlias = Delivered | MissingRanks | LostRank | EndedIncarnation
"""Result of an exchange."""


_Kind: TypeAlias = Literal["gather", "broadcast"]


@dataclass(slots=True, eq=False)
class _Exchange:
    """An exchange that some ranks have not finished.

    Attributes:
        key: key of the exchange.
        needed: ranks whose payloads are required.
        entered: ranks that entered the exchange.
        done: ranks that left the exchange.
        payloads: payloads that ranks have passed, by rank. Cleared when the leader leaves a gather.
        abandoned: True if the leader of a gather stopped waiting.
        waiting: for each waiting rank, its future and the start of the wait.
    """

    key: str
    needed: frozenset[int]
    entered: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    payloads: dict[int, bytes] = field(default_factory=dict)
    abandoned: bool = False
    waiting: dict[int, tuple[asyncio.Future[Outcome], float]] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose payloads are missing."""
        return tuple(sorted(self.needed - self.payloads.keys()))

    def delivered(self) -> Delivered:
        """Return the payloads in the order of the ranks. All payloads must be present."""
        return Delivered(tuple(self.payloads[rank] for rank in sorted(self.needed)))

    def finish(self, outcome: Outcome) -> None:
        """Wake all waiting ranks with an outcome."""
        for future, _ in self.waiting.values():
            if not future.done():
                future.set_result(outcome)


class Exchanges:
    """Gathers and broadcasts among the ranks of one incarnation. Rank 0 leads.

    A key can be used repeatedly: the first use by each rank belongs to the first exchange, the
    second use to the next one. If the leader of a gather times out, late payloads are discarded. If
    a rank times out in a broadcast and tries again, it waits for the same broadcast. If it does not
    try again, the payload of the leader is kept until the incarnation ends.

    Not thread-safe: all calls must be on one event loop.
    """

    def __init__(self, size: int) -> None:
        """Start without exchanges.

        Args:
            size: number of ranks.
        """
        self._size = size
        self._open: dict[tuple[_Kind, str], deque[_Exchange]] = {}
        self._failed: dict[int, str] = {}
        self._over: Outcome | None = None
        self._counts = dict.fromkeys(range(size), 0)
        self._last: dict[int, str] = {}

    async def gather(self, rank: int, key: str, payload: bytes, seconds: float) -> Outcome:
        """Gather: a rank passes its payload, and the leader waits for the payloads of all other ranks.

        Args:
            rank: the calling rank.
            key: key of the exchange.
            payload: payload of the rank; ignored for the leader.
            seconds: timeout of the leader; ignored for other ranks, which do not wait.
        """
        exchange = self._enter("gather", rank, key, frozenset(range(1, self._size)))
        try:
            if rank == 0:
                return await self._wait(exchange, rank, seconds)
            if exchange.abandoned:
                return MissingRanks((rank,))
            if self._over is not None:
                return self._over
            exchange.payloads[rank] = payload
            if not exchange.missing:
                exchange.finish(Delivered())
            return Delivered()
        finally:
            if rank == 0:
                exchange.abandoned = True
                exchange.payloads.clear()
            self._leave("gather", exchange, rank)

    async def broadcast(self, rank: int, key: str, payload: bytes | None, seconds: float) -> Outcome:
        """Broadcast: the leader passes a payload, and the other ranks wait for it.

        Args:
            rank: the calling rank.
            key: key of the exchange.
            payload: payload of the leader; None for other ranks.
            seconds: timeout of the other ranks; ignored for the leader, which does not wait.
        """
        exchange = self._enter("broadcast", rank, key, frozenset({0}))
        try:
            if payload is None:
                outcome = await self._wait(exchange, rank, seconds)
                if isinstance(outcome, MissingRanks):
                    # The rank may try again, because the leader can be late by one timeout.
                    exchange.entered.remove(rank)
                return outcome
            if self._over is not None:
                return self._over
            exchange.payloads[0] = payload
            exchange.finish(Delivered())
            return Delivered()
        finally:
            if rank in exchange.entered:
                self._leave("broadcast", exchange, rank)

    def lose(self, rank: int, reason: str) -> None:
        """Record that a rank failed. If another rank waits for it, now or later, end all exchanges.

        Until another rank waits for the failed rank, exchanges that do not need it continue.
        Payloads that were passed before the end are still delivered, so that late ranks learn about
        a completed commit.
        """
        self._failed.setdefault(rank, reason)
        if rank in self.awaited():
            self.end(LostRank(rank, self._failed[rank]))

    def end(self, outcome: Outcome) -> None:
        """End all current and future exchanges with an outcome. Has no effect if they have ended before.

        A broadcast whose payload was already passed still delivers it.
        """
        if self._over is None:
            self._over = outcome
        for exchange in self._exchanges():
            exchange.finish(self._over)

    @property
    def is_over(self) -> bool:
        """True if all exchanges have ended."""
        return self._over is not None

    def awaited(self) -> frozenset[int]:
        """Return the ranks for which other ranks wait now."""
        return frozenset(rank for exchange in self._exchanges() if exchange.waiting for rank in exchange.missing)

    def progress(self, name: str, incarnation: int, joined: frozenset[int]) -> JobProgress:
        """Return the progress of the ranks.

        Args:
            name: name of the job.
            incarnation: number of this incarnation.
            joined: ranks that have joined it.
        """
        now = time.monotonic()
        return JobProgress(
            name,
            incarnation,
            tuple(
                RankProgress(
                    rank,
                    "failed" if rank in self._failed else "joined" if rank in joined else "absent",
                    self._failed.get(rank, ""),
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

    def _enter(self, kind: _Kind, rank: int, key: str, needed: frozenset[int]) -> _Exchange:
        """Return the exchange for the rank's next use of a key: the first exchange that the rank has not entered."""
        queue = self._open.setdefault((kind, key), deque())
        exchange = next((exchange for exchange in queue if rank not in exchange.entered), None)
        if exchange is None:
            exchange = _Exchange(key, needed)
            queue.append(exchange)
        exchange.entered.add(rank)
        self._counts[rank] += 1
        self._last[rank] = key
        return exchange

    def _leave(self, kind: _Kind, exchange: _Exchange, rank: int) -> None:
        """Record that a rank has left an exchange. The last rank to leave removes the exchange."""
        exchange.done.add(rank)
        if len(exchange.done) == self._size:
            queue = self._open[kind, exchange.key]
            queue.remove(exchange)
            if not queue:
                del self._open[kind, exchange.key]

    async def _wait(self, exchange: _Exchange, rank: int, seconds: float) -> Outcome:
        """Wait for the needed payloads, and return them."""
        if exchange.missing and self._over is None:
            failed = next((missing for missing in exchange.missing if missing in self._failed), None)
            if failed is not None:
                self.end(LostRank(failed, self._failed[failed]))
        if not exchange.missing:
            return exchange.delivered()
        if self._over is not None:
            return self._over
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        exchange.waiting[rank] = future, time.monotonic()
        try:
            outcome = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            outcome = MissingRanks(exchange.missing) if exchange.missing else Delivered()
        finally:
            del exchange.waiting[rank]
        return exchange.delivered() if isinstance(outcome, Delivered) else outcome
