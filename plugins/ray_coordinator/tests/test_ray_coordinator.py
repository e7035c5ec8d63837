"""Conformance tests of `RayCoordinator`, with real actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from ckptcore_testing import CoordinatorTests

from ckptcore.protocols import Coordinator
from plugins.ray_coordinator.tests.ranks import Ranks

T = TypeVar("T")


class TestRayCoordinator(CoordinatorTests):
    """Runs each rank as an actor, in a separate process."""

    sizes = (1, 3)

    @pytest.fixture(autouse=True)
    def _ranks(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        """Run the ranks of a job on reused actors."""
        return self.ranks.run(size, job, timeout_seconds=timeout_seconds)
