"""The coordinators of the core satisfy the protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from ckptcore_testing import CoordinatorTests, ThreadJob

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions, PluginOptions, SingleProcess
from ckptcore.errors import CoordinationTimeoutError, PluginError
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Coordinator

T = TypeVar("T")


class TestSingleProcess(CoordinatorTests):
    sizes = (1,)

    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        return [job(SingleProcess())]

    def test_one_process_of_a_job_saves_and_loads_alone(self, tmp_path: Path) -> None:
        class RankOfTwo:
            @hookimpl
            def ckpt_coordinator(self) -> Coordinator:
                return ThreadJob(2, timeout_seconds=0.05).coordinator(0)

        together = Context(plugins=PluginOptions(extra=[RankOfTwo()]))
        with pytest.raises(CoordinationTimeoutError):
            ckptcore.save(tmp_path / "checkpoint", {"w": 1}, context=together)
        alone = replace(together, job=JobOptions(coordinator=SingleProcess()))
        ckptcore.save(tmp_path / "checkpoint", {"w": 1}, overwrite=True, context=alone)
        assert ckptcore.load(tmp_path / "checkpoint", context=alone) == {"w": 1}


class TestThreadCoordinator(CoordinatorTests):
    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        return ThreadJob(size, timeout_seconds=timeout_seconds).run(job)

    def test_a_key_used_twice_is_detected(self) -> None:
        coordinator = ThreadJob(1).coordinator(0)
        coordinator.gather("key", b"")
        with pytest.raises(PluginError, match="two exchanges. Use a new key for each exchange"):
            coordinator.gather("key", b"")
        assert coordinator.gather("new", b"x") == [b"x"]

    def test_an_exchange_without_a_rank(self) -> None:
        def alone(coordinator: Coordinator) -> None:
            if coordinator.rank:
                raise ValueError("rank 1 is unwell")
            coordinator.gather("key", b"")

        with pytest.raises(ExceptionGroup) as caught:
            ThreadJob(2, timeout_seconds=0.05).run(alone)
        told, failed = sorted(map(str, caught.value.exceptions))
        assert told.endswith(
            "Make every rank call it. ThreadJob.run also raises the errors of ranks that failed before"
        )
        assert failed == "rank 1 is unwell"
        gathered = ThreadJob(2).run(lambda coordinator: coordinator.gather("key", b"x"))
        assert gathered == [[b"x", b"x"], None]

    def test_errors_of_ranks_are_raised(self) -> None:
        def fail(coordinator: Coordinator) -> None:
            if coordinator.rank == 1:
                raise ValueError("rank 1 is unwell")

        with pytest.raises(ExceptionGroup) as caught:
            ThreadJob(3).run(fail)
        assert [str(error) for error in caught.value.exceptions] == ["rank 1 is unwell"]


class _Sleepy(CoordinatorTests):
    """Tests in which rank 1 starts after the deadline of the others, as on a busy machine."""

    short_seconds = 0.05

    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        def late(coordinator: Coordinator) -> T:
            if coordinator.rank == 1:
                time.sleep(4 * self.short_seconds)
            return job(coordinator)

        return ThreadJob(size, timeout_seconds=timeout_seconds).run(late)


def test_a_late_rank_is_not_treated_as_absent(tmp_path: Path) -> None:
    _Sleepy().test_the_error_of_the_leader_names_missing_ranks(4, tmp_path)
