"""Processes that share a near tier: the leader uploads, and all processes load the same copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from ckptcore_testing import ThreadJob
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import RankFailedError, StorageError
from ckptcore.policies import LatestN
from ckptcore.protocols import Coordinator
from plugins.tiers.tests.far_stores import Outage
from tests.checkpointer.runs import Watch, array_key, assert_is_step, flip, save_steps, through, tree, watched

SIZE: Final = 3


def job(
    far: str, tier: NearTier, work: Callable[[Checkpointer, int, Watch, TieredDirectory], Any], **options: Any
) -> Sequence[Any]:
    """Run a function on every rank, each with its own run and its own watch of the far tier. Return the results."""

    def run_rank(coordinator: Coordinator) -> Any:
        watch = Watch()
        with Checkpointer(
            tiers := TieredDirectory(tier, through(far)), context=watched(watch, coordinator), **options
        ) as run:
            return work(run, coordinator.rank, watch, tiers)

    return ThreadJob(SIZE, timeout_seconds=60).run(run_rank)


def test_the_leader_uploads_the_steps_of_all_ranks(near: str, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> list[int]:
        save_steps(run, [1, 2, 3])
        run.save_checkpointables(4, {"model": tree(4), "mine": ckptcore.PerProcess({"rank": rank})})
        tiers.wait_for_uploads(60)
        assert tiers.uploads.uploaded == (() if rank else (1, 2, 3, 4))
        assert run.latest == 4
        run.reload()
        return list(run.steps)

    steps = job(far, NearTier(near, preservation_policy=LatestN(1)), work)
    assert steps == [[1, 2, 3, 4]] * SIZE
    assert_is_step(CheckpointReader(far).load_checkpointables(4, ["model"])["model"], 4)

    shutil.rmtree(near)

    def resume(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> int | None:
        loaded = run.load_checkpointables(abstract={"model": None, "mine": ckptcore.PerProcess(None)})
        assert_is_step(loaded["model"], 4)
        assert loaded["mine"] == {"rank": rank}
        return run.restored_step

    assert job(far, NearTier(near), resume) == [4] * SIZE


def test_all_ranks_load_the_far_copy_if_one_cannot_load_the_near_copy(near: str, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> list[str]:
        save_steps(run, [1, 2])
        tiers.wait_for_uploads(60)
        run.reload()
        if rank == 0:
            flip(near, array_key(near, "2"))
        run.reload()
        target = {"w": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.int64), "step": 0}
        assert_is_step(run.load_into(target), 2)
        assert run.skipped_steps == ()
        return sorted({operation.name for operation in watch.operations if operation.name.startswith("get_into")})

    assert job(far, NearTier(near), work) == [["get_into"]] * SIZE


def test_all_ranks_see_the_deletion_of_a_step_from_both_tiers(near: str, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> list[int]:
        save_steps(run, [1, 2])
        tiers.wait_for_uploads(60)
        run.reload()
        run.delete(1)
        run.wait()
        return list(run.steps)

    assert job(far, NearTier(near), work) == [[2]] * SIZE
    assert CheckpointReader(far).steps == CheckpointReader(near).steps == (2,)


def test_all_ranks_raise_an_error_if_the_far_tier_is_away_at_the_start(near: str, far: str) -> None:
    def run_rank(coordinator: Coordinator) -> type:
        watch = Watch()
        if coordinator.rank == 0:
            away = Outage(watch)
            away.begin()
        try:
            with Checkpointer(TieredDirectory(NearTier(near), through(far)), context=watched(watch, coordinator)):
                return type(None)
        except (StorageError, RankFailedError) as error:
            return type(error)

    kinds = ThreadJob(SIZE, timeout_seconds=60).run(run_rank)
    assert kinds == [StorageError, RankFailedError, RankFailedError]


def test_an_outage_of_the_far_tier_for_the_leader_stops_no_rank(near: str, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        away = Outage(watch)
        if rank == 0:
            away.begin()
        save_steps(run, [1, 2])
        assert_is_step(run.load(), 2)
        away.end()
        tiers.wait_for_uploads(60)

    job(far, NearTier(near), work)
    assert CheckpointReader(far).steps == (1, 2)
