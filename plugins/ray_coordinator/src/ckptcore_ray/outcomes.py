"""Results of an exchange for one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class RankMembership:
    """Membership of a rank in one incarnation. Each join returns a new one.

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
        ranks: these ranks, in order. A rank that reaches a gather after the timeout of the leader
            gets only its own number.
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
