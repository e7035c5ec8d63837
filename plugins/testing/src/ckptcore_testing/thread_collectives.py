"""A fake of the collectives of a framework: ranks that are threads of one process send each other bytes through memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptcore.errors import PluginError, RankFailedError
from ckptcore.model import HostArray, Pending, Ready

__all__ = ["ThreadCollectives", "ThreadNetwork"]


class ThreadNetwork:
    """What the ranks of a `ThreadJob` send each other bytes over. Any thread.

    Attributes:
        sent: the rank, the members and the bytes of each broadcast, in the order in which senders came.

    Args:
        size: how many ranks.
        timeout_seconds: how long a rank waits for the sender.
    """

    def __init__(self, size: int, *, timeout_seconds: float = 60.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.sent: list[tuple[int, tuple[int, ...], int]] = []
        self._changed = threading.Condition()
        self._given: dict[_Place, tuple[int, bytes]] = {}

    def collectives(self, rank: int) -> ThreadCollectives:
        """Those of one rank."""
        return ThreadCollectives(self, rank)

    def _give(self, place: _Place, rank: int, data: HostArray) -> None:
        with self._changed:
            self.sent.append((rank, place.members, data.nbytes))
            self._given[place] = rank, data.tobytes()
            self._changed.notify_all()

    def _take(self, place: _Place, sender: int, data: HostArray) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        with self._changed:
            while place not in self._given:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    raise RankFailedError(f"rank {sender} did not send {place} in {self.timeout_seconds:g} s")
            found, given = self._given[place]
        if found != sender or len(given) != data.nbytes:
            raise PluginError(
                f"{place} is one of {len(given)} bytes from rank {found}: expected {data.nbytes} bytes from rank "
                f"{sender}; all members give the same"
            )
        data[:] = np.frombuffer(given, np.uint8)


@dataclass(frozen=True, slots=True)
class _Place:
    """One broadcast of many: of which connection, among whom, and the how many-th it is there."""

    key: str
    members: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"broadcast {self.number} among {list(self.members)}"


class ThreadCollectives:
    """One rank of a `ThreadNetwork`."""

    name = "threads of one process"

    def __init__(self, network: ThreadNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    @property
    def rank(self) -> int:
        """Which of the ranks."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._network.size

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> _ThreadChannels:
        """See `ckptcore.protocols.Collectives`; waits for nobody."""
        return _ThreadChannels(self._network, self._rank, key, [tuple(group) for group in groups])


class _ThreadChannels:
    depth = 2

    def __init__(self, network: ThreadNetwork, rank: int, key: str, groups: Sequence[tuple[int, ...]]) -> None:
        self._network = network
        self._rank = rank
        self._key = key
        self._groups = groups
        self._counts = [0] * len(groups)

    def memory(self, nbytes: int) -> HostArray:
        """See `ckptcore.protocols.Channels`."""
        return np.full(nbytes, 0xA5, np.uint8)

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """See `ckptcore.protocols.Channels`; the sender's bytes are taken at once."""
        members = self._groups[group]
        if sender not in members or self._rank not in members:
            raise PluginError(f"rank {self._rank} takes part in a broadcast from rank {sender} among {list(members)}")
        place = _Place(self._key, members, self._counts[group])
        self._counts[group] += 1
        if sender == self._rank:
            self._network._give(place, sender, data)
            return Ready(None)
        return _Arrival(self._network, place, sender, data)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    network: ThreadNetwork
    place: _Place
    sender: int
    data: HostArray

    def result(self) -> None:
        """Wait for the sender."""
        self.network._take(self.place, self.sender, self.data)
