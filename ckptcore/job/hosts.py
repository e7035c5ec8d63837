"""Hosts: which processes of a job see the same directory, where not all do."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.commit.holding import ADMINISTRATION
from ckptcore.errors import NotSharedError
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.protocols import StorageBackend

__all__ = ["Hosts", "OnHosts", "find_hosts", "note_key"]

_PROBES: Final = f"{ADMINISTRATION}/host-"


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
    return f"{_PROBES}{save_id}.{rank}"


def find_hosts(agreement: Agreement, store: StorageBackend) -> Hosts:
    """Find out which processes see the same directory: each puts something there, and looks whose it finds. On every rank.

    Args:
        agreement: with the other processes.
        store: the storage, opened at the directory of this process.

    Raises:
        NotSharedError: if one process sees what another one put, and that does not see the same.
    """
    if agreement.size == 1:
        return Hosts(((0,),))
    token = agreement.lead("token", lambda: secrets.token_hex(8))
    key = f"{_PROBES}{token}.{agreement.rank}"
    try:
        with agreement.stage("put"):
            store.put(key, b"")
        with agreement.stage("seen") as stage:
            there = [found for found in store.list(ADMINISTRATION) if found.startswith(_PROBES)]
            stage.payload = sorted(
                int(found.rpartition(".")[2]) for found in there if found.startswith(f"{_PROBES}{token}.")
            )
        told = stage.payloads
        groups: list[list[int]] = agreement.lead("hosts", lambda: _groups(told))
        if agreement.rank == next(group[0] for group in groups if agreement.rank in group):
            store.delete([found for found in there if f"{_PROBES}{token}." not in found])  # of jobs that were killed
        return Hosts(tuple([tuple(group) for group in groups]))
    finally:
        store.delete([key])


def _groups(told: Sequence[Any]) -> list[list[int]]:
    groups: list[list[int]] = []
    for rank, seen in enumerate(told):
        if rank not in seen or any(told[other] != seen for other in seen):
            raise NotSharedError(
                f"rank {rank} sees in its near directory what the ranks {seen} put there, and they do not all see the same: expected "
                "groups of processes that share a directory, and nothing with other groups; give each host a directory of its own"
            )
        if seen[0] == rank:
            groups.append(list(seen))
    return groups
