"""torch.distributed jobs: processes that lost their state get it from others, also if one of those is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.processes import run_job

_PROGRAM = "plugins.recovery.tests.torch_replicas"

pytestmark = pytest.mark.system


def test_data_parallel_processes_recover_all_objects(tmp_path: Path) -> None:
    reports = run_job(_PROGRAM, "data parallel", tmp_path, size=4)
    for rank, report in enumerate(reports):
        assert report["lost"] == [1, 3]
        assert not report["replaced"]
        if rank in (1, 3):
            assert report["moved"] == report["needed"] > 3_000_000
            assert max(report["received"].values()) <= 1.1 * report["needed"] / 2
        else:
            assert report["moved"] == 0


def test_shards_come_from_the_processes_with_the_same_shard(tmp_path: Path) -> None:
    reports = run_job(_PROGRAM, "sharded", tmp_path, size=4)
    for rank, holder in ((0, 2), (3, 1)):
        assert reports[rank]["moved"] == reports[rank]["needed"]
        assert reports[rank]["received"][str(holder)] > 0.9 * reports[rank]["needed"]


def test_a_shard_that_nobody_holds_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    errors = run_job(_PROGRAM, "not replicated", tmp_path, size=4)
    assert "w[10:20, 0:10]: no process that has its state holds these elements. Load a checkpoint" in errors[1]
    assert errors[1].startswith("NoReplicaError")
    for rank in (0, 2, 3):
        assert errors[rank].startswith("RankFailedError")
        assert "rank 1: NoReplicaError: w[10:20, 0:10]" in errors[rank]


def test_a_holder_that_is_killed_is_replaced_by_another(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended with \[0, 0, -9, 0\]"):
        run_job(_PROGRAM, "killed holder", tmp_path, size=4)
    report = json.loads((tmp_path / "recovered-1.json").read_text())
    assert report["replaced"] == [2]
    assert report["received"].keys() == {"0", "2", "3"}, "rank 2 sent a part before"
    assert sum(report["received"].values()) == report["needed"]
