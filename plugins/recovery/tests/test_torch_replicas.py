"""torch.distributed jobs: processes that lost their state get it from others, also if one of those is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.jobs.processes import run_job

_PROGRAM: Final = "plugins.recovery.tests.torch_replicas"

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


@pytest.mark.slow
def test_a_shard_that_no_process_holds_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    errors = run_job(_PROGRAM, "not replicated", tmp_path, size=4)
    text = "NoReplicaError: rank 1: state/w[10:20, 0:10]: no process that has its state holds these elements. Load a"
    for error in errors:
        assert error.startswith(text)


def run_with_kills(directory: Path, task: str, size: int, *arguments: str) -> dict[int, dict[str, Any]]:
    """Run a job of which some processes are killed. Return the outcomes of the others."""
    with pytest.raises(AssertionError, match=r"ended with \[[-0-9, ]*-9"):
        run_job(_PROGRAM, task, directory, size=size, layouts=arguments)
    files = {rank: directory / f"outcome-{rank}.json" for rank in range(size)}
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def test_a_killed_process_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    outcomes = run_with_kills(tmp_path, "replaced process", 4)
    assert outcomes.keys() == {0, 2, 3}
    assert outcomes[3]["received"].keys() == {"0", "2"}
    assert outcomes[3]["moved"] == outcomes[3]["needed"]


def test_a_holder_that_is_killed_is_replaced_by_another(tmp_path: Path) -> None:
    outcomes = run_with_kills(tmp_path, "killed holder", 4)
    assert outcomes.keys() == {0, 1, 3}
    assert not any(outcome["error"] for outcome in outcomes.values())
    assert outcomes[1]["replaced"] == [2]
    assert outcomes[1]["received"].keys() == {"0", "2", "3"}, "rank 2 sent a part before"
    assert sum(outcomes[1]["received"].values()) == outcomes[1]["needed"]


def test_if_one_of_two_receivers_is_killed_the_other_recovers_and_all_holders_hear_of_it(tmp_path: Path) -> None:
    outcomes = run_with_kills(tmp_path, "killed receiver", 4)
    assert outcomes.keys() == {0, 2, 3}
    assert outcomes[3]["error"] is None
    assert outcomes[3]["moved"] == outcomes[3]["needed"]
    for rank in (0, 2):
        error = outcomes[rank]["error"]
        assert error.startswith("RankFailedError: the recovery failed on rank 1: it closed its connection")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_holders_but_one_can_be_killed_at_any_parcel(tmp_path: Path, seed: int) -> None:
    outcomes = run_with_kills(tmp_path, "killed holders", 5, str(seed))
    assert {0, 1} <= outcomes.keys() != {0, 1, 2, 3, 4}
    assert not any(outcome["error"] for outcome in outcomes.values())
    assert sorted({0, 2, 3, 4} - outcomes.keys()) == outcomes[1]["replaced"]
    assert sum(outcomes[1]["received"].values()) == outcomes[1]["needed"]
