"""Keys of exchanges: an answer to one operation is never used as an answer to another."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, run_ranks

import ckptcore
from ckptcore.errors import CheckpointError, CoordinationTimeoutError, RankFailedError
from ckptcore.hookspecs import hookimpl
from ckptcore.job.agreement import Agreement, ExchangeCounts, encode_outcome
from ckptcore.protocols import Coordinator, Rejoinable
from ckptcore.runtime import runtime_of


class _Slots:
    """A coordinator without weak references."""

    __slots__ = ()
    rank, size = 0, 1

    def gather(self, key: str, payload: bytes) -> list[bytes]:
        return [payload]

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        assert payload is not None
        return payload


def test_two_contexts_of_one_job_share_no_key() -> None:
    coordinator = ThreadJob(2).coordinator(1)
    keys = [
        runtime_of(ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))).exchange_key("run/1")
        for _ in range(3)
    ]
    assert keys == ["run/1#0", "run/1#1", "run/1#2"]
    others = [runtime_of(ckptcore.Context()).exchange_key("an odd place: \ud800") for _ in range(2)]
    assert len(set(others)) == 2


class _Incarnation(_Slots):
    """A coordinator of one incarnation of a job. The other rank sends the same messages as this rank."""

    __slots__ = ("__weakref__", "incarnation")
    size = 2

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation

    def gather(self, key: str, payload: bytes) -> list[bytes]:
        return [payload, payload]


class _Launcher:
    """A plugin of a launcher, whose job gets a new coordinator after a failure."""

    def __init__(self) -> None:
        self.joined: _Incarnation | None = _Incarnation(1)

    @hookimpl
    def ckpt_coordinator(self) -> Coordinator | None:
        return self.joined


def test_a_process_that_joins_again_counts_exchanges_from_zero(tmp_path: Path) -> None:
    launcher = _Launcher()
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[launcher]))
    assert isinstance(runtime_of(context).job(), Rejoinable) and not isinstance(_Slots(), Rejoinable)
    assert [runtime_of(context).exchange_key("run"), runtime_of(context).exchange_key("run")] == ["run#0", "run#1"]
    assert (
        runtime_of(ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=launcher.joined))).exchange_key("run")
        == "run#2"
    )
    run = ckptcore.Checkpointer(tmp_path, context=context)
    assert run.should_save(1)
    launcher.joined = _Incarnation(2)
    assert runtime_of(context).exchange_key("run") == "run#0"
    with pytest.raises(CheckpointError, match="joined again since; close it, and create a new one"):
        run.should_save(1)
    run.close()
    with ckptcore.Checkpointer(tmp_path, context=context) as run:
        assert run.should_save(1)
        launcher.joined = None
        with pytest.raises(CheckpointError, match="has left or joined again since"):
            run.should_save(2)  # otherwise each process would continue alone in the same directory


def test_a_reader_of_an_earlier_incarnation_does_not_change_the_counts_of_the_new_one(tmp_path: Path) -> None:
    launcher = _Launcher()
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[launcher]))
    with ckptcore.Checkpointer(tmp_path, context=context):
        reader = ckptcore.CheckpointReader(tmp_path, context=context)
    launcher.joined = _Incarnation(2)
    reader.reload()
    assert runtime_of(context).exchange_key(f"{reader.directory}/list").endswith("#0"), "as in a process that is new"


def test_exchanges_are_counted_by_job_and_name() -> None:
    counts, job, slots = ExchangeCounts(), ThreadJob(2), _Slots()
    first, second = job.coordinator(0), job.coordinator(1)
    assert [counts.key(first, "a"), counts.key(first, "b"), counts.key(second, "a")] == ["a#0", "b#0", "a#0"]
    assert [counts.key(slots, "a"), counts.key(slots, "a"), counts.key(None, "a")] == ["a#0", "a#1", "a#0"]
    del first
    gc.collect()
    assert counts.key(second, "a") == "a#1" and len(counts._of_coordinators) == 2, "what ended is forgotten"


def test_a_rank_that_missed_one_save_takes_part_in_the_next(tmp_path: Path) -> None:
    def of_rank(rank: int, context: ckptcore.Context) -> list[str]:
        told = []
        for step in range(3):
            if step == 1 and rank == 1:
                assert gave_up.wait(20)
                continue  # its program failed before the save
            try:
                ckptcore.save(tmp_path / str(step), {"w": np.ones(2)}, context=context)
            except CheckpointError as error:
                told.append(type(error).__name__)
                gave_up.set()
            else:
                told.append("saved")
        return told

    gave_up = threading.Event()
    leader, missing, came = run_ranks(
        3, of_rank, timeout_seconds=1, io=ckptcore.context.IOOptions(threads=1), durability="none"
    )
    assert leader == ["saved", "CoordinationTimeoutError", "saved"] and missing == ["saved", "saved"]
    assert came[0] == came[2] == "saved" and came[1] in ("RankFailedError", "CoordinationTimeoutError")


def test_ranks_in_time_and_late_ranks_get_an_error_with_the_missing_rank() -> None:
    leader_ended = threading.Event()

    def of_rank(coordinator: Coordinator) -> str:
        if coordinator.rank == 0:
            time.sleep(0.3)  # the deadline of rank 1 must be over before that of the leader
        elif coordinator.rank == 2:
            assert leader_ended.wait(60)
        agreement = Agreement(coordinator, "save")
        try:
            with agreement.stage("describe"):
                pass
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if coordinator.rank == 0:
                leader_ended.set()
        return "agreed"

    leader, came, late = ThreadJob(3, timeout_seconds=1).run(of_rank)
    assert leader.startswith("CoordinationTimeoutError")
    assert came.startswith("RankFailedError") and late == came and "rank 2" in came


def test_messages_of_an_earlier_operation_are_refused_as_stale() -> None:
    """The leader has the answer of a process that was restarted afterwards."""
    job = ThreadJob(2, timeout_seconds=0.5)
    before = Agreement(job.coordinator(1), "save")
    with pytest.raises(CoordinationTimeoutError), before.stage("describe"):
        pass
    with Agreement(job.coordinator(0), "save").stage("describe"):
        pass

    class Again:
        """A coordinator of a restarted rank. It replaces the earlier payload of the rank, as a store does."""

        rank, size = 1, 2

        def gather(self, key: str, payload: bytes) -> None:
            job._exchanges[key][1] = payload

        def broadcast(self, key: str, payload: bytes | None) -> bytes:
            return job.coordinator(1).broadcast(key, payload)

    with pytest.raises(RankFailedError, match="stale message"), Agreement(Again(), "save").stage("describe"):
        pass


def test_keys_after_the_first_exchange_contain_the_id_of_the_operation() -> None:
    job = ThreadJob(2, timeout_seconds=5)

    def of_rank(coordinator: Coordinator) -> None:
        agreement = Agreement(coordinator, "save")
        with agreement.stage("describe"):
            pass
        with agreement.part("export").stage("claim"):
            pass
        assert agreement.lead("end", lambda: 7) == 7

    job.run(of_rank)
    first, *later = [key for key in job._exchanges if not key.endswith("/verdict")]
    assert first == "save/describe" and [len(key) for key in later] == [
        len("save/export/claim") + 17,
        len("save/end") + 17,
    ]
    assert len({key.split("/")[1] for key in later}) == 1


class _Counted:
    """A coordinator that counts its exchanges."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.rank, self.size = coordinator.rank, coordinator.size
        self.count = 0

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        self.count += 1
        return self._coordinator.gather(key, payload)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        self.count += 1
        return self._coordinator.broadcast(key, payload)


@pytest.mark.parametrize("size", [1, 3])
def test_a_stage_decides_without_a_further_exchange(size: int) -> None:
    def work(coordinator: Coordinator) -> tuple[object, int]:
        counted = _Counted(coordinator)
        with Agreement(counted, "key").stage("sum") as stage:
            stage.payload = coordinator.rank
            stage.decide = lambda: sum([int(str(payload)) for payload in stage.payloads])
        return stage.decision, counted.count

    assert ThreadJob(size).run(work) == [(sum(range(size)), 0 if size == 1 else 2)] * size


@pytest.mark.parametrize("fails", ["body", "decision", "not JSON"])
def test_all_ranks_hear_of_a_decision_that_failed(fails: str) -> None:
    decided: list[int] = []

    def decide() -> object:
        decided.append(0)
        if fails == "decision":
            raise ValueError("no decision")
        return object()

    def work(coordinator: Coordinator) -> str:
        agreement = Agreement(coordinator, "key")
        with pytest.raises((CheckpointError, ValueError)) as raised, agreement.stage("sum") as stage:
            stage.decide = decide  # type: ignore[assignment]  # it may return no JSON
            if fails == "body" and coordinator.rank == 1:
                raise ValueError("no payload")
        assert stage.decision is None
        with agreement.stage("next"):  # the exchanges of all ranks still match
            pass
        return f"{type(raised.value).__name__}: {raised.value}"

    leader, first, second = ThreadJob(3).run(work)
    assert decided == [] if fails == "body" else decided == [0]
    if fails == "body":
        assert first == "ValueError: no payload" and "rank 1: ValueError: no payload" in leader == second
        return
    reason = "ValueError: no decision" if fails == "decision" else "PluginError: a message to other ranks"
    assert leader.startswith(reason)
    assert first == second and first.startswith(f"RankFailedError: the stage 'sum' failed on rank 0: {reason}")


class _Unreachable:
    """The leader of two ranks. The other rank succeeds, and no verdict reaches it."""

    rank, size = 0, 2

    def gather(self, key: str, payload: bytes) -> Sequence[bytes]:
        return [payload, encode_outcome("b" * 16, None)]

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        raise CheckpointError("the network is down")


def test_an_error_of_a_decision_is_raised_although_it_cannot_be_sent() -> None:
    def decide() -> int:
        raise ValueError("no decision")

    with (
        pytest.raises(ValueError, match="no decision") as raised,
        Agreement(_Unreachable(), "key").stage("sum") as stage,
    ):
        stage.decide = decide
    (note,) = raised.value.__notes__
    assert "sending this error to the other ranks also failed: CheckpointError: the network is down" in note
