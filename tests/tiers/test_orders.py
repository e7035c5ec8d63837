"""Which of two saves of a step counts, on hosts whose clocks differ."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.policies import FixedInterval, LatestN
from ckptcore.saving import preparing
from tests.checkpointer.runs import store_of, tree

SetClock = Callable[[float], None]


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Return a function that sets the clock of the host ahead by some hours."""

    def set_clock(ahead: float) -> None:
        def created() -> str:
            now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=ahead)
            return now.isoformat(timespec="milliseconds")

        monkeypatch.setattr(preparing, "save_created", created)

    return set_clock


def branch(step: int, number: int) -> dict[str, Any]:
    """The state of a step on a branch of the training."""
    return {**tree(step), "w": np.full((3, 5), number, np.float32)}


def save(run: Checkpointer, number: int, *steps: int) -> None:
    for step in steps:
        run.save_blocking(step, branch(step, number), overwrite="non-atomic")


def branch_in(run: CheckpointReader | Checkpointer, step: int | None = None) -> int:
    return int(run.load(step)["w"][0, 0])


def tiers(near: str, far: str, **options: Any) -> TieredDirectory:
    return TieredDirectory(NearTier(near, preservation_policy=LatestN(99), **options), far)


@pytest.mark.parametrize("lost", [True, False], ids=["another-host", "same-host"])
@pytest.mark.parametrize("ahead", [2, -2])
def test_a_run_that_is_set_back_loads_and_uploads_what_it_saves(
    near: str, far: str, hours: SetClock, ahead: float, *, lost: bool
) -> None:
    hours(ahead)
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1, 2, 3, 4, 5)
    hours(0)
    if lost:
        shutil.rmtree(near)
    with Checkpointer(directory := tiers(near, far)) as run:
        assert branch_in(run, 3) == 1
        save(run, 2, 4, 5)
        assert branch_in(run) == 2 and branch_in(run, 4) == 2
        directory.wait_for_uploads(60)
        assert directory.uploads.uploaded == (4, 5)
        assert branch_in(run) == 2 and branch_in(run, 4) == 2
    assert branch_in(CheckpointReader(far)) == 2
    shutil.rmtree(near)
    with Checkpointer(tiers(near, far)) as run:
        assert branch_in(run) == 2


def test_what_an_interrupted_run_did_not_upload_replaces_the_abandoned_steps(
    near: str, far: str, hours: SetClock
) -> None:
    hours(2)
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1, 2, 3)
    hours(0)
    with Checkpointer(near) as run:  # the far tier is away
        assert branch_in(run, 1) == 1
        save(run, 2, 2, 3)
    with Checkpointer(tiers(near, far)) as run:
        assert branch_in(run) == 2
    assert branch_in(CheckpointReader(far)) == 2


def test_a_host_that_returns_with_old_steps_replaces_none(near: str, far: str, hours: SetClock) -> None:
    """Its clock is ahead, and it has saved its steps several times; the run was continued elsewhere meanwhile."""
    hours(2)
    with Checkpointer(tiers(near, far, upload_policy=FixedInterval(100))) as run:
        save(run, 1, 0)
        for _ in range(3):
            save(run, 1, 1, 2)
    hours(0)
    with Checkpointer(tiers(f"{near}-elsewhere", far)) as run:
        assert branch_in(run) == 1 and run.restored_step == 0
        save(run, 2, 1, 2)
    with Checkpointer(directory := tiers(near, far)) as run:
        assert branch_in(run) == 2
        directory.wait_for_uploads(60)
        assert directory.uploads.uploaded == ()
    assert branch_in(CheckpointReader(far)) == 2


def test_a_run_without_the_records_of_its_owners_counts_on(near: str, far: str) -> None:
    """Somebody copied only the steps."""
    for _ in range(2):
        with Checkpointer(tiers(near, far)) as run:
            save(run, 1, 1, 2)
    for directory in (near, far):
        store = store_of(directory)
        store.delete(list(store.list(".ckptcore")))
    with Checkpointer(tiers(near, far)) as run:
        assert branch_in(run, 1) == 1
        save(run, 2, 2)
        assert branch_in(run) == 2
    assert branch_in(CheckpointReader(far)) == 2


@pytest.mark.parametrize("overwrite", [True, "non-atomic"])
def test_a_plain_save_counts_more_than_what_it_replaces(near: str, far: str, hours: SetClock, overwrite: Any) -> None:
    hours(2)
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1)
    hours(0)
    ckptcore.save(f"{near}/1", branch(1, 2), overwrite=overwrite)
    with Checkpointer(tiers(near, far)) as run:
        assert branch_in(run) == 2
    assert branch_in(CheckpointReader(far)) == 2
