"""A sample for the test matrix: the memory of a job of one process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ckptcore_testing import StorageSample

from ckptcore.builtin import SingleProcess
from ckptcore.job.agreement import Agreement
from ckptcore_recovery.peers.joining import MemoryOptions, join_job
from ckptcore_recovery.peers.spreading import spread


@contextmanager
def _location(directory: Path) -> Iterator[str]:
    job = f"sample-{uuid.uuid4().hex}"
    options = MemoryOptions(1 << 30, copies=0, idle_seconds=60.0, base=str(directory))
    with join_job(job, Agreement(SingleProcess(), "sample"), options) as session:
        yield f"peers://{job}/steps"
        spread(session, {"op": "end", "epoch": session.view.epoch}, b"")


SAMPLE: Final = StorageSample(scheme="peers", open=_location)
