"""Who of a job reads from storage, and gives what it has read to whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["READS", "ReadGroups", "Reads", "group_of"]


@dataclass(frozen=True, slots=True)
class ReadGroups:
    """Processes that read for each other in a load: in each group what several want is read by one of them and sent to the others.

    Attributes:
        groups: ranks, each in at most one group; who is in none reads for itself.
    """

    groups: tuple[tuple[int, ...], ...]

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """`groups` may be any sequences of ranks."""
        made = tuple([tuple(sorted(group)) for group in groups])
        ranks = [rank for group in made for rank in group]
        if len(set(ranks)) != len(ranks) or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ValueError(f"ReadGroups({groups!r}): give each rank once, in one group, as an int of 0 or more")
        object.__setattr__(self, "groups", made)


Reads: TypeAlias = Literal["all", "alone", "broadcast", "per_node"] | ReadGroups
"""Readers: each process for itself, this process without the others, one of the job, one of each host, or one of each
given group."""

READS: Final = ("all", "alone", "broadcast", "per_node")


def group_of(rank: int, reads: Reads, hosts: Sequence[str]) -> tuple[int, ...]:
    """The ranks that read for each other, of which `rank` is one.

    Args:
        rank: whose group.
        reads: who reads.
        hosts: by rank, the name of its host.
    """
    if isinstance(reads, ReadGroups):
        return next((group for group in reads.groups if rank in group), (rank,))
    if reads == "broadcast":
        return tuple(range(len(hosts)))
    if reads == "per_node":
        return tuple([other for other, host in enumerate(hosts) if host == hosts[rank]])
    return (rank,)
