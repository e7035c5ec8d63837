"""Jobs of torch.distributed in which each process is a host with a near directory, and hosts are lost or killed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from ckptcore import CheckpointReader
from tests.jobs.processes import run_job

_PROGRAM: Final = "tests.tiers.torch_hosts"

pytestmark = [pytest.mark.slow, pytest.mark.system]  # a job takes seconds to start; faster tests use threads


def test_a_job_resumes_after_hosts_were_lost_or_removed(tmp_path: Path) -> None:
    assert run_job(_PROGRAM, "save", tmp_path, size=3) == [[1, 2]] * 3
    assert CheckpointReader(tmp_path / "far").steps == (1, 2)
    shutil.rmtree(tmp_path / "host-1")
    assert run_job(_PROGRAM, "load", tmp_path, size=3) == [[2, 2]] * 3
    assert run_job(_PROGRAM, "load", tmp_path, size=2) == [[12, 12]] * 2
    reader = CheckpointReader(tmp_path / "far")
    assert reader.steps == (1, 2, 12, 22)
    assert (reader.load()["w"] == 22).all()


def test_a_job_resumes_after_a_host_was_killed_in_a_save(tmp_path: Path) -> None:
    run_job(_PROGRAM, "save", tmp_path, size=2)
    with pytest.raises(AssertionError, match=r"ended with \[-9, -9\]|ended with \[1, -9\]"):
        run_job(_PROGRAM, "die", tmp_path, size=2)
    restored = run_job(_PROGRAM, "load", tmp_path, size=2)
    assert restored in ([[2, 2]] * 2, [[3, 3]] * 2)
    assert CheckpointReader(tmp_path / "far").latest == restored[0][0] + 10


@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
def test_replicas_are_loaded_from_near_tiers_if_nothing_was_uploaded(tmp_path: Path, layout: str) -> None:
    with pytest.raises(AssertionError, match=r"ended with \[-9, -9, -9, -9\]"):
        run_job(_PROGRAM, "die saved", tmp_path, size=4, layouts=[layout])
    assert run_job(_PROGRAM, "load trained", tmp_path, size=4, layouts=[layout]) == [2] * 4
    assert CheckpointReader(tmp_path / "far").steps == ()
