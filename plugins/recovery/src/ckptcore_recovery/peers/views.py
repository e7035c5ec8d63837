"""View: the members of a job's memory in one incarnation of the job, and the members that hold entries and blobs."""

from __future__ import annotations

import heapq
import itertools
import json
import zlib
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import xxhash

from ckptcore.errors import StorageError

_SHOWN: Final = 20
_VIEW_BYTES: Final = 1 << 28
"""The maximum bytes of a view as JSON; it is sent compressed."""


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
        copies: the number of failure domains that may be lost.
        needed: the number of members that are needed to read a blob: 1 if each holder has a copy, more if each holder
            has a fragment of an erasure code.
    """

    epoch: int
    members: Sequence[Member]
    copies: int
    needed: int = 1

    @cached_property
    def by_id(self) -> dict[str, Member]:
        """The members by id."""
        return {member.id: member for member in self.members}

    @cached_property
    def writers(self) -> Sequence[Member]:
        """The members on hosts of the job."""
        return [member for member in self.members if not member.is_reader]

    @property
    def survivable(self) -> int:
        """The number of failure domains that may be lost: fewer than `copies` if there are too few of them."""
        return min(self.copies, len({member.domain for member in self.writers}) - 1)

    def places(self, ids: Container[str]) -> str:
        """Return the addresses of members, at most 20, for a message."""
        places = [f"{member.host}:{member.port}" for member in self.members if member.id in ids]
        return ", ".join(places[:_SHOWN]) + (" and others" if len(places) > _SHOWN else "")

    @cached_property
    def _holders(self) -> dict[str, tuple[str, ...]]:
        return place(self.writers, self.needed + self.copies)

    @cached_property
    def _homes(self) -> Sequence[tuple[str, ...]]:
        placed = self._holders if self.needed == 1 else place(self.writers, 1 + self.copies)
        return [placed[member.id] for member in self.writers]

    def holders(self, member_id: str | None) -> tuple[str, ...]:
        """Return the members that hold a blob, given the member on the host that writes it; that member is the first.

        Args:
            member_id: None, or the id of another host, for a process on a host without a member.
        """
        holders = self._holders
        return holders.get(member_id or "") or next(iter(holders.values()))

    def home_number(self, key: str) -> int:
        """Return the position in `writers` of the member that decides about conditions of a key.

        Keys are spread over all members, except those in the internal directory of a run, which are few.
        """
        if is_internal(key):
            return 0
        return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) % len(self.writers)

    def home(self, key: str) -> tuple[str, ...]:
        """Return the ids of the members that hold the entry of a key. The first one decides about conditions."""
        return self._homes[self.home_number(key)]

    def deciding(self, key: str, lost: Container[str] = ()) -> str | None:
        """Return the first member that holds the entry of a key and is not lost; None if all are."""
        return next((name for name in self.home(key) if name not in lost), None)

    def knows_all_without(self, lost: Collection[str]) -> bool:
        """Return True if the entry of each key is on a member that is not lost."""
        missing = set(lost)
        return not any(missing.issuperset(home) for home in self._homes)

    def keeps_all_without(self, lost: Collection[str]) -> bool:
        """Return True if each entry is known, and each blob that was written with this view can be read."""
        missing = set(lost)
        return self.knows_all_without(lost) and all(
            len(missing.intersection(holders)) <= len(holders) - self.needed for holders in self._holders.values()
        )

    def encode(self) -> bytes:
        """Return the view as compressed JSON."""
        members = [
            [name, host, port, domain if domain != name else None, is_reader]
            for name, host, port, domain, is_reader in self.members
        ]
        stated = {"epoch": self.epoch, "members": members, "copies": self.copies, "needed": self.needed}
        return zlib.compress(json.dumps(stated).encode("ascii"))

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Read a view.

        Raises:
            StorageError: it is not valid.
        """
        try:
            decompressed = zlib.decompressobj()
            stated: Any = json.loads(decompressed.decompress(encoded, _VIEW_BYTES))
            members = [
                Member(str(name), str(host), int(port), str(name if domain is None else domain), bool(is_reader))
                for name, host, port, domain, is_reader in stated["members"]
            ]
            if all(member.is_reader for member in members):
                raise ValueError("it has no members that can write")
            return cls(int(stated["epoch"]), members, int(stated["copies"]), int(stated["needed"]))
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise StorageError(f"invalid view of a job's memory: {error}") from error


INTERNAL_DIRECTORY: Final = ".ckptcore"
"""`ckptcore.commit.names.INTERNAL_DIRECTORY`. Servers do not import NumPy: jobs wait for the server of a spare host."""


def is_internal(key: str) -> bool:
    """Return True for a key, or the prefix of keys, in the internal directory of a run: its locks and pins."""
    return f"/{INTERNAL_DIRECTORY}/" in f"/{key}"


def place(members: Sequence[Member], count: int) -> dict[str, tuple[str, ...]]:
    """Return the members that hold what belongs to each member: itself, and others in different domains.

    The work is shared: the member that holds the least for others is chosen first, and of several the next one in a
    ring. If there are too few domains, fewer members are returned.

    Args:
        members: the members, in an order that all processes agree on.
        count: the number of members, that member included.
    """
    by_domain: dict[str, list[Member]] = {}
    for member in members:
        by_domain.setdefault(member.domain, []).append(member)
    # In turns between domains, so that neighbours in this order are in different domains.
    rounds = itertools.zip_longest(*by_domain.values())
    order = [member for members_of_round in rounds for member in members_of_round if member is not None]
    loads: dict[str, list[tuple[int, int]]] = {}
    """For each domain a heap of its members, by what they hold for others and by their place in the ring."""
    for number, member in enumerate(order):
        loads.setdefault(member.domain, []).append((0, number))
    least = [(*heap[0], domain) for domain, heap in loads.items()]
    heapq.heapify(least)
    placed: dict[str, tuple[str, ...]] = {}
    for turn, member in enumerate(order):
        chosen, domains = [member.id], []
        while len(chosen) < min(count, len(by_domain)):
            load, number, domain = heapq.heappop(least)
            if number <= turn:  # it had its turn: in the ring it comes after all others
                heapq.heapreplace(loads[domain], (load, number + len(order)))
                heapq.heappush(least, (*loads[domain][0], domain))
                continue
            domains.append(domain)
            if domain != member.domain:
                chosen.append(order[number % len(order)].id)
                heapq.heapreplace(loads[domain], (load + 1, number))
        for domain in domains:
            heapq.heappush(least, (*loads[domain][0], domain))
        placed[member.id] = tuple(chosen)
    return placed
