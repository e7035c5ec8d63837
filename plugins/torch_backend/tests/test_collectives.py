"""Conformance tests of the collectives of torch.distributed: over gloo, and through a device with two streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ckptcore_testing import CollectivesTests, ThreadJob
from ckptcore_torch.collectives import DeviceChannels, GlooCollectives, JoinedGroup, collectives_of_job

from ckptcore.errors import RankFailedError
from ckptcore.protocols import Channels, Collectives

T = TypeVar("T")


class TestGloo(CollectivesTests):
    """Runs the ranks as threads. Each thread creates its own process groups."""

    def run(self, job: Callable[[Collectives], T], *, timeout_seconds: float) -> Sequence[T]:
        store = dist.HashStore()
        return ThreadJob(self.size).run(
            lambda coordinator: job(
                GlooCollectives(store, coordinator.rank, self.size, timeout_seconds=timeout_seconds)
            )
        )


class _SideStream:
    """A stream that executes everything immediately, and records the calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def now(self) -> _SideStream:
        return self

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._log.append(f"enter {self._name}")
        yield
        self._log.append(f"leave {self._name}")

    def wait_for(self, moment: object) -> None:
        self._log.append(f"{self._name} waits")

    def mark(self) -> _SideStream:
        self._log.append(f"mark {self._name}")
        return self

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def synchronize(self) -> None:
        self._log.append(f"synchronize {self._name}")


class _ThroughDevice(GlooCollectives):
    """Collectives that use streams as with NCCL, but on the CPU with gloo."""

    log: list[str]

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        self.log = []
        streams = _SideStream("up", self.log), _SideStream("down", self.log)
        return DeviceChannels(self._join_groups(key, groups), self.rank, torch.device("cpu"), *streams)


class TestThroughDevice(CollectivesTests):
    def run(self, job: Callable[[Collectives], T], *, timeout_seconds: float) -> Sequence[T]:
        store = dist.HashStore()
        return ThreadJob(self.size).run(
            lambda coordinator: job(_ThroughDevice(store, coordinator.rank, self.size, timeout_seconds=timeout_seconds))
        )


def test_message_is_copied_to_the_device_while_the_previous_one_is_sent() -> None:
    """Only the broadcast itself waits for the previous broadcast. The copy and the calling thread do not wait."""

    class Sent:
        def wait(self) -> bool:
            log.append("stream waits for the group")
            return True

    class Group:
        def broadcast(self, tensor: torch.Tensor, root: int) -> Sent:
            log.append(f"send from {root}")
            return Sent()

    log: list[str] = []
    channels = DeviceChannels(
        [JoinedGroup(Group(), (2, 5))], 5, torch.device("cpu"), _SideStream("up", log), _SideStream("down", log)
    )  # fmt: skip
    works = [channels.broadcast(0, sender, channels.memory(8)) for sender in (5, 2)]
    first = [
        "enter up",
        "send from 1",
        "leave up",
        "enter down",
        "stream waits for the group",
        "mark down",
        "leave down",
    ]
    second = ["enter up", "up waits", "send from 0", *first[2:]]
    assert log == [*first, "mark down", *second, "mark down"]
    works[0].result()
    assert log[-1] == "synchronize down"


def test_a_closed_peer_raises_an_error_that_names_the_ranks() -> None:
    store = dist.HashStore()

    def send(rank: int) -> str:
        channels = GlooCollectives(store, rank, 2, timeout_seconds=30).connect("ends", [(0, 1)])
        if rank:
            channels.close()
            return ""
        with pytest.raises(RankFailedError) as caught:
            for _ in range(100):  # sent data may be buffered in the network
                channels.broadcast(0, 0, np.zeros(1 << 20, np.uint8)).result()
        return str(caught.value)

    message, _ = ThreadJob(2).run(lambda coordinator: send(coordinator.rank))
    assert "between the ranks [0, 1]" in message


def test_a_process_without_a_group_has_no_collectives() -> None:
    assert collectives_of_job() is None
