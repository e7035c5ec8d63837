"""How an exchange ends for a rank, as the job's actor tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Delivered", "Lost", "Missing", "Outcome", "Over", "Seat"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a job. Every join of a rank gives it another.

    Attributes:
        rank: which rank.
        incarnation: which one of the job's, from 1.
    """

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The exchange took place.

    Attributes:
        payloads: those that the rank gets: the leader of a gather those of ranks 1 and up, in their order; who waited for a
            broadcast the leader's; else none.
    """

    payloads: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks did not come before the deadline.

    Attributes:
        ranks: which, in their order.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank that is waited for has died, and with it this incarnation.

    Attributes:
        rank: which.
        reason: what Ray says of its actor.
    """

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """The rank's place is not in the job's present incarnation.

    Attributes:
        incarnation: the present one.
        reason: why the rank's own one ended.
    """

    incarnation: int
    reason: str


Outcome: TypeAlias = Delivered | Missing | Lost | Over
"""What an exchange ends with."""
