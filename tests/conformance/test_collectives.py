"""The collectives of the testing kit satisfy the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptcore_testing import CollectivesTests, ThreadJob, ThreadNetwork

from ckptcore.protocols import Collectives

T = TypeVar("T")


class TestThreadCollectives(CollectivesTests):
    def run(self, job: Callable[[Collectives], T], *, timeout_seconds: float) -> Sequence[T]:
        network = ThreadNetwork(self.size, timeout_seconds=timeout_seconds)
        return ThreadJob(self.size).run(lambda coordinator: job(network.collectives(coordinator.rank)))
