"""Goodput of a real job that is killed and restarted several times."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ckptcore_recovery.watchdog import Incarnation, goodput_of, read_run_log

import ckptcore
from plugins.recovery.tests.goodput_job import LAST

pytestmark = pytest.mark.system


def start(kind: str, directory: Path, stop: int) -> subprocess.Popen[bytes]:
    """Start the job."""
    program = [sys.executable, "-m", "plugins.recovery.tests.goodput_job", kind, str(directory), str(stop)]
    return subprocess.Popen(program)


def wait_for_log(directory: Path, number: int, process: subprocess.Popen[bytes] | None = None) -> Incarnation:
    """Wait until the log of an incarnation has its unfinished step, or its end if there is no process."""
    while process is None or process.poll() is None:
        log = read_run_log(directory)
        if len(log) == number and (log[-1].unfinished if process is not None else log[-1].outcome):
            return log[-1]
        time.sleep(0.02)
    raise AssertionError(f"the job has ended with status {process.returncode}")


@pytest.mark.parametrize("kind", ["watchdog", "log"])
def test_a_job_that_is_killed_three_times(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number, stop in enumerate((7, 13, 14), 1):
        process = start(kind, run, stop)
        wait_for_log(run, number, process)
        process.kill()
        process.wait()
        if kind == "watchdog":  # its monitor outlives it
            wait_for_log(run, number)
    assert start(kind, run, 0).wait() == 0
    log = read_run_log(run)
    goodput = goodput_of(log)
    assert [one.outcome for one in log] == [*(["failed"] * 3 if kind == "watchdog" else [None] * 3), "finished"]
    assert [one.state for one in goodput.incarnations] == ["failed", "failed", "failed", "finished"]
    assert [one.last_step for one in goodput.incarnations] == [6, 12, 13, LAST]
    assert [one.steps for one in goodput.incarnations] == [6, 7, 3, 10]
    assert [one.saves for one in goodput.incarnations] == [1, 1, 0, 2]
    assert [[note.step for note in one.notes if note.kind == "load"] for one in log] == [[], [5], [10], [10]]
    parts = goodput.parts
    assert goodput.overlaps == []
    assert {part for part, time in parts.items() if time} - {"between"} == {
        "productive", "repeated", "saving", "starting", "loading", "unfinished", "down",
    }  # fmt: skip
    gaps = sum(later.began - earlier.ended for earlier, later in itertools.pairwise(log))
    assert goodput.total == sum(one.duration for one in log) + gaps == sum(parts.values())
    assert np.array_equal(ckptcore.load(run / str(LAST))["w"], np.full(8, float(LAST)))
