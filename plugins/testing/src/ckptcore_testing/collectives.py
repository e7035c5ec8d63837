"""Conformance tests of collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest

from ckptcore.errors import RankFailedError
from ckptcore.model import HostArray
from ckptcore.protocols import Channels, Collectives

T = TypeVar("T")


class CollectivesTests:
    """Conformance tests of collectives. Subclass it and define `run`.

    Attributes:
        size: number of ranks, at least 3.
        short_seconds: deadline in tests with a missing rank.
        long_seconds: deadline in tests without a missing rank.
    """

    size: int = 3
    short_seconds: float = 1.0
    long_seconds: float = 60.0

    def run(self, job: Callable[[Collectives], T], *, timeout_seconds: float) -> Sequence[T]:
        """Run `job` once on each of `size` ranks with its collectives. Return the results by rank.

        `job` and its results can be pickled, so that ranks can be processes. The ranks of one call form one job.

        Args:
            job: the function that each rank calls.
            timeout_seconds: how long a rank waits for another.
        """
        raise NotImplementedError("define the method `run`")

    def test_ranks_are_numbered_from_zero(self) -> None:
        results = self.run(_rank_and_size, timeout_seconds=self.long_seconds)
        assert list(results) == [(rank, self.size) for rank in range(self.size)]

    @pytest.mark.parametrize("nbytes", [1, 64, 1000, 3_000_001])
    @pytest.mark.parametrize("sender", [0, 1])
    def test_every_rank_receives_a_broadcast(self, nbytes: int, sender: int) -> None:
        received = self.run(_Send(nbytes, sender), timeout_seconds=self.long_seconds)
        assert [np.array_equal(data, _elements(nbytes, sender)) for data in received] == [True] * self.size

    def test_memory_returns_a_writable_array_of_the_requested_size(self) -> None:
        assert list(self.run(_memory, timeout_seconds=self.long_seconds)) == [("uint8", (100,), True, True)] * self.size

    def test_up_to_depth_broadcasts_run_at_once(self) -> None:
        for received in self.run(_turns, timeout_seconds=self.long_seconds):
            assert [int(data[0]) for data in received] == [turn % self.size for turn in range(20)]
            assert all(np.array_equal(data, _elements(5000, int(data[0]))) for data in received)

    def test_a_rank_can_broadcast_in_several_groups(self) -> None:
        for rank, senders in enumerate(self.run(_groups, timeout_seconds=self.long_seconds)):
            assert senders == {members: members[-1] for members in _groups_of(rank, self.size)}

    def test_connections_can_be_opened_one_after_another(self) -> None:
        for senders in self.run(_again, timeout_seconds=self.long_seconds):
            assert senders == [0, 1, 2]

    def test_two_open_connections_are_independent(self) -> None:
        for senders in self.run(_two, timeout_seconds=self.long_seconds):
            assert senders == [1, 0]

    def test_a_missing_rank_is_an_error_on_the_others(self) -> None:
        errors = self.run(_absent, timeout_seconds=self.short_seconds)
        assert list(errors[:-1]) == ["RankFailedError"] * (self.size - 1)


def _elements(nbytes: int, sender: int) -> HostArray:
    """Return bytes that begin with the number of the sender."""
    elements: HostArray = np.random.default_rng(sender).integers(0, 256, nbytes, np.uint8)
    elements[0] = sender
    return elements


def _send(channels: Channels, group: int, rank: int, sender: int, nbytes: int) -> HostArray:
    """Run one broadcast. Return the received bytes."""
    data = channels.memory(nbytes)
    data[:] = _elements(nbytes, sender) if rank == sender else 0
    channels.broadcast(group, sender, data).result()
    return data.copy()


def _everyone(collectives: Collectives) -> tuple[int, ...]:
    return tuple(range(collectives.size))


def _rank_and_size(collectives: Collectives) -> tuple[int, int]:
    assert collectives.name
    return collectives.rank, collectives.size


@dataclass(frozen=True, slots=True)
class _Send:
    """A job with one broadcast."""

    nbytes: int
    sender: int

    def __call__(self, collectives: Collectives) -> HostArray:
        channels = collectives.connect("send", [_everyone(collectives)])
        data = _send(channels, 0, collectives.rank, self.sender, self.nbytes)
        channels.close()
        return data


def _memory(collectives: Collectives) -> tuple[str, tuple[int, ...], bool, bool]:
    channels = collectives.connect("memory", [_everyone(collectives)])
    data = channels.memory(100)
    properties = data.dtype.name, data.shape, bool(data.flags.c_contiguous), bool(data.flags.writeable)
    channels.close()
    return properties


def _turns(collectives: Collectives) -> list[HostArray]:
    """Run twenty broadcasts, up to `Channels.depth` at a time. Return the received bytes of each."""
    channels = collectives.connect("turns", [_everyone(collectives)])
    assert channels.depth >= 1
    begun, received = [], []
    for turn in range(20):
        sender = turn % collectives.size
        data = channels.memory(5000)
        data[:] = _elements(5000, sender) if collectives.rank == sender else 0
        begun.append((data, channels.broadcast(0, sender, data)))
        if len(begun) == channels.depth:
            data, work = begun.pop(0)
            work.result()
            received.append(data.copy())
    for data, work in begun:
        work.result()
        received.append(data.copy())
    channels.close()
    return received


def _groups_of(rank: int, size: int) -> list[tuple[int, ...]]:
    """Return the groups of a rank, in a fixed order: all ranks, all but the first, and the first two."""
    groups = [tuple(range(size)), tuple(range(1, size)), (0, 1)]
    return [members for members in groups if rank in members]


def _groups(collectives: Collectives) -> dict[tuple[int, ...], int]:
    groups = _groups_of(collectives.rank, collectives.size)
    channels = collectives.connect("groups", groups)
    senders = {
        members: int(_send(channels, number, collectives.rank, members[-1], 100)[0])
        for number, members in enumerate(groups)
    }
    channels.close()
    return senders


def _again(collectives: Collectives) -> list[int]:
    senders = []
    for sender in range(3):
        channels = collectives.connect(f"again {sender}", [_everyone(collectives)])
        senders.append(int(_send(channels, 0, collectives.rank, sender, 10)[0]))
        channels.close()
    return senders


def _two(collectives: Collectives) -> list[int]:
    """Use two connections, and receive from the second one first."""
    first, second = [collectives.connect(key, [_everyone(collectives)]) for key in ("first", "second")]
    senders = [
        int(_send(channels, 0, collectives.rank, sender, 10)[0]) for channels, sender in ((second, 1), (first, 0))
    ]
    first.close()
    second.close()
    return senders


def _absent(collectives: Collectives) -> str | None:
    """Run a broadcast without the last rank. Return the name of this rank's error, or None if no error was raised."""
    if collectives.rank == collectives.size - 1:
        return None
    try:
        channels = collectives.connect("absent", [_everyone(collectives)])
        try:
            _send(channels, 0, collectives.rank, collectives.size - 1, 10)
        finally:
            channels.close()
    except RankFailedError as error:
        return type(error).__name__
    return None
