"""Progress of a job's ranks, for the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["JobProgress", "RankProgress", "RankState", "Waiting"]

RankState: TypeAlias = Literal["absent", "joined", "failed"]
"""State of a rank in the incarnation: not joined, joined, or failed while others waited for it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An exchange in which a rank waits for others.

    Attributes:
        key: of the exchange. For a save it begins with the location and ends with the stage.
        for_ranks: ranks that have not reached it.
        seconds: duration of the wait.
    """

    key: str
    for_ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Progress of one rank.

    Attributes:
        rank: number of the rank.
        state: of the rank.
        reason: Ray's message if it failed; else empty.
        exchanges: number of exchanges that it has entered.
        last: key of the latest exchange; None before the first.
        waiting: exchanges in which it waits, oldest first.
    """

    rank: int
    state: RankState = "absent"
    reason: str = ""
    exchanges: int = 0
    last: str | None = None
    waiting: tuple[Waiting, ...] = ()


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of the ranks of a job.

    Attributes:
        name: of the job.
        incarnation: number of the incarnation; 0 before the first rank joined.
        ranks: in order.
        held_bytes: size of payloads not yet delivered.
    """

    name: str
    incarnation: int
    ranks: tuple[RankProgress, ...]
    held_bytes: int
