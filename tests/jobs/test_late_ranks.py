"""A rank that does not call: one line in the log says for which ranks an operation waits."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
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
from ckptcore.job.agreement import Agreement
from ckptcore.job.gathering import LateRanks
from ckptcore.protocols import Coordinator

NEVER = 1e6


class Lines(logging.Handler):
    """The lines about late ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        with self._changed:
            self.texts.append(record.getMessage())
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.texts) >= count, 60)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setattr(LateRanks, "first_seconds", 0.05)
    monkeypatch.setattr(LateRanks, "later_seconds", NEVER)
    found = Lines()
    logger = logging.getLogger("ckptcore.job")
    logger.addHandler(found)
    yield found
    logger.removeHandler(found)


def run(work: Callable[[int, Context], Any], size: int = 4) -> Any:
    return ThreadJob(size).run(lambda one: work(one.rank, Context(job=JobOptions(coordinator=one), durability="none")))


STATE = {"w": np.ones(3)}
CALLS: dict[str, Callable[[Path, Context], Any]] = {
    "save of": lambda path, context: ckptcore.save(path / "x", STATE, context=context),
    "load of": lambda path, context: ckptcore.load(path / "there", context=context),
    "opening of": lambda path, context: Checkpointer(path / "run", context=context).close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_leader_names_the_ranks_that_have_not_called(tmp_path: Path, lines: Lines, call: str) -> None:
    ckptcore.save(tmp_path / "there", STATE)

    def work(rank: int, context: Context) -> None:
        if rank in (1, 3):
            lines.wait_for(2)  # of the leader, and of rank 2
        CALLS[call](tmp_path, context)

    run(work)
    of_leader, of_other = sorted(lines.texts, key=lambda text: "rank 2 has" in text)
    location = {"save of": "x", "load of": "there", "opening of": "run"}[call]
    assert f"{call} {tmp_path / location}: rank 0 has waited 0.05 s for 2 of 4 ranks: 1, 3. All ranks" in of_leader
    assert f"{call} {tmp_path / location}: rank 2 has waited 0.05 s for 1 of 4 ranks: 0. All ranks" in of_other
    assert "Rank 0 leads: it may itself wait for others" in of_other


def test_only_one_rank_saves(tmp_path: Path, lines: Lines) -> None:
    """The leader is late, and the others save."""

    def work(rank: int, context: Context) -> None:
        if rank == 0:
            lines.wait_for(1)
        ckptcore.save(tmp_path / "x", STATE, context=context)

    run(work, 2)
    assert len(lines.texts) == 1 and "for 1 of 2 ranks: 0." in lines.texts[0]


def test_a_rank_that_skips_a_step(tmp_path: Path, lines: Lines) -> None:
    def work(rank: int, context: Context) -> None:
        with Checkpointer(tmp_path / "run", context=context) as checkpointer:
            checkpointer.save(1, STATE)
            assert lines.texts == []
            if rank == 1:
                lines.wait_for(1)
            checkpointer.save(2, STATE)

    run(work, 2)
    (text,) = lines.texts
    assert f"save of {tmp_path / 'run'}" in text and "2: rank 0 has waited 0.05 s for 1 of 2 ranks: 1." in text


def test_one_line_for_an_operation(tmp_path: Path, lines: Lines) -> None:
    """Several parts and stages of an operation are late, and the leader writes one line."""

    def work(coordinator: Coordinator) -> None:
        agreement = Agreement(coordinator, "key", Recording("save", str(tmp_path)))
        for name in "abc":
            if coordinator.rank:
                lines.wait_for(1)
            with agreement.part(name).stage("stage"):
                pass

    ThreadJob(2).run(work)
    assert len(lines.texts) == 1


def test_a_late_rank_in_a_large_job(lines: Lines) -> None:
    """The first rank of a block names ranks of the job."""

    def work(coordinator: Coordinator) -> None:
        if coordinator.rank == 3:
            lines.wait_for(5)  # of all others
        with Agreement(coordinator, "key", call="save of x", block_ranks=2).stage("stage"):
            pass

    ThreadJob(6).run(work)
    texts = "\n".join(lines.texts)
    assert "rank 2 has waited 0.05 s for 1 of 6 ranks: 3." in texts
    assert "rank 0 has waited 0.05 s for 1 of 6 ranks: 2." in texts


def test_a_rank_that_writes_for_long_has_more_time(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateRanks, "first_seconds", NEVER)
    monkeypatch.setattr(LateRanks, "later_seconds", 0.05)

    def work(rank: int, context: Context) -> None:
        def progress(done: int, total: int) -> None:
            lines.wait_for(1)

        ckptcore.save(tmp_path / "x", STATE, progress=progress if rank == 1 else False, layout="dcp", context=context)

    run(work, 2)
    assert f"save of {tmp_path / 'x'}: rank 0 has waited 0.05 s for 1 of 2 ranks: 1. They have not" in lines.texts[0]


def test_a_coordinator_that_does_not_report(tmp_path: Path, lines: Lines) -> None:
    class Plain:
        """A `Coordinator` without the optional protocol."""

        def __init__(self, one: Coordinator) -> None:
            self.rank, self.size, self.gather, self.broadcast = one.rank, one.size, one.gather, one.broadcast

    def work(rank: int, context: Context) -> None:
        assert context.job.coordinator is not None
        if rank == 1:
            lines.wait_for(1)
        context = Context(job=JobOptions(coordinator=Plain(context.job.coordinator)), durability="none")
        ckptcore.save(tmp_path / "x", STATE, context=context)

    run(work, 2)
    assert "rank 0 has waited 0.05 s for some of 2 ranks. All ranks of the job must make this call" in lines.texts[0]


def test_without_logging_the_line_is_on_stderr(tmp_path: Path) -> None:
    code = f"""
import ckptcore, threading
from ckptcore_testing import ThreadJob
from ckptcore.context import JobOptions
from ckptcore.job.gathering import LateRanks
import logging

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


def test_no_line_if_all_call(tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateRanks, "first_seconds", NEVER)
    run(lambda rank, context: ckptcore.save(tmp_path / "x", STATE, context=context))
    assert lines.texts == []
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(60)
            assert not thread.is_alive(), "no timer stays"
