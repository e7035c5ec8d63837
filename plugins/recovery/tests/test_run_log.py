"""Run logs: written by a job, read over all incarnations, and hostile ones."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_recovery.watchdog import run_log_writer
from ckptcore_recovery.watchdog.run_log import MAX_NOTES, Incarnation, read_run_log
from ckptcore_recovery.watchdog.run_log_writer import RunLog
from ckptcore_recovery.watchdog.time_account import SECOND, Period, TimeAccount

import ckptcore
from ckptcore.errors import UnsupportedVersionError
from ckptcore.events import Event
from plugins.recovery.tests.run_logs import HEADER, write_segment

PERIOD = [0, 10, 1, 2, 2, 6, 1, 1, 2, 1]


def event(phase: str, operation: Any = "save", *, step: int | None = 5, error: str | None = None) -> Event:
    return Event(
        phase=phase, operation=operation, location="run", step=step, rank=0, began=0.0, seconds=2.0, error=error,
        operation_id="0",
    )  # fmt: skip


def wait_until(is_true: Callable[[], object]) -> None:
    while not is_true():
        time.sleep(0.01)


STATE = {"alive": 25, "wall": 2000, "period": [10, 20, 3, 3, 1, 10, 0, 0, 0, 0], "unfinished": 5}


def only(run: Path) -> Incarnation:
    (incarnation,) = read_run_log(run)
    return incarnation


# --- the division of time


def test_the_times_of_a_period_add_up() -> None:
    account = TimeAccount()
    account.begin("load", "load", 2 * SECOND)
    account.end("load", 5 * SECOND)
    account.begin_step(1, 6 * SECOND)
    account.begin_step(2, 8 * SECOND)
    account.end_step(10 * SECOND)
    account.begin_step(3, 11 * SECOND)
    account.begin("save", "save", 12 * SECOND)
    account.end("save", 16 * SECOND, saved=True)
    account.advance(17 * SECOND)
    start, steps = account.take_closed()
    seconds = [0, 6, 0, 0, 0, 0, 0, 3, 3, 0], [6, 12, 1, 3, 3, 5, 0, 0, 1, 0], [12, 17, 0, 0, 0, 0, 4, 0, 1, 1]
    times = (0, 1, 5, 6, 7, 8)
    for period, values in zip((start, steps, account.open_period()), seconds, strict=True):
        assert period == Period(*[value * SECOND if at in times else value for at, value in enumerate(values)])


def test_a_step_that_has_not_ended_is_unfinished() -> None:
    account = TimeAccount()
    account.begin_step(1, 10)
    account.begin_step(2, 30)
    account.advance(70)
    assert (account.step, account.unfinished) == (2, 40)
    assert account.open_period() == Period(10, 30, 1, 1, 1, 20, 0, 0, 0, 0)


def test_a_period_ends_where_the_run_is_set_back() -> None:
    account = TimeAccount()
    for at, step in enumerate((1, 2, 3, 2, 3, 3)):
        account.begin_step(step, at)
    account.end_step(6)
    periods = [*account.take_closed(), account.open_period()]
    assert [(period.first, period.last) for period in periods] == [(1, 3), (2, 3), (3, 3)]


def test_a_save_ends_a_period_only_if_it_is_long_enough() -> None:
    account = TimeAccount()
    for step in range(100):
        account.begin_step(step, 2 * step * SECOND // 10)
        account.begin("save", "save", (2 * step + 1) * SECOND // 10)
        account.end("save", (2 * step + 2) * SECOND // 10, saved=True)
    closed = account.take_closed()
    assert len(closed) == 19 and all(period.ended - period.began >= SECOND for period in closed)
    assert sum(period.saves for period in closed) + account.open_period().saves == 100


def test_a_load_in_the_background_does_not_block() -> None:
    account = TimeAccount()
    account.begin_step(1, 0)
    account.begin("load", "load", 10)
    account.begin_step(2, 15)
    account.end("load", 40)
    account.end_step(50)
    assert account.open_period() == Period(0, 50, 1, 2, 2, 45, 0, 5, 0, 0)


def test_events_that_arrive_late_take_no_time_twice() -> None:
    account = TimeAccount()
    account.begin_step(1, 0)
    account.advance(100)
    account.begin("save", "save", 60)
    account.end("save", 130)
    assert account.open_period() == Period(0, 130, 1, 1, 1, 100, 30, 0, 0, 0)


# --- written and read


@pytest.mark.parametrize("location", ["local", "memory://run-log"])
def test_a_job_writes_its_log(location: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run") if location == "local" else f"{location}-{tmp_path.name}"
    for first in (1, 4):
        with (
            RunLog(run) as log,
            ckptcore.Checkpointer(run, context=ckptcore.Context(observers=[log])) as checkpointer,
        ):
            if first > 1:
                checkpointer.load()
            for step in range(first, first + 3):
                log.step(step)
                checkpointer.save(step, {"w": np.ones(3)})
    incarnations = read_run_log(run)
    assert [incarnation.number for incarnation in incarnations] == [1, 2]
    for incarnation in incarnations:
        assert incarnation.outcome == "finished" and incarnation.unfinished == 0
        assert sum(period.saves for period in incarnation.periods) == 3
        assert sum(period.steps for period in incarnation.periods) == 3
        assert sum(period.ended - period.began for period in incarnation.periods) == incarnation.duration
    assert [(note.kind, note.step) for note in incarnations[1].notes] == [("load", 3)]
    assert incarnations[1].periods[0].in_loads > 0


def test_events_that_arrive_after_a_write_keep_their_times(tmp_path: Path) -> None:
    now = time.monotonic()
    log = RunLog(tmp_path, began=now - 100)
    wait_until(lambda: read_run_log(tmp_path))  # it has written that the first 100 s are no step
    log.step(1, at=now - 90)
    log.began(event("blocking"), at=now - 70)
    log(event("blocking"), at=now - 60)
    log.close(at=now)
    start, steps, saves = only(tmp_path).periods
    assert (start.other, steps.in_steps, saves.in_saves, saves.other) == (
        10 * SECOND, 20 * SECOND, 10 * SECOND, 60 * SECOND,
    )  # fmt: skip


def test_the_log_of_a_running_job_has_its_running_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path, processes=8)
    log.step(1)
    log.step(2)
    wait_until(lambda: read_run_log(tmp_path))
    log.close("failed")
    incarnation = only(tmp_path)
    assert incarnation.processes == 8 and incarnation.outcome == "failed" and incarnation.unfinished > 0
    assert sum(period.steps for period in incarnation.periods) == 1
    log.close("finished")
    assert only(tmp_path).outcome == "failed"


def test_calls_after_the_end_change_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.step(1)
    log.close()
    ended = only(tmp_path)
    log.step(2)
    log.began(event("blocking"))
    log(event("blocking"))
    log.note("stall")
    log.end_step()
    log._write()
    assert [only(tmp_path).periods, only(tmp_path).notes] == [ended.periods, ended.notes]


def test_a_signal_handler_may_save_while_a_step_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLog(tmp_path) as log:
        begin_step = TimeAccount.begin_step

        def interrupted(account: TimeAccount, step: int, at: int) -> None:
            log.began(event("blocking"))
            log(event("blocking"))
            begin_step(account, step, at)

        monkeypatch.setattr(TimeAccount, "begin_step", interrupted)
        log.step(1)
    assert sum(period.saves for period in only(tmp_path).periods) == 1


def test_the_log_of_a_run_with_two_tiers_is_in_the_far_directory(tmp_path: Path) -> None:
    tiers = pytest.importorskip("ckptcore_tiers")
    with RunLog(tiers.TieredDirectory(near=tmp_path / "near", far=tmp_path / "far")):
        pass
    assert only(tmp_path / "far").outcome == "finished"


def test_only_rank_0_writes(tmp_path: Path) -> None:
    class SecondOfTwo:
        rank, size = 1, 2

    with RunLog(tmp_path, context=ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=SecondOfTwo()))) as log:  # type: ignore[arg-type]
        log.step(1)
    assert read_run_log(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError(), "failed"),
        (SystemExit(1), "failed"),
        (SystemExit(), "finished"),
        (KeyboardInterrupt(), "finished"),
    ],
)
def test_an_error_is_a_failure(error: BaseException, outcome: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)), RunLog(tmp_path):
        raise error
    assert only(tmp_path).outcome == outcome


def test_failed_operations_are_noted(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for failed in (event("blocking", error="E"), event("save", error="E: s3://key:secret@bucket")):
            log.began(failed)
            log(failed)
        log(event("upload", "upload", error="E"))
        log(event("save"))
        log.note("stall", step=7, seconds=90.5, text="rank 3 in https://user:secret@host/x " + "." * 1000)
        for _ in range(2 * MAX_NOTES):
            log.note("stall")
        with pytest.raises(ValueError, match="word"):
            log.note("Not a word")
    notes = only(tmp_path).notes
    assert [note.kind for note in notes[:4]] == ["save", "upload", "stall", "stall"] and len(notes) == MAX_NOTES
    assert (notes[2].step, notes[2].took) == (7, 90_500_000)
    assert len(notes[2].text or "") == 500 and "secret" not in "".join(note.text or "" for note in notes)
    assert sum(period.saves for period in only(tmp_path).periods) == 0


def test_long_logs_have_several_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log_writer, "_WRITE_SECONDS", 0.001)
    monkeypatch.setattr(run_log_writer, "_SEGMENT_BYTES", 1000)
    now = time.monotonic()
    log = RunLog(tmp_path, began=now)
    numbers = itertools.count(1)

    def has_many_segments() -> bool:
        number = next(numbers)
        log.step(number, at=now + 20 * number)
        return len(list(tmp_path.rglob("*.jsonl"))) > 3

    wait_until(has_many_segments)
    log.close()
    periods = only(tmp_path).periods
    assert [period.first for period in periods if period.steps] == list(range(1, next(numbers)))
    assert sum(period.ended - period.began for period in periods) == only(tmp_path).duration


def test_a_storage_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_log_writer, "_WRITE_SECONDS", 0.001)
    caplog.set_level(logging.WARNING)
    (tmp_path / ".ckptcore").write_text("a file in the way")
    log = RunLog(tmp_path)
    log.step(1)
    wait_until(lambda: caplog.records)
    log.step(2)
    (tmp_path / ".ckptcore").unlink()
    log.close()
    assert [period.last for period in only(tmp_path).periods][-1] == 2
    assert len(caplog.records) == 1 and str(tmp_path) in caplog.text


def test_a_storage_that_fails_for_days_leaves_a_bounded_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log_writer, "_WRITE_SECONDS", 0.001)
    monkeypatch.setattr(run_log_writer, "MAX_SEGMENT_BYTES", 2000)
    (tmp_path / ".ckptcore").write_text("a file in the way")
    now = time.monotonic()
    log = RunLog(tmp_path, began=now)
    for number in range(1, 101):
        log.step(number, at=now + 20 * number)
    (tmp_path / ".ckptcore").unlink()
    log.close()
    [segment] = tmp_path.rglob("*.jsonl")
    assert segment.stat().st_size < 2000
    periods = only(tmp_path).periods
    assert periods[-1].last == 100 and periods[-1].ended == only(tmp_path).duration


def test_a_clock_that_jumps_changes_no_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path)
    wait_until(lambda: read_run_log(tmp_path))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    log.close()
    incarnation = only(tmp_path)
    assert incarnation.duration < 3600 * SECOND
    assert incarnation.ended - incarnation.began - incarnation.duration == pytest.approx(3600 * SECOND, abs=SECOND)


def test_the_log_does_not_disturb_the_run(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        wait_until(lambda: read_run_log(tmp_path))
        with ckptcore.Checkpointer(
            tmp_path, preservation_policy=ckptcore.policies.LatestN(1), context=ckptcore.Context(observers=[log])
        ) as run:
            for step in range(3):
                log.step(step)
                run.save(step, {"w": np.ones(3)})
            run.wait()
            assert run.steps == (2,)
    assert ckptcore.CheckpointReader(tmp_path).steps == (2,)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ckptcore", "2"]


# --- damaged and hostile logs


def test_a_log_by_hand(tmp_path: Path) -> None:
    write_segment(tmp_path, HEADER, PERIOD, {"note": "load", "at": 3}, STATE)
    incarnation = only(tmp_path)
    assert (incarnation.began, incarnation.ended, incarnation.duration) == (1000, 2000, 25)
    assert [period.ended for period in incarnation.periods] == [10, 20] and incarnation.unfinished == 5


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[" * 100_000, "null", "7", "[]", "{}", "\ufffd",
        [*PERIOD, 1], PERIOD[:-1], [0, 10, 1, 2, 2, 6, 1, 1, 3, 1], [0, 10, 1, 2, 3, 6, 1, 1, 2, 1],
        [0, 10, 1, 2, 0, 6, 1, 1, 2, 1], [10, 0, 1, 2, 2, -10, 0, 0, 0, 1], [0, 10, 1, 2, 2, 10, -1, 1, 0, 1],
        [0.0, 10, 1, 2, 2, 6, 1, 1, 2, 1], [False, 10, 1, 2, 2, 6, 1, 1, 2, 1],
        [0, 1 << 53, 1, 2, 2, 1 << 53, 0, 0, 0, 0], [0, 10, 1, 1 << 63, 2, 6, 1, 1, 2, 1],
        [5, 15, 1, 2, 2, 6, 1, 1, 2, 1],
        {"note": "Load", "at": 1}, {"note": "load"}, {"note": "load", "at": -1}, {"note": "load", "at": 1, "step": "1"},
        {"note": "load", "at": 1, "text": "x" * 501}, {"note": "load", "at": 1, "took": 1 << 53},
        {"alive": -1, "wall": 0}, {"alive": 30, "wall": None}, {**HEADER, "began": -1}, {**HEADER, "processes": "2"},
    ],
)  # fmt: skip
def test_a_damaged_line_is_passed_over(line: object, tmp_path: Path) -> None:
    write_segment(tmp_path, HEADER, PERIOD, STATE)
    sound = only(tmp_path)
    write_segment(tmp_path, HEADER, PERIOD, line, STATE)
    assert only(tmp_path) == sound


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    segment = write_segment(tmp_path, HEADER, PERIOD, STATE)
    data = segment.read_bytes()
    segment.write_bytes(data[: -len(json.dumps(STATE)) // 2])
    incarnation = only(tmp_path)
    assert (incarnation.duration, incarnation.ended, incarnation.outcome) == (10, 1010, None)


@pytest.mark.parametrize("change", [{"period": None}, {"period": [15, 20, 0, 0, 0, 0, 0, 0, 4, 0]}, {"unfinished": 6}])
def test_a_wrong_state_invents_no_time(change: dict[str, Any], tmp_path: Path) -> None:
    write_segment(tmp_path, HEADER, PERIOD, {**STATE, **change, "outcome": "exploded"})
    incarnation = only(tmp_path)
    spent = sum(period.ended - period.began for period in incarnation.periods) + incarnation.unfinished
    assert spent < incarnation.duration == 25 and incarnation.outcome is None


def test_an_old_state_counts_no_time_twice(tmp_path: Path) -> None:
    write_segment(tmp_path, HEADER, PERIOD, STATE)
    write_segment(tmp_path, HEADER, [10, 40, 3, 5, 3, 30, 0, 0, 0, 0], "the state was torn", number=1)
    incarnation = only(tmp_path)
    assert [period.ended for period in incarnation.periods] == [10, 40]
    assert (incarnation.duration, incarnation.ended, incarnation.unfinished) == (40, 2000 + 15, 0)


def test_a_lost_segment_leaves_a_gap(tmp_path: Path) -> None:
    later = [30, 40, 9, 9, 1, 10, 0, 0, 0, 0]
    write_segment(tmp_path, "", number=0)
    write_segment(tmp_path, HEADER, later, {**STATE, "alive": 40, "period": [40, 40, 0, 0, 0, 0, 0, 0, 0, 0]}, number=1)
    assert [period.first for period in only(tmp_path).periods] == [9, 0] and only(tmp_path).duration == 40


def test_other_files_are_no_logs(tmp_path: Path) -> None:
    for name in ("000001-0000000g", "1-00000000", "notes"):
        write_segment(tmp_path, HEADER, STATE, incarnation=name)
    (write_segment(tmp_path, "").parent / "other.txt").write_text("x")
    assert read_run_log(tmp_path) == []
    with RunLog(tmp_path, processes=1):
        pass
    assert only(tmp_path).number == 2


def test_a_log_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    write_segment(tmp_path, {**HEADER, "format": 2})
    with pytest.raises(UnsupportedVersionError, match="incarnation 1 has the format 2"):
        read_run_log(tmp_path)
