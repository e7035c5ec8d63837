"""A run of steps in a torch.distributed job whose processes differ in data, clocks and preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.jobs.processes import run_job

SIZE: Final = 3

_OF_LEADER: Final = {"list", "list_names", "delete", "delete_directory", "rename", "exchange", "lock_directory"}


def test_a_run_of_steps(tmp_path: Path) -> None:
    """Run all cases in one job, because the start of a job takes longer than the cases."""
    results = run_job("tests.jobs.torch_runs", "run_steps", tmp_path, size=SIZE)
    _expect_one_step_restored([of_rank["fall_back"] for of_rank in results])
    _expect_the_clock_of_the_leader([of_rank["decide_by_clocks"] for of_rank in results])
    _expect_one_last_step([of_rank["be_preempted"] for of_rank in results])
    _expect_one_that_lists_and_deletes([of_rank["count_requests"] for of_rank in results])


def _expect_one_step_restored(told: list[Any]) -> None:
    assert told == [told[0]] * SIZE
    assert told[0]["restored"] == 1
    steps, reasons = zip(*told[0]["skipped"], strict=True)
    assert steps == (5, 4, 3, 2)
    for reason, expected in zip(
        reasons, ("checkpoint.json", "mine.rank_1", "model: '__2_0.distcp'", "damaged"), strict=True
    ):
        assert expected in reason, reason
    assert told[0]["again"] == [4, [5]]


def _expect_the_clock_of_the_leader(told: list[Any]) -> None:
    first, soon, later, set_back, steps = told[0]
    assert told == [told[0]] * SIZE
    assert first == [1, 4, 7, 10]
    assert soon == []  # the interval counts from the newest step, and any process can have saved it
    assert later == [14]
    assert set_back == [17]  # a clock that was set back does not prevent saves
    assert steps == [1, 4, 7, 10, 14, 17]


def _expect_one_last_step(told: list[Any]) -> None:
    assert [of_rank.pop("heard") for of_rank in told] == [0, 1, 0]
    assert told == [told[0]] * SIZE
    end = told[0]["end"]
    assert end >= 4
    steps = sorted({*range(2, end, 2), end})
    assert told[0] == {"end": end, "saved": True, "listens": True, "steps": steps}


def _expect_one_that_lists_and_deletes(told: list[Any]) -> None:
    leader, *others = told
    for what in ("save", "list_again", "delete"):
        assert leader[what].keys() & _OF_LEADER, what
        for other in others:
            assert not other[what].keys() & _OF_LEADER, (what, other[what])
    assert all(other["save"]["open_new"] > 0 for other in others), "the others wrote nothing"
    for of_rank in told:
        assert of_rank["steps"] == [[6], 6] and of_rank["left"] == [[6], 6]
