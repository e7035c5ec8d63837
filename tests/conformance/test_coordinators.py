"""The coordinators of the core are what the protocol asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from ckptcore_testing import CoordinatorTests, ThreadJob

from ckptcore.builtin import SingleProcess
from ckptcore.errors import PluginError
from ckptcore.protocols import Coordinator

T = TypeVar("T")


class TestSingleProcess(CoordinatorTests):
    sizes = (1,)

    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        return [job(SingleProcess())]


class TestThreadCoordinator(CoordinatorTests):
    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        return ThreadJob(size, timeout_seconds=timeout_seconds).run(job)

    def test_a_key_used_twice_is_detected(self) -> None:
        coordinator = ThreadJob(1).coordinator(0)
        coordinator.gather("key", b"")
        with pytest.raises(PluginError, match="two exchanges"):
            coordinator.gather("key", b"")

    def test_errors_of_ranks_are_raised(self) -> None:
        def fail(coordinator: Coordinator) -> None:
            if coordinator.rank == 1:
                raise ValueError("rank 1 is unwell")

        with pytest.raises(ExceptionGroup) as caught:
            ThreadJob(3).run(fail)
        assert [str(error) for error in caught.value.exceptions] == ["rank 1 is unwell"]


class _Sleepy(CoordinatorTests):
    """Rank 1 starts after the deadline of the others, as on a busy machine."""

    short_seconds = 0.05

    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        def late(coordinator: Coordinator) -> T:
            if coordinator.rank == 1:
                time.sleep(4 * self.short_seconds)
            return job(coordinator)

        return ThreadJob(size, timeout_seconds=timeout_seconds).run(late)


def test_a_late_rank_is_not_treated_as_absent(tmp_path: Path) -> None:
    _Sleepy().test_the_error_of_the_leader_names_missing_ranks(4, tmp_path)
