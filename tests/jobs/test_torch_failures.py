"""Jobs of torch.distributed with real processes. One process fails, is killed or pauses anywhere in a save or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.jobs import failing_torch
from tests.jobs.failing_job import Cell
from tests.jobs.failures import fail, name_of

SIZE: Final = 4

_OF_ALL: Final = [
    ("save", "describe"), ("save", "copy"), ("save", "write"), ("save", "written"), ("save", "export"),
    ("load", "build"),
    ("load", "get_into"), ("decide", "notice"),
]  # fmt: skip
"""Points that every rank comes to."""

_OF_LEADER: Final = [
    ("save", "lock_directory"), ("save", "finish"), ("save", "rename"), ("open", "lock_directory"),
    ("open", "list_names"),
    ("delete", "rename"),
]  # fmt: skip

_CANNOT_RAISE: Final = [f"after exchange {number}" for number in range(1, 6)]
"""Ends of the stages "describe", "trees", "united", "claim" and "write"."""

TABLE: Final = [
    *[Cell(*point, action, victim) for point in _OF_ALL for action in ("raise", "kill", "hang") for victim in (0, 2)],
    *[Cell(*point, action, 0) for point in _OF_LEADER for action in ("raise", "kill", "hang")],
    *[Cell("save", point, action, victim) for point in _CANNOT_RAISE for action in ("kill",
    "hang") for victim in (0, 2)],
    *[Cell("save", "after commit 1", action, 0) for action in ("kill", "hang")],
]  # fmt: skip

SAMPLE: Final = [
    Cell("save", "copy", "raise", 2),
    Cell("save", "written", "kill", 2),
    Cell("save", "finish", "kill", 0),
    Cell("save", "write", "hang", 2),
    Cell("load", "build", "raise", 0),
    Cell("decide", "notice", "kill", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("cell", SAMPLE, ids=name_of)
def test_one_rank_fails(cell: Cell, tmp_path: Path) -> None:
    fail(failing_torch, cell, SIZE, tmp_path / "place", leader_serves=False)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "hang"])
def test_the_rank_with_the_store_fails(action: Any, tmp_path: Path) -> None:
    fail(failing_torch, Cell("save", "write", action, 0), SIZE, tmp_path / "place", leader_serves=True)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in TABLE if cell not in SAMPLE], ids=name_of)
def test_one_rank_fails_anywhere(cell: Cell, full: bool, tmp_path: Path) -> None:
    if not full and TABLE.index(cell) % 5:  # 5 has no factor in common with the numbers of actions and victims
        pytest.skip("one cell in five; all with --full")
    fail(failing_torch, cell, SIZE, tmp_path / "place", leader_serves=False)
