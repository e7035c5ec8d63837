"""Which of two saves of a step is the later one, if the clocks of hosts differ."""

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
from ckptcore.commit.root import MAX_ORDER, ROOT_KEY, SaveOrder
from ckptcore.commit.root_json import with_order
from ckptcore.policies import FixedInterval, LatestN
from ckptcore.saving import save as saves
from tests.checkpointer.runs import store_of, tree

SetClock = Callable[[float], None]


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Return a function that sets the clock of the host ahead by some hours."""

    def set_clock(ahead: float) -> None:
        def created() -> str:
            now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=ahead)
            return now.isoformat(timespec="milliseconds")

        monkeypatch.setattr(saves, "save_created", created)

    return set_clock


def branch(step: int, number: int) -> dict[str, Any]:
    """Return the state of a step on a numbered branch of the training."""
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
def test_a_run_that_was_set_back_loads_and_uploads_its_new_steps(
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


def test_steps_of_an_interrupted_run_replace_the_abandoned_steps(near: str, far: str, hours: SetClock) -> None:
    hours(2)
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1, 2, 3)
    hours(0)
    with Checkpointer(near) as run:  # a run without the far tier
        assert branch_in(run, 1) == 1
        save(run, 2, 2, 3)
    with Checkpointer(tiers(near, far)) as run:
        assert branch_in(run) == 2
    assert branch_in(CheckpointReader(far)) == 2


def test_old_steps_of_a_returning_host_replace_no_newer_steps(near: str, far: str, hours: SetClock) -> None:
    """The clock of this host is ahead, and it has saved its steps several times.

    Meanwhile the run continued elsewhere.
    """
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


def test_save_numbers_increase_without_the_records_of_owners(near: str, far: str) -> None:
    """A copy of a run contains only the steps."""
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
def test_a_save_without_a_run_is_later_than_the_step_that_it_replaces(
    near: str, far: str, hours: SetClock, overwrite: Any
) -> None:
    hours(2)
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1)
    hours(0)
    ckptcore.save(f"{near}/1", branch(1, 2), overwrite=overwrite)
    with Checkpointer(tiers(near, far)) as run:
        assert branch_in(run) == 2
    assert branch_in(CheckpointReader(far)) == 2


@pytest.mark.parametrize("replaced", ["near", "far"])
@pytest.mark.parametrize("whole_run", [False, True], ids=["step", "run"])
def test_a_copy_is_later_than_the_step_that_it_replaces(
    near: str, far: str, hours: SetClock, replaced: str, *, whole_run: bool
) -> None:
    """The copy is a backup that a user restores."""
    backup, place = f"{near}-backup", {"near": near, "far": far}[replaced]
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1)
    ckptcore.copy_steps(far, backup)
    hours(2)
    for _ in range(3):
        with Checkpointer(tiers(near, far)) as run:
            save(run, 2, 1)
    hours(0)
    for _ in range(2):
        if whole_run:
            ckptcore.copy_steps(backup, place, overwrite="non-atomic")
        else:
            ckptcore.copy(f"{backup}/1", f"{place}/1", overwrite="non-atomic")
        assert ckptcore.verify(f"{place}/1").ok
        assert ckptcore.copy(f"{backup}/1", f"{place}/1").sent_bytes == 0, "it is the same save"
        with Checkpointer(tiers(near, far)) as run:
            assert branch_in(run, 1) == 1
    assert branch_in(CheckpointReader(far)) == 1


@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
def test_a_conversion_is_later_than_the_step_that_it_replaces(near: str, far: str, layout: str) -> None:
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1)
    ckptcore.copy(f"{near}/1", f"{near}-backup", layout=layout)
    for _ in range(3):
        with Checkpointer(tiers(near, far)) as run:
            save(run, 2, 1)
    ckptcore.copy(f"{near}-backup", f"{near}/1", layout=layout, overwrite="non-atomic")
    with Checkpointer(tiers(near, far)) as run:
        assert branch_in(run) == 1
    assert branch_in(CheckpointReader(far)) == 1


def test_save_numbers_increase_after_a_run_was_copied(near: str, far: str, hours: SetClock) -> None:
    """The run was set back several times before the copy. Later its old near directory is used with the copy."""
    hours(2)
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1, 2, 3)
    for _ in range(3):
        with Checkpointer(tiers(near, far)) as run:
            save(run, 2, 2, 3)
    hours(0)
    ckptcore.copy_steps(far, f"{far}-copied")
    with Checkpointer(tiers(f"{near}-2", f"{far}-copied")) as run:
        assert branch_in(run, 1) == 1
        save(run, 3, 2, 3)
        assert branch_in(run) == 3
    with Checkpointer(tiers(near, f"{far}-copied")) as run:
        assert branch_in(run) == 3
    assert branch_in(CheckpointReader(f"{far}-copied")) == 3
    assert branch_in(CheckpointReader(far)) == 2


@pytest.mark.parametrize("order", [SaveOrder(7, MAX_ORDER), SaveOrder(MAX_ORDER, 0)], ids=repr)
@pytest.mark.parametrize("by", ["a run", "a save", "a copy"])
def test_saves_after_the_highest_number_are_still_later(near: str, far: str, order: SaveOrder, by: str) -> None:
    with Checkpointer(tiers(near, far)) as run:
        save(run, 1, 1)
    ckptcore.copy(f"{near}/1", f"{near}-backup")
    for directory in (near, far):
        store, key = store_of(directory), f"1/{ROOT_KEY}"
        store.put(key, with_order(store.get(key), order))
    if by == "a run":
        with Checkpointer(tiers(near, far)) as run:
            assert branch_in(run) == 1
            save(run, 2, 1)
    elif by == "a save":
        ckptcore.save(f"{near}/1", branch(1, 2), overwrite="non-atomic")
    else:
        ckptcore.save(f"{near}-other", branch(1, 2))
        ckptcore.copy(f"{near}-other", f"{near}/1", overwrite="non-atomic")
    with Checkpointer(tiers(near, far)) as run:
        assert branch_in(run) == 2
    assert branch_in(CheckpointReader(far)) == 2


@pytest.mark.parametrize("is_continued", [True, False])
def test_a_warning_names_later_steps_of_a_run_that_continued_elsewhere(
    near: str, far: str, caplog: pytest.LogCaptureFixture, *, is_continued: bool
) -> None:
    with Checkpointer(tiers(near, far, upload_policy=FixedInterval(100))) as run:
        save(run, 1, 0, 1, 2, 3)
    with Checkpointer(tiers(f"{near}-elsewhere", far)) as run:
        assert run.load()["step"] == 0
        if is_continued:
            save(run, 2, 1, 2)
    with Checkpointer(tiers(near, far, upload_policy=FixedInterval(100))) as run:
        for _ in range(2):
            assert run.load()["step"] == 3 and branch_in(run, 2) == 1 + is_continued
        warned = [record.message for record in caplog.records if "was saved before step 2 in" in record.message]
        assert len(warned) == is_continued
        if is_continued:  # follows the remedy
            assert (
                warned[0].startswith(f"step 3 exists only in {near}")
                and f"delete the later steps in {near}" in warned[0]
            )
            ckptcore.delete(f"{near}/3")
            run.reload()
            assert run.load()["step"] == 2 and branch_in(run) == 2
