"""jax.distributed jobs: processes that lost their arrays get them from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.processes import run_job

pytestmark = pytest.mark.system


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_processes_recover_replicated_and_sharded_arrays(tmp_path: Path, devices: int) -> None:
    reports = run_job("plugins.recovery.tests.jax_replicas", "data parallel", tmp_path, size=4, devices=devices)
    for rank, report in enumerate(reports):
        if rank in (0, 3):
            assert report["moved"] == report["needed"] > 800 * 600 * 4
            assert report["received"] == [1, 2]
        else:
            assert report["moved"] == 0
