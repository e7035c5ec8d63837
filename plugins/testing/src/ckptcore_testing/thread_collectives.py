"""Fake collectives: the ranks are threads of one process and exchange bytes through memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptcore.errors import PluginError, RankFailedError
from ckptcore.model import HostArray, Pending, Ready


class ThreadNetwork:
    """The connection between the ranks of a `ThreadJob`. Thread-safe.

    Attributes:
        sent: sender, members and number of bytes of each broadcast, in order.

    Args:
        size: the number of ranks.
        timeout_seconds: how long a rank waits for the sender.
    """

    def __init__(self, size: int, *, timeout_seconds: float = 60.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.sent: list[tuple[int, tuple[int, ...], int]] = []
        self._changed = threading.Condition()
        self._given: dict[_BroadcastId, tuple[int, bytes]] = {}

    def collectives(self, rank: int) -> ThreadCollectives:
        """Return the collectives of one rank."""
        return ThreadCollectives(self, rank)

    def _give(self, place: _BroadcastId, rank: int, data: HostArray) -> None:
        with self._changed:
            self.sent.append((rank, place.members, data.nbytes))
            self._given[place] = rank, data.tobytes()
            self._changed.notify_all()

    def _take(self, place: _BroadcastId, sender: int, data: HostArray) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        with self._changed:
            while place not in self._given:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    raise RankFailedError(f"rank {sender} did not send {place} in {self.timeout_seconds:g} s")
            origin, given = self._given[place]
        if origin != sender or len(given) != data.nbytes:
            raise PluginError(
                f"{place} has {len(given)} bytes from rank {origin}, expected {data.nbytes} bytes from rank {sender}. "
                "All members must call it with the same arguments"
            )
        data[:] = np.frombuffer(given, np.uint8)


@dataclass(frozen=True, slots=True)
class _BroadcastId:
    """Identifies a broadcast: the key of the connection, the members, and the number of the broadcast."""

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
        """The rank."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._network.size

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> _ThreadChannels:
        """See `ckptcore.protocols.Collectives`. Does not wait for other ranks."""
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
        """See `ckptcore.protocols.Channels`. Copies the sender's bytes immediately."""
        members = self._groups[group]
        if sender not in members or self._rank not in members:
            raise PluginError(
                f"broadcast from rank {sender} on rank {self._rank}: both must be members of {list(members)}"
            )
        place = _BroadcastId(self._key, members, self._counts[group])
        self._counts[group] += 1
        if sender == self._rank:
            self._network._give(place, sender, data)
            return Ready(None)
        return _Arrival(self._network, place, sender, data)

    def close(self) -> None:
        """See `ckptcore.protocols.Channels`. Does nothing."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    network: ThreadNetwork
    place: _BroadcastId
    sender: int
    data: HostArray

    def result(self) -> None:
        """Wait for the sender."""
        self.network._take(self.place, self.sender, self.data)
