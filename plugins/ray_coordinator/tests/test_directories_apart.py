"""Actors whose working directories differ, as on hosts with separate disks.

Saves and runs detect a path that is not the same directory for all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import NotSharedError, RankFailedError
from ckptcore.job import visibility
from ckptcore.protocols import Coordinator
from plugins.ray_coordinator.tests.ranks import Ranks


def save_step(context: ckptcore.Context) -> None:
    """Save a checkpoint to a relative path."""
    ckptcore.save("run/step", {"w": np.ones(4)}, context=context)


def open_run(context: ckptcore.Context) -> None:
    """Open a run at a relative path."""
    ckptcore.Checkpointer("run", context=context).close()


@pytest.mark.parametrize("work", [pytest.param(save_step, marks=pytest.mark.slow), open_run])
def test_actors_with_other_working_directories(
    work: Callable[[ckptcore.Context], None], ranks: Ranks, tmp_path: Path
) -> None:
    for host in range(2):
        (tmp_path / f"host {host}" / "run").mkdir(parents=True)

    def of_rank(coordinator: Coordinator) -> Any:
        before, patience = os.getcwd(), visibility._TIMEOUT_SECONDS
        os.chdir(tmp_path / f"host {min(coordinator.rank, 1)}")
        visibility._TIMEOUT_SECONDS = 0.3  # type: ignore[misc]  # the files never appear
        try:
            work(ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator)))
        except Exception as error:  # noqa: BLE001  # compared by the test
            return type(error), str(error), getattr(error, "__notes__", [])
        finally:
            os.chdir(before)
            visibility._TIMEOUT_SECONDS = patience  # type: ignore[misc]  # restores the constant

    (kind, message, _), *blind = ranks.run(3, of_rank, timeout_seconds=30.0)
    assert kind is RankFailedError and f"the ranks [1, 2]: NotSharedError: {tmp_path}/host 1/run" in message
    for kind, message, notes in blind:
        assert kind is NotSharedError and "the URL of an object store" in message
        assert f"that rank 0 created in {tmp_path}/host 0/run" in message and "NotSharedError" in notes[0]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all("owner" in path.parts for path in files), files  # only the record of the run's released lock
