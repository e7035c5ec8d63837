"""Long lists and dicts of plain numbers in jobs: equal lists are one leaf, and dicts are merged by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptcore
from ckptcore import Context, PerProcess
from ckptcore.errors import TreeMismatchError
from ckptcore.model.columns import COLUMN_VALUES
from tests.jobs.test_per_process_values import LAYOUTS, run

MANY = COLUMN_VALUES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_lists_are_shared_and_per_process_lists_are_kept(layout: str, tmp_path: Path) -> None:
    def state_of(rank: int, count: int) -> dict[str, Any]:
        own = {"order": list(range(rank, rank + count)), "seen": dict.fromkeys(range(count), rank)}
        return {"history": [number / 3 for number in range(count)], "loader": PerProcess(own)}

    def job(rank: int, context: Context) -> Any:
        ckptcore.save(tmp_path / "c", state_of(rank, MANY), layout=layout, context=context)
        into = state_of(rank, 2)
        ckptcore.load_into(tmp_path / "c", into, context=context)
        return into, ckptcore.load(tmp_path / "c", context=context)

    for rank, (into, loaded) in enumerate(run(job)):
        assert into == state_of(rank, MANY)
        assert loaded == {"history": into["history"], "loader": into["loader"].value}
    assert len(ckptcore.metadata(tmp_path / "c").tree.leaves) == 5


def test_lists_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    def job(rank: int, context: Context) -> str:
        with pytest.raises((TreeMismatchError, ckptcore.errors.RankFailedError)) as caught:
            ckptcore.save(tmp_path / "c", {"v": [rank] * MANY}, context=context)
        return str(caught.value)

    for message in run(job):
        assert "v: list 1,000 int on rank 0; list 1,000 int on rank 1" in message
        assert "PerProcess" in message


def test_dicts_of_ranks_are_merged_by_key(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        return {"d": dict.fromkeys(range(rank * MANY, (rank + 1) * MANY), rank)}

    def job(rank: int, context: Context) -> Any:
        ckptcore.save(tmp_path / "c", state_of(rank), context=context)
        into = {"d": dict.fromkeys(state_of(rank)["d"], -1)}
        ckptcore.load_into(tmp_path / "c", into, context=context)
        return into

    assert run(job) == [state_of(0), state_of(1)]
    assert ckptcore.load(tmp_path / "c") == {"d": state_of(0)["d"] | state_of(1)["d"]}
