"""Progress of a job's ranks, for the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["JobProgress", "RankProgress", "RankState", "Waiting"]

RankState: TypeAlias = Literal["absent", "joined", "failed"]
"""State of a rank in the current incarnation: not joined, joined, or failed.

A failure is detected only while other ranks wait for the rank.
"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An exchange in which a rank waits for others.

    Attributes:
        key: key of the exchange. For a save it begins with the location and ends with the stage.
        for_ranks: ranks whose payloads are missing, because they have not reached the exchange.
        seconds: duration of the wait until now.
    """

    key: str
    for_ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Progress of one rank.

    Attributes:
        rank: number of the rank.
        state: state of the rank.
        reason: how the actor of the rank failed. Empty if it did not fail.
        exchanges: number of exchanges that the rank has entered. A broadcast that it tries again after a timeout counts
            again.
        last: key of the latest exchange; None before the first.
        waiting: exchanges in which the rank waits, oldest first.
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
        name: name of the job.
        incarnation: number of the current incarnation; 0 before the first rank joined.
        ranks: progress of each rank, in order.
        held_bytes: total size of the payloads that the actor of the job still keeps for other
            ranks.
    """

    name: str
    incarnation: int
    ranks: tuple[RankProgress, ...]
    held_bytes: int
