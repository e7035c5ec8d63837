"""Steps of the far tier are read concurrently.

A step that cannot be read or uploaded does not block the others.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from ckptcore_tiers import NearTier, TieredDirectory

from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import (
    NameCollisionError,
    ObjectUnavailableError,
    StorageError,
    StoragePermissionError,
    UploadError,
)
from ckptcore.policies import PreserveAll
from plugins.tiers.tests.far_stores import Standstill
from plugins.tiers.tests.signals import Signals, join_uploads
from tests.checkpointer.runs import ROOT, Meeting, Watch, save_steps, store_of, through, tree, watched, writes_arrays
from tests.storage.mounts import Mounts, mounts

__all__ = ["mounts"]

STEPS = (1, 2, 3, 4)


@pytest.mark.parametrize("known", [(), STEPS], ids=["far", "near and far"])
def test_steps_of_the_far_tier_are_read_concurrently(known: Sequence[int], near: str) -> None:
    meeting, tier = Meeting(), NearTier(near, preservation_policy=PreserveAll())
    with Checkpointer(TieredDirectory(tier, "far://run"), context=meeting.context) as run:
        save_steps(run, STEPS)
    if not known:
        shutil.rmtree(near)
    meeting.left = 2 if known else 1  # one for the list of steps, one to compare them with those of the near tier
    with Checkpointer(TieredDirectory(tier, "far://run"), context=meeting.context) as run:
        assert run.steps == STEPS
    assert meeting.left == 0


def fail_at(watch: Watch, step: int, error: type[StorageError]) -> None:
    """Make every request for the root of a step fail, but not the list of steps."""

    def fail(name: str, keys: Sequence[str]) -> None:
        if any(f"{step}/{ROOT}" in key for key in keys):
            raise error(f"step {step} is not for you")

    watch.before = fail


@pytest.mark.parametrize("closed", [1, 3], ids=["old", "newest"])
@pytest.mark.parametrize("error", [ObjectUnavailableError, StoragePermissionError])
def test_a_run_opens_despite_unreadable_far_step(closed: int, error: type[StorageError], near: str, far: str) -> None:
    watch = Watch()
    context, tier = watched(watch), NearTier(near, preservation_policy=PreserveAll())
    with Checkpointer(TieredDirectory(tier, through(far)), context=context) as run:
        save_steps(run, [1, 2, 3])
    fail_at(watch, closed, error)
    with Checkpointer(TieredDirectory(tier, through(far)), context=context) as run:
        save_steps(run, [4])
        assert run.steps == (1, 2, 3, 4)
    assert CheckpointReader(far).steps == (1, 2, 3, 4)


def test_a_step_without_permission_is_uploaded_after_the_others(near: str, far: str, signals: Signals) -> None:
    watch = Watch()
    tiers = TieredDirectory(NearTier(near, preservation_policy=PreserveAll()), through(far))
    with Checkpointer(tiers, context=watched(watch, observers=[signals])) as run:
        stands = Standstill(watch)
        save_steps(run, [1])
        assert stands.arrived.wait(60)
        save_steps(run, [2, 3])
        stands.open()
        fail_at(watch, 3, StoragePermissionError)
        signals.until(lambda: tiers.uploads.uploaded == (1, 2) and tiers.uploads.error is not None)
        watch.before = lambda name, keys: None  # grant the permission
        tiers.wait_for_uploads(60)
        assert tiers.uploads.error is None
    assert CheckpointReader(far).steps == (1, 2, 3)


def _put_other_files(far: str, watch: Watch) -> None:
    store_of(far).put("2/notes.txt", b"of a person")


def _refuse_names(far: str, watch: Watch) -> None:
    def refuse(name: str, keys: Sequence[str]) -> None:
        if writes_arrays(name, keys) and ".2." in f".{keys[0].replace('/', '.')}":
            raise NameCollisionError("'W' and 'w' would be one file")

    watch.before = refuse


@pytest.mark.parametrize("hinder", [_put_other_files, _refuse_names])
def test_a_step_that_cannot_be_uploaded_is_reported_once_and_blocks_no_other(
    hinder: Callable[[str, Watch], None], near: str, far: str, caplog: pytest.LogCaptureFixture, signals: Signals
) -> None:
    watch = Watch()
    run = Checkpointer(tiers := TieredDirectory(NearTier(near), through(far)), context=watched(watch))
    save_steps(run, [1])
    tiers.wait_for_uploads(60)
    hinder(far, watch)
    for step in (2, 3):
        saving = run.save(step, tree(step))
        assert saving is not None
        saving.result()
        signals.until(lambda: any("step 2 cannot be uploaded" in message for message in signals.messages))
        join_uploads()
    with pytest.raises(UploadError, match="step 2 cannot be uploaded") as raised:
        run.close()
    assert raised.value.steps == (2,)
    assert CheckpointReader(far).steps == (1, 3)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.system
def test_names_that_collide_only_in_the_far_tier(near: str, mounts: Mounts) -> None:
    far = mounts.odd("case") / "run"
    run = Checkpointer(TieredDirectory(NearTier(near), far), layout="zarr3")
    run.save(1, {"W": np.zeros(2), "w": np.ones(2)})
    run.save(2, {"w": np.ones(2)})
    with pytest.raises(UploadError, match="step 1 cannot be uploaded: NameCollisionError"):
        run.close()
    assert CheckpointReader(far).steps == (2,)
