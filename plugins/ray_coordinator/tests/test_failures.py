"""Actors that fail or hang during a save.

The other ranks get an error, no checkpoint is committed, and later saves succeed.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pytest
import ray
from ckptcore_ray.coordinator import RayCoordinator
from ckptcore_ray.jobs import RayJob, make_job
from ray.exceptions import GetTimeoutError, RayActorError

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.model import Box
from ckptcore.saving import writing as stages
from plugins.ray_coordinator.tests.ranks import new_name

End: TypeAlias = Literal["works", "raises", "dies", "hangs"]

BOUNDS = {3: (0, 1, 5, 7), 2: (0, 4, 7)}
"""Boundaries of the rows of the ranks, by size of the job."""


class Worker:
    """A rank of a job that holds rows of an array."""

    def join(self, job: str, rank: int, size: int, timeout_seconds: float) -> None:
        """Join the job."""
        self.rank, self.size = rank, size
        self.context = ckptcore.Context(
            job=ckptcore.context.JobOptions(
                coordinator=RayCoordinator(job, rank, size, timeout_seconds=timeout_seconds)
            )
        )

    def save(self, location: Path, value: float, end: End) -> str | None:
        """Take part in a save. Return the error, if any.

        After this rank has written its rows, it works, raises an error, dies or hangs, as ``end`` says.
        """
        write = stages.write_parts

        def written(*arguments: Any) -> Any:
            result = write(*arguments)
            if end == "raises":
                raise MemoryError("only here")
            if end == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "hangs":
                threading.Event().wait()  # until the test kills this process
            return result

        stages.write_parts = written
        try:
            ckptcore.save(location, {"w": self._part(value), "value": value}, context=self.context)
        except (CheckpointError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            stages.write_parts = write
        return None

    def load(self, location: Path, value: float) -> None:
        """Load the rows of this rank, and compare them."""
        loaded = ckptcore.load(location, {"w": self._part(None), "value": 0.0}, context=self.context)
        assert loaded["value"] == value
        expected = self._part(value).shards[0].elements
        assert np.array_equal(loaded["w"].shards[0].elements, expected)

    def _part(self, value: float | None) -> ckptcore.ShardedArray:
        start, stop = BOUNDS[self.size][self.rank : self.rank + 2]
        elements = None if value is None else value + np.arange(start, stop, dtype=np.float64)
        return ckptcore.ShardedArray((7,), np.float64, [ckptcore.ArrayShard(Box((start,), (stop,)), elements)])


def join(job: RayJob, workers: Sequence[Any], timeout_seconds: float = 60.0) -> None:
    """Join the workers to the job, as ranks 0, 1 and so on."""
    ray.get([worker.join.remote(job.name, rank, job.size, timeout_seconds) for rank, worker in enumerate(workers)])


def outcomes(workers: Sequence[Any], location: Path, value: float, ends: Sequence[End]) -> list[str]:
    """Save. Return the results of the ranks that neither die nor hang. Kill the ranks that hang."""
    saves = [worker.save.remote(location, value, end) for worker, end in zip(workers, ends, strict=True)]
    answered = [save for save, end in zip(saves, ends, strict=True) if end in ("works", "raises")]
    results: list[str] = ray.get(answered, timeout=60)
    for worker, end in zip(workers, ends, strict=True):
        if end == "hangs":
            ray.kill(worker)
    return results


def _answers(worker: Any) -> bool:
    try:
        ray.get(worker.__ray_ready__.remote(), timeout=30)
    except (RayActorError, GetTimeoutError):
        return False
    return True


class Pool:
    """Workers that later tests reuse. Only failed workers are replaced."""

    def __init__(self) -> None:
        self._class: Any = ray.remote(num_cpus=0)(Worker)
        self._living: list[Any] = []

    def take(self, count: int) -> list[Any]:
        """Return workers whose processes answer. Start new ones if there are too few."""
        self._living = [worker for worker in self._living if _answers(worker)]
        while len(self._living) < count:
            self._living.append(self._class.remote())
        return self._living[:count]

    def end(self) -> None:
        """Kill the actors."""
        for worker in self._living:
            ray.kill(worker)


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[Pool]:
    """Workers that the tests of this module share."""
    made = Pool()
    yield made
    made.end()


WORKS: Final[tuple[End, ...]] = ("works", "works", "works")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param(("works", "works", "raises"), "rank 2: MemoryError: only here", marks=pytest.mark.slow),
        pytest.param(
            ("works", "works", "hangs"),
            r"rank 2: CoordinationTimeoutError|did not reach the exchange .*: \[2\]",
            marks=pytest.mark.slow,
        ),
        (("dies", "works", "works"), "rank 0 of the job .* failed"),
        pytest.param(("works", "works", "dies"), "rank 2 of the job .* failed", marks=pytest.mark.slow),
        pytest.param(("raises", "works", "works"), "rank 0: MemoryError: only here", marks=pytest.mark.slow),
        pytest.param(("hangs", "works", "works"), r"did not reach the exchange .*: \[0\]", marks=pytest.mark.slow),
        pytest.param(("works", "dies", "dies"), "rank [12] of the job .* failed", marks=pytest.mark.slow),
        pytest.param(("dies", "dies", "works"), "rank 0 of the job .* failed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_fails_in_the_middle_of_a_save(ends: tuple[End, ...], expected: str, pool: Pool, tmp_path: Path) -> None:
    workers = pool.take(3)
    with make_job(new_name(), 3) as job:
        join(job, workers, 10.0 if "hangs" in ends else 60.0)
        assert outcomes(workers, tmp_path / "1", 1.0, WORKS) == [None] * 3
        texts = outcomes(workers, tmp_path / "2", 2.0, ends)
        for text, end in zip(texts, (end for end in ends if end in ("works", "raises")), strict=True):
            assert text is not None and re.search("MemoryError: only here" if end == "raises" else expected, text)
        assert not (tmp_path / "2").exists()
        # New actors replace the failed ones, and all actors join again. A save to the location of
        # the failed save succeeds.
        workers = pool.take(3)
        join(job, workers)
        ray.get([worker.load.remote(tmp_path / "1", 1.0) for worker in workers])
        assert outcomes(workers, tmp_path / "2", 2.0, WORKS) == [None] * 3
        ray.get([worker.load.remote(tmp_path / "2", 2.0) for worker in workers])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert ckptcore.verify(tmp_path / "2").ok


def test_job_of_two_saves_to_the_location_of_a_failed_save_by_three(pool: Pool, tmp_path: Path) -> None:
    workers = pool.take(3)
    with make_job(new_name(), 3) as job:
        join(job, workers)
        assert outcomes(workers, tmp_path / "1", 1.0, WORKS) == [None] * 3
        saves = [worker.save.remote(tmp_path / "2", 2.0, "dies") for worker in workers]
        ray.wait(saves, num_returns=3, timeout=60)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2 and left[0].startswith(".2."), left  # no process survived to remove the partial save
    fewer = pool.take(2)
    with make_job(new_name(), 2) as job:
        join(job, fewer)
        ray.get([worker.load.remote(tmp_path / "1", 1.0) for worker in fewer])
        assert outcomes(fewer, tmp_path / "2", 3.0, WORKS[:2]) == [None] * 2
        ray.get([worker.load.remote(tmp_path / "2", 3.0) for worker in fewer])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
