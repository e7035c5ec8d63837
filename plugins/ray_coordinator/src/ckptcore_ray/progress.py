"""What the driver of a job is told of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["JobProgress", "RankProgress", "RankState", "Waiting"]

RankState: TypeAlias = Literal["absent", "joined", "dead"]
"""A rank has not joined the incarnation, has joined it, or was found dead while others waited for it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An exchange in which a rank waits for others.

    Attributes:
        key: of the exchange. Those of a save begin with its location, and end with the stage that it is in.
        for_ranks: the ranks that have not come.
        seconds: how long it has waited.
    """

    key: str
    for_ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Where one rank is.

    Attributes:
        rank: which.
        state: whether it is there.
        reason: what Ray says of its death; else empty.
        exchanges: how many exchanges it has come to.
        last: the key of the newest of them; None before the first.
        waiting: those that it is in now, the oldest first.
    """

    rank: int
    state: RankState = "absent"
    reason: str = ""
    exchanges: int = 0
    last: str | None = None
    waiting: tuple[Waiting, ...] = ()


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Where the ranks of a job are.

    Attributes:
        name: of the job.
        incarnation: how many times the job was begun, by ranks that joined it again; 0 before the first joined.
        ranks: one after the other.
        held_bytes: payloads that are still to be fetched.
    """

    name: str
    incarnation: int
    ranks: tuple[RankProgress, ...]
    held_bytes: int
