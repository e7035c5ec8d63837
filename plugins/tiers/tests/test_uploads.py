"""Steps are committed in the near tier and uploaded in the background. The job does not wait for uploads."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ckptcore_tiers import NearTier, TieredDirectory

from ckptcore import Checkpointer, CheckpointReader, Context
from ckptcore.errors import DirectoryInUseError, InvalidLocationError, SaveLostError, UploadError
from ckptcore.events import Event
from ckptcore.policies import AnySave, EveryStep, FixedInterval, LatestN, PreemptionCheckpointing, PreserveAll
from plugins.tiers.tests.far_stores import Outage, Standstill
from plugins.tiers.tests.signals import Signals, join_uploads
from tests.checkpointer.runs import (
    Watch,
    array_key,
    assert_is_step,
    cut,
    flip,
    keys_of,
    remove,
    save_steps,
    store_of,
    through,
    tree,
    watched,
)


def steps_in(directory: str) -> list[int]:
    """Return the steps that another process would find."""
    return list(CheckpointReader(directory).steps)


def test_a_step_is_committed_near_and_then_far(near: str, far: str) -> None:
    with Checkpointer(tiers := TieredDirectory(NearTier(near), far)) as run:
        handle = run.save(1, tree(1), metrics={"loss": 0.5}, metadata={"note": "first"})
        assert handle is not None
        handle.result()
        assert steps_in(near) == [1]
        tiers.wait_for_uploads(60)
        assert tiers.uploads.uploaded == (1,) and tiers.uploads.waiting == ()
    # The objects are equal in both tiers, so that other tools can read either tier.
    assert {key: store_of(far).get(key) for key in keys_of(far, "1")} == {
        key: store_of(near).get(key) for key in keys_of(near, "1")
    }
    reader = CheckpointReader(far)
    assert_is_step(reader.load(), 1)
    assert reader.step_info(1).metrics == {"loss": 0.5}
    assert reader.metadata(1).custom == {"note": "first"}


def test_several_checkpointables_are_uploaded(near: str, far: str) -> None:
    with Checkpointer(TieredDirectory(NearTier(near), far)) as run:
        run.save_checkpointables(3, {"model": tree(3), "data": {"position": 7}})
    loaded = CheckpointReader(far).load_checkpointables()
    assert_is_step(loaded["model"], 3)
    assert loaded["data"] == {"position": 7}


def test_each_tier_keeps_the_steps_of_its_policy(near: str, far: str) -> None:
    tier = NearTier(near, preservation_policy=LatestN(1), upload_policy=FixedInterval(2))
    with Checkpointer(tiers := TieredDirectory(tier, far), preservation_policy=LatestN(2)) as run:
        for step in range(1, 8):
            save_steps(run, [step])
            tiers.wait_for_uploads(60)
        assert run.steps == (4, 6, 7)
    assert steps_in(near) == [7]
    assert steps_in(far) == [4, 6]


def test_saves_do_not_wait_for_uploads_and_waiting_steps_are_kept(near: str, far: str, signals: Signals) -> None:
    watch = Watch()
    tier = NearTier(near, preservation_policy=LatestN(1))
    with Checkpointer(tiers := TieredDirectory(tier, through(far)), context=watched(watch, observers=[signals])) as run:
        stands = Standstill(watch)
        save_steps(run, [1])
        assert stands.arrived.wait(60)
        save_steps(run, [2, 3])
        assert tiers.uploads.uploading == 1 and tiers.uploads.waiting == (2, 3)
        assert run.latest == 3
        assert steps_in(near) == [1, 2, 3] and steps_in(far) == []
        with pytest.raises(UploadError, match=r"steps 1, 2, 3 wait in .*run\. The next") as raised:
            tiers.wait_for_uploads(0.01)
        assert raised.value.steps == (1, 2, 3)
        stands.open()
        tiers.wait_for_uploads(60)
        # All steps are uploaded, because the policy of the far tier keeps all of them.
        assert tiers.uploads.uploaded == (1, 2, 3)
        signals.until(lambda: steps_in(near) == [3])
    assert steps_in(far) == [1, 2, 3]


def test_steps_are_uploaded_if_no_thread_can_wait_for_them_at_exit(
    near: str, far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "ckptcore-upload-exit":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with Checkpointer(tiers := TieredDirectory(near, far)) as run:
        save_steps(run, [1])
        tiers.wait_for_uploads(60)
    assert steps_in(far) == [1]


def test_an_upload_begins_later_if_no_thread_can_be_started(
    near: str, far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    has_threads = False

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "ckptcore-upload" and not has_threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with Checkpointer(tiers := TieredDirectory(near, far)) as run:
        save_steps(run, [1])
        with pytest.raises(UploadError, match="can't start new thread"):
            tiers.wait_for_uploads()  # does not wait for a thread that is missing
        has_threads = True
        tiers.wait_for_uploads(60)
    assert steps_in(far) == [1]


def test_a_late_uploader_uploads_the_newest_step_first_and_reports_skipped_ones(
    near: str, far: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch()
    events: list[Event] = []
    context = watched(watch, observers=[events.append])
    with Checkpointer(
        tiers := TieredDirectory(NearTier(near), through(far)), preservation_policy=LatestN(2), context=context
    ) as run:
        stands = Standstill(watch)
        save_steps(run, [1])
        assert stands.arrived.wait(60)
        save_steps(run, [2, 3, 4, 5])
        with caplog.at_level(logging.INFO, "ckptcore.tiers"):
            stands.open()
            tiers.wait_for_uploads(60)
        assert [skip.step for skip in tiers.uploads.skipped] == [2, 3]
        assert "keeps the latest 2" in tiers.uploads.skipped[0].reason
    assert "step 2 is not uploaded" in caplog.text
    assert steps_in(far) == [4, 5]
    uploads = [(event.step, event.error is None) for event in events if event.phase == "upload"]
    assert uploads == [(1, True), (2, False), (3, False), (5, True), (4, True)]


def test_the_number_of_waiting_steps_is_limited(near: str, far: str, signals: Signals) -> None:
    watch = Watch()
    tier = NearTier(near, preservation_policy=LatestN(1), max_waiting=2)
    with Checkpointer(tiers := TieredDirectory(tier, through(far)), context=watched(watch, observers=[signals])) as run:
        stands = Standstill(watch)
        save_steps(run, [1])
        assert stands.arrived.wait(60)
        save_steps(run, [2, 3, 4])
        # A running upload continues. Otherwise a run that saves faster than it uploads would never complete an upload.
        assert tiers.uploads.uploading == 1 and tiers.uploads.waiting == (3, 4)
        signals.until(lambda: steps_in(near) == [1, 3, 4])
        stands.open()
        tiers.wait_for_uploads(60)
        (skip,) = tiers.uploads.skipped
        assert skip.step == 2 and "max_waiting=2" in skip.reason
    assert steps_in(far) == [1, 3, 4]


def test_an_outage_of_the_far_tier_stops_no_save_and_uploads_are_retried(
    near: str, far: str, caplog: pytest.LogCaptureFixture, signals: Signals
) -> None:
    watch = Watch()
    with Checkpointer(tiers := TieredDirectory(NearTier(near), through(far)), context=watched(watch)) as run:
        save_steps(run, [1])
        tiers.wait_for_uploads(60)
        away = Outage(watch)
        away.begin()
        save_steps(run, [2, 3])
        assert away.met.wait(60)
        signals.until(lambda: tiers.uploads.error is not None)
        assert_is_step(run.load(), 3)
        assert run.latest == 3
        with pytest.raises(UploadError, match="503: the far tier is away"):
            tiers.wait_for_uploads(0.01)
        away.end()
        tiers.wait_for_uploads(60)
        assert tiers.uploads.error is None
    assert steps_in(far) == [1, 2, 3]
    assert (
        sum(record.levelno == logging.WARNING for record in caplog.records if "cannot upload a step" in record.message)
        == 1
    )


def test_close_reports_missing_uploads_and_the_next_run_completes_them(near: str, far: str) -> None:
    watch = Watch()
    run = Checkpointer(TieredDirectory(NearTier(near, close_seconds=0.2), through(far)), context=watched(watch))
    away = Outage(watch)
    away.begin()
    save_steps(run, [1, 2])
    with pytest.raises(UploadError, match="the far tier is away.* same tiers uploads waiting steps") as raised:
        run.close()
    assert raised.value.steps == (1, 2)
    away.end()
    assert steps_in(near) == [1, 2] and steps_in(far) == []
    with Checkpointer(tiers := TieredDirectory(NearTier(near), far)) as run:
        assert run.latest == 2
        tiers.wait_for_uploads(60)
    assert steps_in(far) == [1, 2]


def test_close_leaves_uploads_to_the_next_run_on_request(near: str, far: str) -> None:
    watch = Watch()
    run = Checkpointer(TieredDirectory(NearTier(near, close_seconds=0), through(far)), context=watched(watch))
    stands = Standstill(watch)
    save_steps(run, [1, 2])
    assert stands.arrived.wait(60)
    stands.open()
    run.close()
    with Checkpointer(tiers := TieredDirectory(NearTier(near, upload_policy=FixedInterval(2)), far)) as run:
        tiers.wait_for_uploads(60)
    assert 2 in steps_in(far)


def test_an_error_in_the_block_is_kept_if_uploads_are_missing(near: str, far: str) -> None:
    watch = Watch()
    with (
        pytest.raises(KeyError) as raised,
        Checkpointer(TieredDirectory(NearTier(near, close_seconds=0.1), through(far)), context=watched(watch)) as run,
    ):
        Outage(watch).begin()
        save_steps(run, [1])
        raise KeyError("training")
    assert "UploadError" in raised.value.__notes__[0]


@pytest.mark.parametrize("harm", [cut, flip, remove])
def test_a_damaged_near_step_is_reported_and_blocks_no_other(near: str, far: str, harm: Callable[..., None]) -> None:
    watch = Watch()
    run = Checkpointer(tiers := TieredDirectory(NearTier(near), through(far)), context=watched(watch))
    stands = Standstill(watch)
    save_steps(run, [1])
    assert stands.arrived.wait(60)
    save_steps(run, [2])
    harm(near, array_key(near, "2"))
    stands.open()
    join_uploads()
    assert tiers.uploads.failed
    saving = run.save(3, tree(3))  # the damage does not fail later saves
    assert saving is not None
    saving.result()
    with pytest.raises(UploadError, match="step 2 cannot be uploaded") as raised:
        run.wait()
    assert raised.value.steps == (2,)
    run.close()  # the error is raised only once
    assert steps_in(far) == [1, 3]


def test_both_directories_belong_to_the_run(near: str, far: str) -> None:
    with Checkpointer(TieredDirectory(NearTier(near), far)):
        with pytest.raises(DirectoryInUseError):
            Checkpointer(far)
        with pytest.raises(DirectoryInUseError):
            Checkpointer(near)
    with Checkpointer(far), pytest.raises(DirectoryInUseError):
        Checkpointer(TieredDirectory(NearTier(near), far))
    with Checkpointer(near):  # the run that failed to own both directories owns neither
        pass


def test_a_run_that_lost_the_far_tier_does_not_change_it(near: str, far: str) -> None:
    run = Checkpointer(tiers := TieredDirectory(NearTier(near), far))
    save_steps(run, [1])
    tiers.wait_for_uploads(60)
    (owner,) = [key for key in keys_of(far, ".ckptcore") if key.endswith("owner.json")]
    remove(far, owner)
    saving = run.save(2, tree(2))
    assert saving is not None
    saving.result()
    with pytest.raises(UploadError, match="step 2 cannot be uploaded: SaveLostError") as raised:
        tiers.wait_for_uploads(60)
    assert isinstance(raised.value.__cause__, SaveLostError)
    run.close()
    assert steps_in(far) == [1] and steps_in(near) == [1, 2]


def test_a_run_that_loses_the_far_tier_during_an_upload_does_not_commit(near: str, far: str) -> None:
    watch = Watch()
    run = Checkpointer(tiers := TieredDirectory(NearTier(near), through(far)), context=watched(watch))
    stands = Standstill(watch)
    save_steps(run, [1])
    assert stands.arrived.wait(60)
    (owner,) = [key for key in keys_of(far, ".ckptcore") if key.endswith("owner.json")]
    remove(far, owner)
    stands.open()
    with pytest.raises(UploadError, match="step 1 cannot be uploaded: SaveLostError"):
        tiers.wait_for_uploads(60)
    run.close()
    assert steps_in(far) == [] and steps_in(near) == [1]


def test_the_save_at_a_preemption_is_uploaded_regardless_of_the_interval(near: str, far: str) -> None:
    chosen = AnySave([FixedInterval(100), PreemptionCheckpointing()])
    tier = NearTier(near, upload_policy=chosen)
    policy = AnySave([EveryStep(), PreemptionCheckpointing()])
    with Checkpointer(TieredDirectory(tier, far), save_policy=policy, preemption_notice=lambda step: step == 3) as run:
        save_steps(run, [1, 2, 3])
    assert steps_in(far) == [3]


def test_metadata_of_the_directory_is_stored_in_the_far_tier(near: str, far: str) -> None:
    with Checkpointer(TieredDirectory(NearTier(near), far), metadata={"model": "tiny"}) as run:
        assert run.root_metadata == {"model": "tiny"}
    assert CheckpointReader(far).root_metadata == {"model": "tiny"}


def test_nested_tiers_are_refused(near: str) -> None:
    for other in (near, f"{near}/inside"):
        with pytest.raises(InvalidLocationError, match="separate directories"):
            Checkpointer(TieredDirectory(NearTier(other), near))
        with pytest.raises(InvalidLocationError, match="separate directories"):
            Checkpointer(TieredDirectory(NearTier(lambda: near), other))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"preservation_policy": LatestN}, "expected a preservation policy"),
        ({"upload_policy": PreserveAll()}, "expected a save policy"),
        ({"max_waiting": 0}, "at least 1"),
        ({"max_waiting": True}, "at least 1"),
        ({"close_seconds": -1.0}, "at least 0"),
        ({"close_seconds": float("nan")}, "at least 0"),
        ({"seen_by": "rack"}, r"NearTier\(seen_by='rack'\): expected one of 'job', 'host'$"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        NearTier("/near", **arguments)
    for seen_by in ("job", "host"):
        assert NearTier("/near", seen_by=seen_by).seen_by == seen_by


def test_the_directories_are_checked(far: str) -> None:
    with pytest.raises(InvalidLocationError, match="expected a path or a URL"):
        Checkpointer(TieredDirectory(3, far), context=Context())  # type: ignore[arg-type]


def test_a_path_can_be_the_near_tier_and_a_reader_reads_both_tiers(near: str, far: str) -> None:
    tiers = TieredDirectory(near=near, far=far)
    with Checkpointer(tiers) as run:
        save_steps(run, [1, 2])
    assert tiers.uploads.uploaded == (1, 2)
    CheckpointReader(near)
    shutil.rmtree(f"{near}/1")
    reader = CheckpointReader(tiers)
    assert reader.steps == (1, 2) and reader.directory == far
    assert_is_step(reader.load(1), 1)
    assert_is_step(reader.load(), 2)
