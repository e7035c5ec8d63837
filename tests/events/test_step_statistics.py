"""Records of saves and loads have the fields of Orbax's records, with the same meanings."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import subprocess
import sys
from collections.abc import Mapping

import pytest
from ckptcore_tools.step_statistics import StepStatisticsObserver, log_step_statistics
from orbax.checkpoint.logging.step_statistics import (  # type: ignore[import-untyped]  # it has no types
    RestoreStepStatistics,
    SaveStepStatistics,
)

from ckptcore.events import Event, Recording
from plugins.tools.tests.events.sample_events import BEGAN, async_save, event

GOODPUT_READS = {
    "save": (
        "wait_for_prev_duration_secs", "checkpointer_blocking_duration_secs", "get_old_steps_duration_secs",
        "checkpoint_manager_blocking_duration_secs",
    ),
    "restore": ("checkpointer_duration_secs", "checkpoint_manager_duration_secs"),
}  # fmt: skip
"""Names that `checkpoint_badput_calculator.py` of ml-goodput-measurement 0.2.3 passes to `float`."""


def records_of(*events: Event) -> list[Mapping[str, object]]:
    records: list[Mapping[str, object]] = []
    observer = StepStatisticsObserver(records.append)
    for seen in events:
        observer(seen)
    return records


def load(**others: object) -> tuple[Event, ...]:
    return (
        event("open", 0.25, 0.25, operation="load", **others),
        event("read", 0.5, 1.0, operation="load", nbytes=100, **others),
        event("load", 0.0, 2.0, operation="load", nbytes=100, **others),
    )


def test_the_end_of_a_save_creates_one_record() -> None:
    *events, last = async_save()
    assert records_of(*events) == []
    assert records_of(*events, last) == [
        {
            "step": 12,
            "event_type": "save",
            "directory": "run",
            "reached_preemption": False,
            "preemption_received_at": None,
            "synchronous": False,
            "wait_for_prev_start_time": BEGAN,
            "wait_for_prev_duration_secs": 0.25,
            "time_between_consecutive_saves_sec": None,
            "checkpointer_blocking_start_time": BEGAN + 0.25,
            "checkpointer_blocking_duration_secs": 0.25,
            "get_old_steps_start_time": BEGAN + 0.5,
            "get_old_steps_duration_secs": 0.0,
            "checkpoint_manager_blocking_start_time": BEGAN,
            "checkpoint_manager_blocking_duration_secs": 0.5,
        }
    ]


def test_a_load_creates_one_record() -> None:
    assert records_of(*load()) == [
        {
            "step": 12,
            "event_type": "restore",
            "directory": "run",
            "checkpointer_start_time": BEGAN + 0.25,
            "checkpointer_duration_secs": 1.75,
            "checkpoint_manager_start_time": BEGAN,
            "checkpoint_manager_duration_secs": 2.0,
        }
    ]


@pytest.mark.parametrize(
    ("events", "theirs"), [(async_save(), SaveStepStatistics), (load(), RestoreStepStatistics)], ids=["save", "restore"]
)
def test_records_have_the_fields_of_orbax(
    events: tuple[Event, ...], theirs: type[SaveStepStatistics | RestoreStepStatistics]
) -> None:
    (record,) = records_of(*events)
    assert set(record) == {field.name for field in dataclasses.fields(theirs)}
    assert record["event_type"] == theirs().event_type
    for name in GOODPUT_READS[str(record["event_type"])]:
        assert isinstance(record[name], float), name


def test_a_save_that_did_not_wait_has_a_waiting_time_of_zero() -> None:
    events = [seen for seen in async_save() if seen.phase != "wait_for_previous"]
    (record,) = records_of(*events)
    assert record["wait_for_prev_start_time"] == BEGAN
    assert record["wait_for_prev_duration_secs"] == 0.0
    assert record["checkpointer_blocking_duration_secs"] == 0.5


def test_the_blocking_phase_may_end_after_the_save() -> None:
    *events, blocking, last = sorted(async_save(), key=lambda seen: (seen.phase in ("blocking", "save"), seen.phase))
    assert (blocking.phase, last.phase) == ("blocking", "save")
    (record,) = records_of(*events, last, blocking)
    assert [record] == records_of(*async_save())


@pytest.mark.parametrize("order", list(itertools.permutations(("blocking", "save"))), ids="-".join)
def test_a_save_that_ended_before_its_call_returned_is_synchronous(order: tuple[str, ...]) -> None:
    seconds = {"blocking": 1.0, "save": 1.0 + 1e-5}
    (record,) = records_of(event("commit", 0.5, 0.25), *(event(phase, 0.0, seconds[phase]) for phase in order))
    assert record["synchronous"] is True
    assert record["checkpoint_manager_blocking_duration_secs"] == 1.0


def test_the_time_between_saves_starts_at_the_end_of_the_previous_save() -> None:
    later = [
        dataclasses.replace(earlier, step=13, location="run/step_13", began=earlier.began + 10, operation_id="two")
        for earlier in async_save()
    ]
    elsewhere = async_save(location="other/step_12", operation_id="three")
    records = records_of(*async_save(), *elsewhere, *later)
    assert [record["directory"] for record in records] == ["run", "other", "run"]
    assert [record["time_between_consecutive_saves_sec"] for record in records] == [None, None, 10 - 2.75]


def test_events_of_concurrent_operations_are_not_mixed() -> None:
    first, second = async_save(operation_id="a"), async_save(operation_id="b", step=13)
    records = records_of(*itertools.chain(*zip(first, second, strict=True)))
    assert [record["step"] for record in records] == [12, 13]
    assert {**records[0], "step": None} == {**records[1], "step": None, "time_between_consecutive_saves_sec": None}


def test_an_operation_that_failed_during_its_call_creates_no_record() -> None:
    failure = OSError("full")
    records: list[Mapping[str, object]] = []
    observer = StepStatisticsObserver(records.append)
    for operation in ("save", "load"):
        recording = Recording("save" if operation == "save" else "load", "run/step_1", [observer], step=1)
        with pytest.raises(OSError, match="full"), recording.phase("blocking"):
            raise failure
        recording.finish(error=failure)
    assert records == []
    assert observer._open == {}


def test_a_background_failure_creates_a_record_but_is_no_previous_save() -> None:
    *events, last = async_save()
    failed = dataclasses.replace(last, error="OSError: full")
    again = async_save(operation_id="two")
    records = records_of(*events, failed, *again)
    assert [record["time_between_consecutive_saves_sec"] for record in records] == [None, None]


def test_a_location_outside_a_run_is_its_own_directory() -> None:
    (record,) = records_of(*async_save(step=None, location="s3://bucket/best"))
    assert (record["directory"], record["step"]) == ("s3://bucket/best", None)


def test_deletions_and_cleaning_create_no_records() -> None:
    records: list[Mapping[str, object]] = []
    observer = StepStatisticsObserver(records.append)
    for seen in (*async_save(), event("clean", 3, 1), event("delete", 0, 1, operation="delete", operation_id="two")):
        observer(seen)
    assert len(records) == 1
    assert observer._open == {}


def test_operations_that_never_end_are_forgotten() -> None:
    observer = StepStatisticsObserver(lambda record: None)
    for number in range(1000):
        observer(event("blocking", number, 1, operation_id=str(number)))
    assert len(observer._open) < 100


def test_records_are_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    observer = StepStatisticsObserver()
    with caplog.at_level(logging.INFO, "ckptcore.statistics"):
        for seen in (*async_save(), *load()):
            observer(seen)
    assert [record.getMessage() for record in caplog.records] == ["save of step 12 in run", "restore of step 12 in run"]
    assert {record.name for record in caplog.records} == {"ckptcore.statistics"}
    assert [vars(record)["ckptcore_statistics"] for record in caplog.records] == records_of(*async_save(), *load())


def test_the_log_gets_a_copy_of_the_record(caplog: pytest.LogCaptureFixture) -> None:
    record = {"event_type": "save", "step": 1, "directory": "run"}
    with caplog.at_level(logging.INFO, "ckptcore.statistics"):
        log_step_statistics(record)
    record["step"] = 2
    assert vars(caplog.records[0])["ckptcore_statistics"]["step"] == 1


@pytest.mark.system
def test_telemetry_imports_neither_opentelemetry_nor_orbax() -> None:
    code = (
        "import sys, ckptcore_tools.opentelemetry, ckptcore_tools.step_statistics\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('opentelemetry', 'orbax', 'jax')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"
