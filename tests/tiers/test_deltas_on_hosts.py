"""Deltas in near directories of hosts: not saved there, because a host has only a part; whole chains are read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from ckptcore_testing import ThreadJob
from ckptcore_testing.cases import refused
from ckptcore_tiers import NearTier, TieredDirectory
from ckptcore_versions import VERSION_NAMES, Publisher, follow
from ckptcore_versions.held_version import BaseVersion

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.protocols import Coordinator
from plugins.tiers.tests.test_hosts import job, loaded_step, near_of, save, sharded, steps_on
from plugins.versions.tests.held import HeldState, Unwritten
from plugins.versions.tests.published import in_job


def test_differences_are_not_saved_in_directories_of_hosts(tmp_path: Path) -> None:
    far = str(tmp_path / "far" / "run")
    job(tmp_path, far, lambda run, rank, *_: save(run, [1], rank))

    def save_delta(run: Checkpointer, rank: int, *_: Any) -> int:
        refused(
            lambda: run.save_blocking(2, sharded(2, rank, 4)),
            "the layout 'deltas' stores differences from a base, of which each host would have only a part",
            "Nothing was written",
        )
        return loaded_step(run, rank)

    layout = Unwritten(HeldState(BaseVersion("1", "", "", 1), {}))
    assert job(tmp_path, far, save_delta, layout=layout) == [1] * 4
    assert [steps_on(tmp_path, host) for host in (0, 1)] == [[1], [1]]


def test_chains_in_directories_of_hosts_are_followed(tmp_path: Path) -> None:
    far, states = str(tmp_path / "far" / "run"), []
    with Publisher(far, context=ckptcore.Context(durability="none")) as publisher:
        for number in range(3):
            states.append({"w": np.arange(6000, dtype=np.float32) + (np.arange(6000) % 97 == number), "n": number})
            publisher.publish(number, states[-1])
    for host in (0, 1):
        shutil.copytree(far, near_of(tmp_path, host))
    (delta,) = (Path(near_of(tmp_path, 1)) / "v000002").glob("deltas.*")
    delta.unlink()  # the far copy has it
    shutil.rmtree(Path(far) / "v000001")

    def read(coordinator: Coordinator) -> bool:
        tiers = TieredDirectory(NearTier(near_of(tmp_path, coordinator.rank), seen_by="host"), far)
        context = in_job(coordinator)
        reader = CheckpointReader(tiers, step_names=VERSION_NAMES, context=context)
        loaded = reader.load()
        cache = tmp_path / f"cache-{coordinator.rank}"
        with follow(tiers, cache=cache, step_names=VERSION_NAMES, context=context) as follower:
            version = follower.next_version(0)
            assert version is not None
        followed = np.asarray(version.arrays["w"])
        return np.array_equal(loaded["w"], states[2]["w"]) and np.array_equal(followed, states[2]["w"])

    assert ThreadJob(2, timeout_seconds=60).run(read) == [True, True]
