"""Hosts with separate near directories. A step exists only if all hosts have it, or the far tier does.

Objects that a host lacks are loaded from the far tier.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_testing import ThreadJob
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore import ArrayShard, Checkpointer, CheckpointReader, ShardedArray
from ckptcore.context import ReplicaOptions
from ckptcore.errors import CheckpointError, OnlyStepError, RankFailedError, UploadError
from ckptcore.model import Box
from ckptcore.policies import LatestN, SpecificSteps
from ckptcore.protocols import Coordinator
from plugins.tiers.tests.far_stores import Outage
from tests.checkpointer.runs import Watch, flip, keys_of, through, watched
from tests.storage.mounts import Mounts, mounts

__all__ = ["mounts"]

HOSTS: Final = (0, 0, 1, 1)
"""The host of each rank."""

ROWS: Final = 8


def near_of(place: Path, host: int) -> str:
    """Return the near directory of a host."""
    return str(place / f"host-{host}" / "run")


def sharded(step: int, rank: int, size: int) -> dict[str, Any]:
    """Return a state with a sharded array and a number that all ranks have. All elements are equal to the step."""
    rows = ROWS // size
    mine = ArrayShard(Box((rank * rows, 0), ((rank + 1) * rows, 3)), np.full((rows, 3), step, np.float32))
    return {"w": ShardedArray((ROWS, 3), np.float32, [mine]), "step": step}


def empty(rank: int, size: int) -> dict[str, Any]:
    """Return a target for a load, whose elements are not those of any step."""
    return sharded(-1, rank, size)


def job(
    place: Path,
    far: str,
    work: Callable[[Checkpointer, int, Watch, TieredDirectory], Any],
    hosts: Sequence[int] = HOSTS,
    **options: Any,
) -> Sequence[Any]:
    """Run a function on every rank, each with its own run on its host. Return the results."""
    replicas = options.pop("replicas", ReplicaOptions())
    tier_options = {"preservation_policy": LatestN(2), "close_seconds": 60.0, **options.pop("tier", {})}

    def run_rank(coordinator: Coordinator) -> Any:
        watch = Watch()
        tier = NearTier(near_of(place, hosts[coordinator.rank]), seen_by="host", **tier_options)
        context = watched(watch, coordinator)
        context = dataclasses.replace(context, job=dataclasses.replace(context.job, replicas=replicas))
        with Checkpointer(tiers := TieredDirectory(tier, through(far)), context=context, **options) as run:
            return work(run, coordinator.rank, watch, tiers)

    return ThreadJob(len(hosts), timeout_seconds=60).run(run_rank)


def save(run: Checkpointer, steps: Sequence[int], rank: int, size: int = len(HOSTS)) -> None:
    """Save steps one after the other, and wait for each."""
    for step in steps:
        assert run.save(step, sharded(step, rank, size)) is not None
        run.wait()


def loaded_step(run: Checkpointer, rank: int, size: int = len(HOSTS), step: int | None = None) -> int:
    """Load a step into shards. Return the step that their elements name."""
    target = empty(rank, size)
    loaded = run.load_into(target, step=step)
    (shard,) = loaded["w"].shards
    assert (shard.elements == loaded["step"]).all()
    return int(loaded["step"])


def steps_on(place: Path, host: int) -> list[int]:
    """Return the steps committed on a host."""
    return list(CheckpointReader(near_of(place, host)).steps)


def test_each_host_has_its_part_and_the_far_tier_has_all(tmp_path: Path, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> int:
        save(run, [1, 2, 3], rank)
        tiers.wait_for_uploads(60)
        before = len(watch.operations)
        step = loaded_step(run, rank)
        read = [operation for operation in watch.operations[before:] if operation.name.startswith("get_into")]
        assert not read, "from the far tier"
        return step

    assert job(tmp_path, far, work) == [3] * 4
    assert steps_on(tmp_path, 0) == [2, 3] and steps_on(tmp_path, 1)[-2:] == [2, 3]
    parts = [{key for key in keys_of(near_of(tmp_path, host), "3") if key.endswith(".safetensors")} for host in (0, 1)]
    assert parts[0] and parts[1] and not parts[0] & parts[1]
    whole = CheckpointReader(far)
    assert whole.steps == (1, 2, 3)
    assert (whole.load()["w"] == 3).all() and whole.load()["w"].shape == (ROWS, 3)
    assert ckptcore.verify(f"{far}/3").ok


def test_several_checkpointables_on_hosts(tmp_path: Path, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        own = {"model": sharded(1, rank, 4), "mine": ckptcore.PerProcess({"rank": rank, "data": np.full(5, rank)})}
        assert run.save_checkpointables(1, own) is not None
        run.wait()
        loaded = run.load_checkpointables(abstract={"mine": ckptcore.PerProcess(None)})
        assert loaded["mine"]["rank"] == rank

    job(tmp_path, far, work)
    shutil.rmtree(tmp_path / "host-1")

    def resume(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        loaded = run.load_checkpointables(abstract={"model": empty(rank, 4), "mine": ckptcore.PerProcess(None)})
        assert loaded["mine"]["rank"] == rank and (loaded["mine"]["data"] == rank).all()
        assert loaded["model"]["step"] == 1

    job(tmp_path, far, resume)


def test_all_hosts_load_the_far_copy_if_one_host_was_replaced(tmp_path: Path, far: str) -> None:
    job(tmp_path, far, lambda run, rank, *_: save(run, [1, 2], rank))
    shutil.rmtree(tmp_path / "host-1")

    def resume(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> tuple[int, list[int]]:
        step = loaded_step(run, rank)
        save(run, [3], rank)
        return step, list(run.steps)

    assert job(tmp_path, far, resume) == [(2, [1, 2, 3])] * 4
    # Steps that only one host had are deleted once both hosts have a newer step.
    assert steps_on(tmp_path, 0) == steps_on(tmp_path, 1) == [3]
    assert CheckpointReader(far).steps == (1, 2, 3)


def test_a_step_that_one_host_lacks_does_not_exist_without_a_far_copy(tmp_path: Path, far: str) -> None:
    job(tmp_path, far, lambda run, rank, *_: save(run, [1, 2], rank), tier={"upload_policy": SpecificSteps([1])})
    shutil.rmtree(Path(near_of(tmp_path, 1)) / "2")

    def resume(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> tuple[int, tuple[int, ...]]:
        step = loaded_step(run, rank)
        before = run.steps
        save(run, [2], rank)  # the save replaces the part that one host has
        assert loaded_step(run, rank) == 2
        return step, before

    assert job(tmp_path, far, resume) == [(1, (1,))] * 4


def test_a_stale_host_does_not_mix_two_saves_of_a_step(tmp_path: Path, far: str) -> None:
    job(tmp_path, far, lambda run, rank, *_: save(run, [1], rank))
    shutil.copytree(tmp_path / "host-1", tmp_path / "kept")
    shutil.rmtree(tmp_path / "host-0")
    shutil.rmtree(tmp_path / "host-1")

    def again(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        run.save(1, {**sharded(100, rank, 4)}, overwrite="non-atomic")

    job(tmp_path, far, again)
    shutil.rmtree(tmp_path / "host-1")
    (tmp_path / "kept").rename(tmp_path / "host-1")  # the host returns with its old directory

    assert job(tmp_path, far, lambda run, rank, *_: loaded_step(run, rank)) == [100] * 4


def test_a_job_of_another_size_loads_missing_parts_from_the_far_tier(tmp_path: Path, far: str) -> None:
    job(tmp_path, far, lambda run, rank, *_: save(run, [1, 2], rank))
    smaller = job(tmp_path, far, lambda run, rank, *_: loaded_step(run, rank, 2), hosts=(0, 1))
    assert smaller == [2, 2]
    alone = job(tmp_path, far, lambda run, rank, *_: loaded_step(run, rank, 1), hosts=(1,))
    assert alone == [2]
    larger = job(tmp_path, far, lambda run, rank, *_: loaded_step(run, rank, 8), hosts=(0, 0, 0, 1, 1, 1, 2, 2))
    assert larger == [2] * 8


def test_all_hosts_load_the_far_copy_if_one_has_a_damaged_file(tmp_path: Path, far: str) -> None:
    job(tmp_path, far, lambda run, rank, *_: save(run, [1, 2], rank))
    near = near_of(tmp_path, 1)
    flip(near, next(key for key in keys_of(near, "2") if key.endswith(".safetensors")))

    def resume(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> int:
        step = loaded_step(run, rank)
        assert run.skipped_steps == ()
        return step

    assert job(tmp_path, far, resume) == [2] * 4


def test_an_outage_of_the_far_tier_for_some_ranks_stops_no_host(tmp_path: Path, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        away = Outage(watch)
        if rank in (0, 2):
            away.begin()
        save(run, [1, 2], rank)
        assert loaded_step(run, rank) == 2
        away.end()
        tiers.wait_for_uploads(60)

    job(tmp_path, far, work)
    assert CheckpointReader(far).steps == (1, 2)


def test_a_save_that_fails_on_one_host_is_committed_on_none(tmp_path: Path, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> str:
        save(run, [1], rank)
        state = sharded(2, rank, 4)
        if rank == 3:
            state["bad"] = object()
        try:
            run.save(2, state)
        except (CheckpointError, TypeError) as error:
            return type(error).__name__
        return ""

    errors = job(tmp_path, far, work)
    assert errors[:3] == [RankFailedError.__name__] * 3 and errors[3] == "UnsupportedLeafError"
    assert steps_on(tmp_path, 0) == steps_on(tmp_path, 1) == [1]


def test_a_deletion_affects_every_host(tmp_path: Path, far: str) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> list[int]:
        save(run, [1, 2], rank)
        tiers.wait_for_uploads(60)
        run.delete(1)
        run.wait()
        with pytest.raises((OnlyStepError, RankFailedError)):
            run.delete(2)
        assert loaded_step(run, rank) == 2
        return list(run.steps)

    assert job(tmp_path, far, work) == [[2]] * 4
    assert steps_on(tmp_path, 0) == steps_on(tmp_path, 1) == [2]
    assert CheckpointReader(far).steps == (2,)


@pytest.mark.system
def test_names_that_collide_only_in_the_far_tier(tmp_path: Path, mounts: Mounts) -> None:
    def work(run: Checkpointer, rank: int, watch: Watch, tiers: TieredDirectory) -> None:
        values = sharded(1, rank, len(HOSTS))
        assert run.save_checkpointables(1, {"Model": values, "model": values}) is not None
        run.wait()
        if rank == 0:
            with pytest.raises(UploadError, match="step 1 cannot be uploaded: NameCollisionError"):
                tiers.wait_for_uploads(60)
        save(run, [2], rank)

    far = str(mounts.odd("case") / "run")
    job(tmp_path, far, work)
    assert CheckpointReader(far).steps == (2,)
    assert not [name for name in os.listdir(far) if name.startswith(".1.")]
