"""Watchdogs in jobs of torch.distributed: they name the rank that stalls, and torchrun restarts the job."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from ckptcore_recovery.watchdog import read_incidents
from ckptcore_recovery.watchdog.run_log import read_run_log

from tests.jobs.torch_scripts import run_script, run_torchrun

pytestmark = pytest.mark.system

_SCRIPT: Final = Path(__file__).with_name("stalled_job.py")


def test_the_reports_of_a_job_name_the_rank_that_holds_up_the_others(tmp_path: Path) -> None:
    job = run_script(3, _SCRIPT, "report", tmp_path)
    assert job.codes == [0] * 3, job.stderr  # only a process that knows of all reports ends
    # On a busy machine, other steps may take too long as well.
    (incident,) = [incident for incident in read_incidents(tmp_path) if incident.reports[0].stall.step == 3]
    assert [(report.rank, report.stall.what, report.stall.step) for report in incident.reports] == [
        (0, "step", 3), (1, "step", 3), (2, "step", 3),
    ]  # fmt: skip
    assert [report.is_wait for report in incident.reports] == [True, True, False]
    assert incident.suspects == [2]
    assert incident.reports[2].frames[0].endswith(" in main")


@pytest.mark.slow
def test_torchrun_restarts_a_job_that_its_watchdog_ended(tmp_path: Path) -> None:
    job = run_torchrun(2, _SCRIPT, "restart", tmp_path, max_restarts=1)
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        assert f"rank {rank} trained from step 3 and has 12.0" in job.stdout
    first, second = read_run_log(tmp_path)
    assert (first.outcome, second.outcome) == ("failed", "finished")
    assert [note.step for note in first.notes if note.kind == "stall"] == [3]
    assert sum(period.steps for period in second.periods) == 3
