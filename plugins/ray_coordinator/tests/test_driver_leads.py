"""A driver as rank 0 of its job. It holds no arrays, but it leads all saves and owns the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ckptcore_ray.coordinator import RayCoordinator
from ckptcore_ray.jobs import RayJob, make_job

import ckptcore
from ckptcore.errors import CheckpointError, RankFailedError
from ckptcore.policies import FixedInterval, LatestN
from plugins.ray_coordinator.tests.ranks import Ranks, new_name

ROWS = (0, 3, 4)
"""Boundaries of the rows: rank 1 holds rows 0 to 3, rank 2 holds row 3. Ranges are half-open."""


class Worker:
    """A rank that holds rows of an array, and saves them when the driver calls it."""

    def __init__(self, job: str, rank: int) -> None:
        from ckptcore_ray.membership import join_job

        join_job(job, rank, 3, timeout_seconds=30)
        self.rank = rank
        self.run: ckptcore.Checkpointer | None = None

    def part(self, value: float | None) -> ckptcore.ShardedArray:
        """Return the rows of this rank. Without a value they have no elements, and request a load."""
        start, stop = ROWS[self.rank - 1 : self.rank + 1]
        box = ckptcore.model.Box((start, 0), (stop, 2))
        elements = None if value is None else np.full(box.shape, value, np.float32)
        return ckptcore.ShardedArray((4, 2), np.float32, [ckptcore.ArrayShard(box, elements)])

    def save(self, location: Path, value: float, beside: object = None) -> str | None:
        """Save the rows and another object. Return the error, if any."""
        try:
            ckptcore.save(location, {"rows": self.part(value), "same": np.arange(3.0), "beside": beside})
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def open(self, directory: Path) -> None:
        """Open a run together with the other ranks."""
        self.run = ckptcore.Checkpointer(directory, save_policy=FixedInterval(2))

    def step(self, step: int) -> bool:
        """Run a step of training. Return True if it was saved."""
        assert self.run is not None
        handle = self.run.save(step, {"rows": self.part(float(step)), "same": np.arange(3.0)})
        if handle is not None:
            handle.result()
        return handle is not None

    def resume(self) -> float:
        """Load the newest step. Return the first element of the rows."""
        assert self.run is not None
        loaded = self.run.load(abstract={"rows": self.part(None), "same": np.zeros(3)})
        self.run.close()
        return float(loaded["rows"].shards[0].elements[0, 0])


@pytest.fixture
def led(ranks: Ranks) -> Iterator[tuple[ckptcore.Context, list[Any]]]:
    """The Context of the driver, which leads the job, and two workers."""
    with make_job(new_name(), 3) as job:
        yield lead(job), workers(job)


def lead(job: RayJob) -> ckptcore.Context:
    return ckptcore.Context(
        job=ckptcore.context.JobOptions(coordinator=RayCoordinator(job.name, 0, job.size, timeout_seconds=30))
    )


def workers(job: RayJob) -> list[Any]:
    actor_class: Any = ray.remote(num_cpus=0)(Worker)
    return [actor_class.remote(job.name, rank) for rank in (1, 2)]


def test_driver_commits_the_objects_of_the_workers(led: tuple[ckptcore.Context, list[Any]], tmp_path: Path) -> None:
    context, actors = led
    saves = [actor.save.remote(tmp_path / "step", 1.0) for actor in actors]
    assert ray.wait(saves, timeout=1)[0] == []  # no worker can commit for the driver
    assert not (tmp_path / "step").exists()
    handle = ckptcore.save_async(tmp_path / "step", {}, context=context)
    handle.result(30)
    assert handle.progress.total == 0 and ray.get(saves) == [None, None]
    loaded = ckptcore.load(tmp_path / "step")
    assert np.array_equal(loaded["rows"], np.ones((4, 2))) and np.array_equal(loaded["same"], np.arange(3.0))
    # If the driver refuses a save, the workers raise its error. If a worker fails, the driver raises that error.
    saves = [actor.save.remote(tmp_path / "step", 2.0) for actor in actors]
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        ckptcore.save(tmp_path / "step", {}, context=context)
    assert all("rank 0: CheckpointExistsError" in text for text in ray.get(saves))
    saves = [actors[0].save.remote(tmp_path / "next", 2.0, object()), actors[1].save.remote(tmp_path / "next", 2.0)]
    with pytest.raises(RankFailedError, match="rank 1: UnsupportedLeafError"):
        ckptcore.save(tmp_path / "next", {}, context=context)
    assert all("UnsupportedLeafError" in text for text in ray.get(saves))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step"]
    for actor in actors:
        ray.kill(actor)


def test_the_driver_owns_the_run_and_deletes(led: tuple[ckptcore.Context, list[Any]], tmp_path: Path) -> None:
    context, actors = led
    opens = [actor.open.remote(tmp_path) for actor in actors]
    with ckptcore.Checkpointer(
        tmp_path, context=context, save_policy=FixedInterval(2), preservation_policy=LatestN(2)
    ) as run:
        ray.get(opens)
        for step in range(1, 8):
            taken = [actor.step.remote(step) for actor in actors]
            handle = run.save(step, {})
            assert (handle is not None) == (step % 2 == 0)
            assert ray.get(taken) == [handle is not None] * 2
        run.wait()
        assert run.steps == (4, 6)
        resumed = [actor.resume.remote() for actor in actors]
        assert run.load(abstract={}) == {} and run.restored_step == 6
        assert ray.get(resumed) == [6.0, 6.0]
    for actor in actors:
        ray.kill(actor)
