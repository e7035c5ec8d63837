"""Results of an exchange for one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Delivered", "Lost", "Missing", "Outcome", "Over", "RankMembership"]


@dataclass(frozen=True, slots=True)
class RankMembership:
    """Membership of a rank in one incarnation. Each join returns a new one.

    Attributes:
        rank: number of the rank.
        incarnation: of the job, from 1.
    """

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The exchange completed.

    Attributes:
        payloads: for the leader of a gather, those of ranks 1 and up in order; for other ranks of a
            broadcast, the leader's; otherwise empty.
    """

    payloads: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks missed the timeout.

    Attributes:
        ranks: in order.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A required rank failed, which ended this incarnation.

    Attributes:
        rank: the failed rank.
        reason: Ray's message about its actor.
    """

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """The rank belongs to an earlier incarnation.

    Attributes:
        incarnation: the current one.
        reason: why the rank's incarnation ended.
    """

    incarnation: int
    reason: str


Outcome: TypeAlias = Delivered | Missing | Lost | Over
"""Result of an exchange."""
