"""The watchdog of a run in S3. Its monitor writes with the credentials of the Context."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_recovery.watchdog import Watchdog, read_incidents, read_run_log
from ckptcore_s3.testing import SECRET_ACCESS_KEY, S3Server, s3_server

from ckptcore import Context

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start a server for this module alone."""
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def test_reports_of_a_run_in_s3_are_in_its_directory(server: S3Server) -> None:
    directory, context = f"s3://{server.create_bucket()}/run", Context(storage={"s3": server.options})
    with Watchdog(directory, policy=[], bounds={"step": 0.5}, context=context) as watchdog:
        watchdog.step(1)
        visible = Path(f"/proc/{watchdog._monitor.pid}/cmdline").read_text() + Path("/proc/self/environ").read_text()
        assert SECRET_ACCESS_KEY not in visible
        deadline = time.monotonic() + 120
        while not read_incidents(directory, context):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    ((report,),) = [incident.reports for incident in read_incidents(directory, context)]
    assert report.stall.step == 1 and any("test_reports_of_a_run_in_s3" in frame for frame in report.frames)
    (incarnation,) = read_run_log(directory, context)
    assert incarnation.outcome == "finished"
    assert [note.kind for note in incarnation.notes] == ["stall"]
