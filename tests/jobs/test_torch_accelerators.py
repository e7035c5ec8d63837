"""A torch.distributed job without a collective for host memory saves and loads through the store of the job."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ckptcore
from tests.jobs.processes import run_job


def test_a_job_without_collectives_for_host_memory_saves_and_loads(tmp_path: Path) -> None:
    results = run_job("tests.jobs.torch_accelerators", "accelerators", tmp_path, size=2)
    assert results == [{"refusing": [1, 2], "accelerated": [1, 2]}] * 2
    for backend in results[0]:
        rows = ckptcore.load(tmp_path / backend / "async")["rows"]
        assert np.array_equal(rows, np.arange(44.0).reshape(11, 4) * 3)
