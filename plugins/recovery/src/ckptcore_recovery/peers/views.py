"""View: the members of a job's memory in one incarnation of the job, and the hosts that hold copies."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

from ckptcore.errors import StorageError
from ckptcore.model.tree import JSON


class Member(NamedTuple):
    """The memory server of a host.

    Attributes:
        id: identifies the memory.
        host: the host name or address.
        port: its port.
        domain: what fails together with this host, such as the name of its rack. Copies go to other domains.
        is_reader: True for a host that left the job: its blobs are read, and nothing is written there.
    """

    id: str
    host: str
    port: int
    domain: str
    is_reader: bool = False


@dataclass(frozen=True)
class View:
    """The members of a job's memory, agreed by all processes of one incarnation of the job.

    Attributes:
        epoch: the number of the incarnation.
        members: the memory servers.
        copies: the number of copies on other hosts that each blob has.
        home: the ids of the members that hold the entries. The first one decides about conditions.
    """

    epoch: int
    members: Sequence[Member]
    copies: int
    home: Sequence[str] = field(default=())

    @cached_property
    def by_id(self) -> dict[str, Member]:
        """The members by id."""
        return {member.id: member for member in self.members}

    @cached_property
    def _holders(self) -> dict[str, tuple[str, ...]]:
        return place_copies([member for member in self.members if not member.is_reader], self.copies)

    def holders(self, member_id: str | None) -> tuple[str, ...]:
        """Return the members that hold a blob, given the member on the host that writes it; that member is the first.

        Args:
            member_id: None, or the id of another host, for a process on a host without a member.
        """
        holders = self._holders
        return holders.get(member_id or "") or next(iter(holders.values()))

    def encode(self) -> dict[str, JSON]:
        """Return the view as JSON."""
        return {
            "epoch": self.epoch,
            "members": [list(member) for member in self.members],
            "copies": self.copies,
            "home": list(self.home),
        }

    @classmethod
    def decode(cls, encoded: Any) -> Self:
        """Read a view from JSON.

        Raises:
            StorageError: it is not valid.
        """
        try:
            members = [
                Member(str(name), str(host), int(port), str(domain), bool(is_reader))
                for name, host, port, domain, is_reader in encoded["members"]
            ]
            home = tuple(map(str, encoded["home"]))
            return cls(int(encoded["epoch"]), members, int(encoded["copies"]), home)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"invalid view of a job's memory: {error}") from error


def place_copies(members: Sequence[Member], copies: int) -> dict[str, tuple[str, ...]]:
    """Return the members that hold the blobs of each member: itself, and as many others as there are copies.

    The members of one blob are in different domains, so that it survives the loss of any `copies` domains. The work is
    shared: the member with the least copies is chosen first. If there are too few domains, a blob has fewer copies.

    Args:
        members: the members, in an order that all processes agree on.
        copies: the number of copies on other hosts.
    """
    by_domain: dict[str, list[Member]] = {}
    for member in members:
        by_domain.setdefault(member.domain, []).append(member)
    # In turns between domains, so that neighbours in this order are in different domains.
    rounds = itertools.zip_longest(*by_domain.values())
    order = [member for members_of_round in rounds for member in members_of_round if member is not None]
    loads = [(0, number) for number in range(len(order))]
    placed: dict[str, tuple[str, ...]] = {}
    for member in order:
        chosen = [member]
        domains = {member.domain}
        passed: list[tuple[int, int]] = []
        while len(chosen) <= min(copies, len(by_domain) - 1) and loads:
            load, number = heapq.heappop(loads)
            candidate = order[number]
            if candidate.domain in domains:
                passed.append((load, number))
                continue
            domains.add(candidate.domain)
            chosen.append(candidate)
            passed.append((load + 1, number))
        for item in passed:
            heapq.heappush(loads, item)
        placed[member.id] = tuple([other.id for other in chosen])
    return placed
