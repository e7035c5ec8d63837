"""Hosts: the processes of a job, grouped by the directory that they see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptcore.commit.target import ADMINISTRATION
from ckptcore.model.tree import JSON

__all__ = ["HOST_PROBES", "Hosts", "OnHosts", "note_key"]

HOST_PROBES: Final = f"{ADMINISTRATION}/host-"
"""How keys begin of objects that processes of a host write to find each other."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The processes of a job by the directory that they see.

    Attributes:
        groups: ranks, each in one group, ascending; the first of each speaks for its host.
    """

    groups: tuple[tuple[int, ...], ...]

    def beside(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of one, with itself."""
        return next(group for group in self.groups if rank in group)

    def first_of(self, rank: int) -> int:
        """The rank that speaks for the host of one."""
        return self.beside(rank)[0]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The ranks that speak for a host."""
        return tuple([group[0] for group in self.groups])


@dataclass(frozen=True, slots=True)
class OnHosts:
    """That a save goes to a directory of each host.

    Attributes:
        hosts: who is where.
        tell: on the leader: what goes to every process along with the root.
        hear: on every process, once the step is committed everywhere: takes that.
    """

    hosts: Hosts
    tell: Callable[[], JSON]
    hear: Callable[[JSON], None]


def note_key(save_id: str, rank: int) -> str:
    """The key of what a process tells the others on its host during a save; what is left of it goes when hosts are found again."""
    return f"{HOST_PROBES}{save_id}.{rank}"
