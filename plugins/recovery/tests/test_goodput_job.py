"""Goodput of a real job that is killed and restarted several times."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from ckptcore_recovery.watchdog import goodput_of, read_run_log

import ckptcore
from plugins.recovery.tests.goodput_job import LAST

pytestmark = pytest.mark.system


def start(kind: str, directory: Path, stop: int) -> subprocess.Popen[str]:
    """Start the job."""
    program = [sys.executable, "-m", "plugins.recovery.tests.goodput_job", kind, str(directory), str(stop)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True)


def wait_for_log(directory: Path, number: int, what: Literal["start", "running step", "end"]) -> None:
    """Wait until the log of an incarnation has something."""
    while True:
        log = read_run_log(directory)
        if len(log) == number:
            newest = log[-1]
            if {"start": True, "running step": newest.unfinished > 0, "end": newest.outcome is not None}[what]:
                return
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["watchdog", "log"])
def test_a_job_that_is_killed_three_times(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number, stop in enumerate((7, 13, 14), 1):
        with start(kind, run, stop) as process:
            assert process.stdout is not None and process.stdout.readline() == "stopped\n"
            # A killed RunLog loses what it has not written. The monitor of a watchdog only has to be there.
            wait_for_log(run, number, "running step" if kind == "log" else "start")
            process.kill()
        if kind == "watchdog":
            wait_for_log(run, number, "end")
    with start(kind, run, 0) as process:
        assert process.wait() == 0
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
