"""Late ranks: the log gets one line with the ranks for which an operation waits."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore import Checkpointer, Context
from ckptcore.context import JobOptions
from ckptcore.events import Recording
from ckptcore.job import gathering
from ckptcore.job.agreement import Agreement
from ckptcore.protocols import Coordinator


class Lines(logging.Handler):
    """The log lines about late ranks. Timers write them when `write_when` fires the timers, without a delay."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.running: list[Timer] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.texts.append(record.getMessage())

    def write_when(self, *awaited: list[int]) -> None:
        """Fire all timers, once the other ranks wait for exactly these ranks."""
        for _ in range(12_000):
            running = list(self.running)
            if sorted(timer.awaited() or [] for timer in running) == sorted(awaited):
                for timer in running:
                    timer.end()
                return
            time.sleep(0.005)
        raise AssertionError([timer.awaited() for timer in self.running])


class Timer:
    """A replacement of `gathering.Timer` that fires when a test calls `end`."""

    def __init__(self, lines: Lines, function: Callable[..., None], arguments: list[Any]) -> None:
        self.end: Callable[[], None] = lambda: function(*arguments)
        self.awaited: Callable[[], list[int] | None] = arguments[1]
        self._lines = lines

    def start(self) -> None:
        self._lines.running.append(self)

    def cancel(self) -> None:
        self._lines.running.remove(self)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    handler = Lines()
    monkeypatch.setattr(gathering, "Timer", lambda seconds, function, arguments: Timer(handler, function, arguments))
    logger = logging.getLogger("ckptcore.job")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    assert handler.running == []


def run(work: Callable[[int, Context], Any], size: int = 4) -> Any:
    return ThreadJob(size).run(
        lambda coordinator: work(coordinator.rank, Context(job=JobOptions(coordinator=coordinator), durability="none"))
    )


STATE = {"w": np.ones(3)}
CALLS: dict[str, Callable[[Path, Context], Any]] = {
    "save of": lambda path, context: ckptcore.save(path / "x", STATE, context=context),
    "load of": lambda path, context: ckptcore.load(path / "there", context=context),
    "opening of": lambda path, context: Checkpointer(path / "run", context=context).close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_leader_names_the_ranks_that_have_not_called(tmp_path: Path, lines: Lines, call: str) -> None:
    ckptcore.save(tmp_path / "there", STATE)
    wrote = threading.Event()

    def work(rank: int, context: Context) -> None:
        if rank == 1:
            lines.write_when([1, 3], [0])
            wrote.set()
        if rank == 3:
            assert wrote.wait(60)
        CALLS[call](tmp_path, context)

    run(work)
    of_leader, of_other = sorted(lines.texts, key=lambda text: "rank 2 has" in text)
    location = {"save of": "x", "load of": "there", "opening of": "run"}[call]
    assert f"{call} {tmp_path / location}: rank 0 has waited 10 s for 2 of 4 ranks: 1, 3. All ranks" in of_leader
    assert f"{call} {tmp_path / location}: rank 2 has waited 10 s for 1 of 4 ranks: 0. All ranks" in of_other
    assert "Rank 0 leads: it may itself wait for others" in of_other


def test_a_rank_that_saves_alone_gets_a_line(tmp_path: Path, lines: Lines) -> None:
    """The other ranks save, and wait for the leader."""

    def work(rank: int, context: Context) -> None:
        if rank == 0:
            lines.write_when([0])
        ckptcore.save(tmp_path / "x", STATE, context=context)

    run(work, 2)
    assert len(lines.texts) == 1 and "for 1 of 2 ranks: 0." in lines.texts[0]


def test_a_rank_that_skips_a_step(tmp_path: Path, lines: Lines) -> None:
    def work(rank: int, context: Context) -> None:
        with Checkpointer(tmp_path / "run", context=context) as checkpointer:
            checkpointer.save(1, STATE)
            checkpointer.wait()
            assert lines.texts == []
            if rank == 1:
                lines.write_when([1])
            checkpointer.save(2, STATE)

    run(work, 2)
    (text,) = lines.texts
    assert f"save of {tmp_path / 'run'}" in text and "2: rank 0 has waited 10 s for 1 of 2 ranks: 1." in text


def test_an_operation_writes_one_line(tmp_path: Path, lines: Lines) -> None:
    """The leader writes one line, even if a rank is late in several stages of the operation."""

    def work(coordinator: Coordinator) -> None:
        agreement = Agreement(coordinator, "key", Recording("save", str(tmp_path)))
        for name in "abc":
            if coordinator.rank and not lines.texts:
                lines.write_when([1])
            with agreement.part(name).stage("stage"):
                pass

    ThreadJob(2).run(work)
    assert len(lines.texts) == 1


def test_a_late_rank_in_a_large_job(lines: Lines) -> None:
    """The line of the first rank of a block has the numbers of ranks in the job."""

    def work(coordinator: Coordinator) -> None:
        if coordinator.rank == 3:
            lines.write_when([2], [0], [3], [0], [0])
        with Agreement(coordinator, "key", call="save of x", block_ranks=2).stage("stage"):
            pass

    ThreadJob(6).run(work)
    texts = "\n".join(lines.texts)
    assert "rank 2 has waited 10 s for 1 of 6 ranks: 3." in texts
    assert "rank 0 has waited 10 s for 1 of 6 ranks: 2." in texts


def test_a_rank_that_writes_for_long_is_not_late(tmp_path: Path, lines: Lines) -> None:
    def work(rank: int, context: Context) -> None:
        def progress(done: int, total: int) -> None:
            if not lines.texts:
                lines.write_when([1])

        ckptcore.save(tmp_path / "x", STATE, progress=progress if rank == 1 else False, layout="dcp", context=context)

    run(work, 2)
    assert f"save of {tmp_path / 'x'}: rank 0 has waited 60 s for 1 of 2 ranks: 1. They have not" in lines.texts[0]


def test_a_coordinator_that_does_not_report_missing_ranks(tmp_path: Path, lines: Lines) -> None:
    class Plain:
        """A coordinator that does not report which ranks are missing."""

        def __init__(self, inner: Coordinator) -> None:
            self.rank, self.size = inner.rank, inner.size
            self.gather, self.broadcast = inner.gather, inner.broadcast

    def work(rank: int, context: Context) -> None:
        assert context.job.coordinator is not None
        if rank == 1:
            lines.write_when([])
        context = Context(job=JobOptions(coordinator=Plain(context.job.coordinator)), durability="none")
        ckptcore.save(tmp_path / "x", STATE, context=context)

    run(work, 2)
    assert "rank 0 has waited 10 s for some of 2 ranks. All ranks of the job must make this call" in lines.texts[0]


def test_without_logging_the_line_is_on_stderr(tmp_path: Path) -> None:
    code = f"""
import ckptcore, threading
from ckptcore_testing import ThreadJob
from ckptcore.context import JobOptions
import logging
from ckptcore.job.gathering import LateRanks

LateRanks.first_seconds = 0.05
came = threading.Event()
class Came(logging.Filter):
    def filter(self, record):
        came.set()
        return True
logging.getLogger("ckptcore.job").addFilter(Came())

def save(one):
    if one.rank:
        assert came.wait(60)
        LateRanks.first_seconds = 1e6
    context = ckptcore.Context(job=JobOptions(coordinator=one), durability="none")
    ckptcore.save({str(tmp_path / "x")!r}, {{"n": 1}}, context=context)

ThreadJob(2).run(save)
"""
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"ckptcore: save of {tmp_path / 'x'}: rank 0 has waited 0.05 s for 1 of 2 ranks: 1. All ranks"
    )


def test_no_line_if_all_ranks_call(tmp_path: Path, lines: Lines) -> None:
    """The fixture also checks that all timers are cancelled."""
    run(lambda rank, context: ckptcore.save(tmp_path / "x", STATE, context=context))
    assert lines.texts == []


def test_timers_share_a_thread() -> None:
    fired, never = [threading.Event(), threading.Event()], threading.Event()
    timers = [gathering.Timer(seconds, event.set, []) for seconds, event in zip([0.0, 0.01], fired, strict=True)]
    cancelled = [gathering.Timer(0.3, never.set, []), gathering.Timer(1e6, never.set, [])]
    for timer in [*cancelled, *timers]:
        timer.start()
    (shared,) = [thread for thread in threading.enumerate() if thread.name == "ckptcore-timers"]
    for timer in cancelled:
        timer.cancel()
    assert all(event.wait(60) for event in fired)
    shared.join()  # without timers it ends
    assert not never.is_set()
    again = threading.Event()
    gathering.Timer(0.0, again.set, []).start()
    assert again.wait(60)


def test_a_timer_fires_late_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can reach its limit of threads for a moment."""
    failures: list[threading.Thread] = []
    fired, start = threading.Event(), threading.Thread.start

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == "ckptcore-timer" and not failures:
            failures.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    gathering.Timer(0.0, fired.set, []).start()
    assert fired.wait(60)
    assert len(failures) == 1
