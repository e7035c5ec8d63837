"""Jobs of Ray actors: they save together, detect a failed actor, and continue after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ckptcore_ray import coordinator as coordinators
from ckptcore_ray import jobs
from ckptcore_ray.coordinator import RayCoordinator
from ckptcore_ray.jobs import RayJob, find_job, make_job

import ckptcore
from ckptcore.errors import CoordinationTimeoutError, PluginError, RankFailedError
from ckptcore.runtime import runtime_of
from plugins.ray_coordinator.tests.ranks import Ranks, new_name, state


@pytest.fixture
def job(ranks: Ranks) -> Iterator[RayJob]:
    """A job of two ranks that no actor has joined."""
    with make_job(new_name(), 2) as made:
        yield made


def join(job: RayJob, *actors: Any) -> list[int]:
    """Join actors to the job, as ranks 0, 1 and so on. Return their incarnations."""
    incarnations: list[int] = ray.get(
        [actor.join.remote(job.name, rank, job.size) for rank, actor in enumerate(actors)]
    )
    return incarnations


def until_waiting(job: RayJob, rank: int) -> str:
    """Wait until a rank waits in an exchange. Return the key of the exchange."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if waiting := job.progress().ranks[rank].waiting:
            return waiting[0].key
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} never waited")


def test_actors_save_together_and_the_driver_sees_their_progress(ranks: Ranks, job: RayJob, tmp_path: Path) -> None:
    first, second = ranks.first(2)
    assert join(job, first, second) == [1, 1]
    saved = first.save.remote(tmp_path / "step", 3)
    assert until_waiting(job, 0).startswith(str(tmp_path / "step"))
    assert job.progress().ranks[0].waiting[0].for_ranks == (1,)
    assert not (tmp_path / "step").exists()
    ray.get([saved, second.save.remote(tmp_path / "step", 3)])
    loaded = ckptcore.load(tmp_path / "step")
    assert loaded["step"] == 3 and np.array_equal(loaded["weights"], state(3)["weights"])
    shown = find_job(job.name).progress()
    assert [(rank.state, rank.waiting) for rank in shown.ranks] == [("joined", ()), ("joined", ())]
    assert shown.ranks[1].exchanges > 2
    assert shown.held_bytes == 0


def test_failed_actor_is_detected_before_the_timeout_and_replaced(ranks: Ranks, job: RayJob, tmp_path: Path) -> None:
    (first,) = ranks.first(1)
    second = ranks.new()
    assert join(job, first, second) == [1, 1]
    saved = first.save.remote(tmp_path / "step", 1)
    until_waiting(job, 0)
    second.die.remote()
    with pytest.raises(
        RankFailedError, match=r"(?s)rank 1 of the job .* failed, so .*: its actor died: .*restart its actor"
    ):
        ray.get(saved, timeout=30)
    assert not (tmp_path / "step").exists()
    assert job.progress().ranks[1].state == "failed"
    third = ranks.new()
    assert join(job, first, third) == [2, 2]
    ray.get([actor.save.remote(tmp_path / "step", 2) for actor in (first, third)])
    assert ckptcore.load(tmp_path / "step")["step"] == 2
    ray.kill(third)


@pytest.mark.slow
def test_an_actor_that_ray_restarts_counts_as_failed(ranks: Ranks, job: RayJob) -> None:
    """The new process answers probes, but it has not joined the job."""
    (first,) = ranks.first(1)
    second = ranks.new(max_restarts=-1)
    join(job, first, second)
    gathered = first.gather.remote("key", b"")
    until_waiting(job, 0)
    ray.kill(second, no_restart=False)
    with pytest.raises(RankFailedError, match=r"rank 1 .* restarted by Ray"):
        ray.get(gathered, timeout=60)
    ray.kill(second)


def test_rank_that_joins_again_ends_the_exchanges_of_the_others(ranks: Ranks, job: RayJob) -> None:
    first, second = ranks.first(2)
    join(job, first, second)
    ray.get(second.gather.remote("ahead", b"old"))
    waiting = first.gather.remote("key", b"")
    until_waiting(job, 0)
    assert ray.get(second.join.remote(job.name, 1, 2)) == 2
    with pytest.raises(
        RankFailedError, match=r"incarnation 1 .* has ended: rank 1 joined the job again, and incarnation 2 began"
    ):
        ray.get(waiting, timeout=30)
    with pytest.raises(RankFailedError, match="has ended"):  # rank 0 has not joined again
        ray.get(first.broadcast.remote("verdict", b"old"))
    assert ray.get(first.join.remote(job.name, 0, 2)) == 2
    ray.get(second.gather.remote("ahead", b"new"))
    assert ray.get(first.gather.remote("ahead", b"0")) == [b"0", b"new"]


def test_late_rank_gets_an_error_and_the_next_exchange_is_complete(ranks: Ranks, job: RayJob) -> None:
    first, second = ranks.first(2)
    ray.get([first.join.remote(job.name, 0, 2, 0.3), second.join.remote(job.name, 1, 2, 30.0)])
    with pytest.raises(
        CoordinationTimeoutError, match=r"1 of 2 ranks of the job .* did not reach the exchange .*: \[1\]; check"
    ) as caught:
        ray.get(first.gather.remote("key", b"0"))
    assert f"and find_job({job.name!r}).progress(). If they were only late, set a longer timeout_seconds" in str(
        caught.value
    )
    assert [rank.exchanges for rank in find_job(job.name).progress().ranks] == [1, 0], (
        "rank 1 has reached no exchange yet"
    )
    with pytest.raises(CoordinationTimeoutError, match=r"after the leader's timeout"):
        ray.get(second.gather.remote("key", b"late"))
    ray.get(second.gather.remote("key", b"next"))
    assert ray.get(first.gather.remote("key", b"0")) == [b"0", b"next"]


def test_job_actor_that_does_not_answer_raises_a_timeout(
    ranks: Ranks, job: RayJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the job's actor is stopped, as if its node could not be reached."""
    (second,) = ranks.first(1)
    coordinator = RayCoordinator(job.name, 0, 2, timeout_seconds=0.1)
    ray.get(second.join.remote(job.name, 1, 2))
    process = ray.get(job.actor.__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(process, signal.SIGSTOP)
    try:
        monkeypatch.setattr(coordinators, "_ANSWER_SECONDS", 0.1)
        with pytest.raises(
            CoordinationTimeoutError, match=r"did not answer .* within 0.2 s; check that its node can be"
        ):
            coordinator.gather("key", b"")
    finally:
        os.kill(process, signal.SIGCONT)
    monkeypatch.undo()
    ray.get(second.gather.remote("next", b"1"))
    assert coordinator.gather("next", b"0") == [b"0", b"1"]


def test_busy_actor_is_not_reported_as_failed(ranks: Ranks, job: RayJob) -> None:
    first, second = ranks.first(2)
    join(job, first, second)
    gathered = first.gather.remote("key", b"0")
    second.sleep.remote(1.5)
    given = second.gather.remote("key", b"1")
    assert ray.get(gathered, timeout=30) == [b"0", b"1"]
    ray.get(given)


class Asynchronous:
    """A rank whose methods run on an event loop."""

    def __init__(self, job: str, rank: int) -> None:
        from ckptcore_ray.membership import join_job

        join_job(job, rank, 2)  # allowed on the event loop, because it does not wait
        self.beats = 0

    async def beat(self) -> int:
        """Count a call. The actor can run this method during a save."""
        self.beats += 1
        return self.beats

    async def save(self, location: Path) -> None:
        """Save without a Context, in the job that the actor has joined."""
        handle = await asyncio.to_thread(ckptcore.save_async, location, state(5))
        await asyncio.to_thread(handle.result)

    async def save_on_the_loop(self, location: Path) -> None:
        """Save on the event loop, which raises an error."""
        ckptcore.save(location, state(5))

    async def leave(self) -> int:
        """Leave the job. Return the size of the job of later saves."""
        from ckptcore_ray.membership import leave_job

        leave_job()
        return runtime_of(ckptcore.Context()).job().size


@pytest.mark.slow
def test_asynchronous_actors_run_other_methods_during_a_save(ranks: Ranks, job: RayJob, tmp_path: Path) -> None:
    actor_class: Any = ray.remote(num_cpus=0)(Asynchronous)
    actors = [actor_class.remote(job.name, rank) for rank in range(2)]
    for actor in actors:
        with pytest.raises(PluginError, match=r"event loop of an asynchronous actor.*await asyncio\.to_thread"):
            ray.get(actor.save_on_the_loop.remote(tmp_path / "refused"))
    saves = [actors[0].save.remote(tmp_path / "step")]
    until_waiting(job, 0)
    assert ray.get(actors[0].beat.remote(), timeout=30) == 1
    saves.append(actors[1].save.remote(tmp_path / "step"))
    ray.get(saves, timeout=30)
    assert ckptcore.load(tmp_path / "step")["step"] == 5
    assert ray.get(actors[0].leave.remote()) == 1
    for actor in actors:
        ray.kill(actor)


def test_wrong_ranks_sizes_and_names_of_jobs_are_rejected(job: RayJob) -> None:
    for rank, size in ((2, 2), (-1, 2), (0, 3)):
        with pytest.raises(PluginError, match=r"size 2 and ranks 0 to 1"):
            RayCoordinator(job.name, rank, size)
    name = new_name()
    with pytest.raises(
        PluginError, match=rf"no job '{name}' in .*: call job = make_job\('{name}', size\) in the driver"
    ):
        RayCoordinator(name, 0, 2)
    with make_job(name, 2):
        assert RayCoordinator(name, 0, 2).incarnation == 1
    with pytest.raises(PluginError, match=r"stop it with find_job"):
        make_job(job.name, 3)
    with pytest.raises(ValueError, match="at least 1 rank"):
        make_job(new_name(), 0)


def test_nodes_without_the_plugin(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown:
        """A job actor on a node without ckptcore-ray."""

        def __init__(self, name: str, size: int) -> None:
            raise ModuleNotFoundError("No module named 'ckptcore_ray'")

        def size(self) -> int:
            """Never called, because the actor does not start."""
            raise NotImplementedError

    with monkeypatch.context() as lacking:
        lacking.setattr(jobs, "JobActor", Unknown)
        with pytest.raises(
            PluginError, match=r"(?s)its actor did not start: .*No module named .*; install ckptcore-ray on"
        ):
            make_job(new_name(), 2)
    with make_job(name := new_name(), 2):  # a new name, because Ray does not free the old one at once
        assert RayCoordinator(name, 0, 2).incarnation == 1


def test_ending_a_job_fails_the_exchanges_of_its_ranks(ranks: Ranks) -> None:
    first, second = ranks.first(2)
    with make_job(new_name(), 2) as job:
        join(job, first, second)
        waiting = first.gather.remote("key", b"")
        until_waiting(job, 0)
    with pytest.raises(RankFailedError, match=r"the actor of the job .* cannot be reached.*make_job"):
        ray.get(waiting, timeout=30)
    with pytest.raises(RankFailedError, match="cannot be reached"):
        job.progress()
