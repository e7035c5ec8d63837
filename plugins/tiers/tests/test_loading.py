"""A load uses the nearest valid copy of the newest step. It logs a warning if this is not the nearest copy."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OnlyStepError,
    StepPinnedError,
)
from ckptcore.events import Event
from ckptcore.policies import FixedInterval, LatestN
from tests.checkpointer.runs import (
    ROOT,
    array_key,
    assert_is_step,
    cut,
    flip,
    keys_of,
    remove,
    save_steps,
    store_of,
    tree,
)


def saved(near: str, far: str, *steps: int) -> None:
    """Save steps in both tiers."""
    with Checkpointer(TieredDirectory(NearTier(near, preservation_policy=LatestN(9)), far)) as run:
        save_steps(run, steps)


def steps_in(directory: str) -> list[int]:
    """Return the steps that another process would find."""
    return list(CheckpointReader(directory).steps)


def test_the_nearest_copy_is_loaded(near: str, far: str) -> None:
    saved(near, far, 1)
    flip(far, array_key(far, "1"))  # this copy is not read
    with Checkpointer(TieredDirectory(NearTier(near), far)) as run:
        assert_is_step(run.load(), 1)
        assert_is_step(run.load(1), 1)


def test_uploaded_steps_survive_the_loss_of_the_near_tier(near: str, far: str) -> None:
    saved(near, far, 1, 2)
    shutil.rmtree(near)
    with Checkpointer(TieredDirectory(NearTier(near), far)) as run:
        assert run.latest == 2 and run.steps == (1, 2)
        assert_is_step(run.load(), 2)
        assert run.restored_step == 2 and run.skipped_steps == ()
        assert run.step_info(1).step == 1
        assert run.metadata(1).metrics == {}
        save_steps(run, [3])
        assert list(run.steps) == [1, 2, 3]
    assert steps_in(near) == [3] and steps_in(far) == [1, 2, 3]


@pytest.mark.parametrize("harm", [cut, flip, remove])
@pytest.mark.parametrize("named", [True, False])
def test_a_damaged_near_copy_causes_a_warning_and_a_load_of_the_far_copy(
    near: str, far: str, harm: Callable[..., None], named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved(near, far, 1, 2)
    harm(near, array_key(near, "2"))
    events: list[Event] = []
    context = ckptcore.Context(observers=[events.append])
    with Checkpointer(TieredDirectory(NearTier(near), far), context=context) as run:
        with caplog.at_level(logging.WARNING, "ckptcore.training"):
            assert_is_step(run.load(2 if named else None), 2)
        assert run.restored_step == 2 and run.skipped_steps == ()
    assert f"step 2 in {near} cannot be loaded" in caplog.text
    loads = [(event.location, event.error is None) for event in events if event.phase == "load"]
    assert loads == [(f"{near}/2", False), (f"{far}/2", True)]


def test_a_damaged_root_causes_a_load_of_the_far_copy(near: str, far: str) -> None:
    saved(near, far, 1)
    cut(near, f"1/{ROOT}")
    with Checkpointer(TieredDirectory(NearTier(near), far)) as run:
        assert_is_step(run.load(), 1)


def test_a_step_that_is_damaged_in_both_tiers_is_skipped(near: str, far: str) -> None:
    saved(near, far, 1, 2)
    flip(near, array_key(near, "2"))
    flip(far, array_key(far, "2"))
    with Checkpointer(tiers := TieredDirectory(NearTier(near), far)) as run:
        assert_is_step(run.load(), 1)
        (skip,) = run.skipped_steps
        assert skip.step == 2 and near in skip.reason and far in skip.reason
        with pytest.raises(CorruptCheckpointError) as raised:
            run.load(2)
        assert any("another copy" in note and near in note for note in raised.value.__notes__)
        # A new save replaces the step in both tiers, even without `overwrite`.
        save_steps(run, [2])
        tiers.wait_for_uploads(60)
    assert_is_step(CheckpointReader(far).load(2), 2)
    assert_is_step(CheckpointReader(near).load(2), 2)


def test_a_target_is_filled_completely_from_the_far_copy(near: str, far: str) -> None:
    saved(near, far, 1, 2)
    flip(near, array_key(near, "2"))
    target = {"w": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.int64), "step": 0}
    with Checkpointer(TieredDirectory(NearTier(near), far)) as run:
        assert_is_step(run.load_into(target), 2)


def test_the_later_save_of_a_step_is_used_from_either_tier(near: str, far: str) -> None:
    saved(near, far, 1, 2)
    with Checkpointer(far) as elsewhere:  # the run continued on a host without this near tier
        elsewhere.save(2, {**tree(2), "w": np.full((3, 5), 22, np.float32)}, overwrite="non-atomic")
    with Checkpointer(tiers := TieredDirectory(NearTier(near), far)) as run:
        assert (run.load()["w"] == 22).all()
        tiers.wait_for_uploads(60)
        assert tiers.uploads.uploaded == ()
    with Checkpointer(tiers := TieredDirectory(NearTier(near, upload_policy=FixedInterval(100)), far)) as run:
        # After the run was set back, the replacement of an uploaded step is uploaded regardless of the policy.
        run.save(2, {**tree(2), "w": np.full((3, 5), 222, np.float32)}, overwrite=True)
        run.wait()
        assert (run.load()["w"] == 222).all()
        tiers.wait_for_uploads(60)
        assert tiers.uploads.uploaded == (2,)
    assert (CheckpointReader(far).load()["w"] == 222).all()


def test_a_near_copy_that_replaces_a_far_one_is_uploaded_by_the_next_run(near: str, far: str) -> None:
    saved(near, far, 1)
    with Checkpointer(near) as run:
        run.save(1, {**tree(1), "w": np.full((3, 5), 11, np.float32)}, overwrite=True)
    with Checkpointer(TieredDirectory(NearTier(near, upload_policy=FixedInterval(100)), far)):
        pass
    assert (CheckpointReader(far).load()["w"] == 11).all()


def test_a_save_finds_a_step_that_only_the_far_tier_has(near: str, far: str) -> None:
    saved(near, far, 1)
    shutil.rmtree(near)
    with Checkpointer(TieredDirectory(NearTier(near), far)) as run:
        with pytest.raises(CheckpointExistsError, match="already has step 1"):
            run.save(1, tree(1))
        run.save(1, tree(1), overwrite=True)


def test_a_deleted_step_stays_deleted_in_both_tiers(near: str, far: str) -> None:
    with Checkpointer(tiers := TieredDirectory(NearTier(near, preservation_policy=LatestN(9)), far)) as run:
        save_steps(run, [1, 2])
        tiers.wait_for_uploads(60)
        run.delete(1)
        assert run.steps == (2,)
        run.wait()
        with pytest.raises(CheckpointNotFoundError):
            run.delete(1)
    with Checkpointer(TieredDirectory(NearTier(near), far)):
        pass
    assert steps_in(near) == steps_in(far) == [2]


def test_the_only_valid_step_of_all_tiers_is_not_deleted(near: str, far: str) -> None:
    saved(near, far, 1)
    with Checkpointer(TieredDirectory(NearTier(near), far)) as run:
        with pytest.raises(OnlyStepError):
            run.delete(1)
        assert run.steps == (1,)
        save_steps(run, [2])
    shutil.rmtree(near)
    with Checkpointer(tiers := TieredDirectory(NearTier(near), far)) as run:
        save_steps(run, [3])
        tiers.wait_for_uploads(60)
        run.delete(3)  # the only step in the near tier
        run.wait()
        assert run.steps == (1, 2)


def test_a_step_that_is_pinned_in_one_tier_is_deleted_from_neither(near: str, far: str) -> None:
    saved(near, far, 1, 2)
    with Checkpointer(TieredDirectory(NearTier(near, preservation_policy=LatestN(9)), far)) as run:
        with CheckpointReader(far).pin(1), pytest.raises(StepPinnedError):
            run.delete(1)
        assert run.steps == (1, 2)
        with run.pin(1), pytest.raises(StepPinnedError):
            run.delete(1)
        run.delete(1)
        run.wait()
    assert steps_in(near) == steps_in(far) == [2]


def test_the_error_for_a_load_before_the_first_save(near: str, far: str) -> None:
    with (
        Checkpointer(TieredDirectory(NearTier(near), far)) as run,
        pytest.raises(CheckpointNotFoundError, match="no committed step"),
    ):
        run.load()
    assert not [key for key in keys_of(far) if not key.startswith(".ckptcore")]
    assert store_of(near) is not None
