"""`ckptcore.diff` in Python. The command line has more tests of differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed

import ckptcore
from ckptcore.errors import CorruptCheckpointError

DIFF: Any = ckptcore.diff


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    weight = np.zeros((3, 4), np.float32)
    ckptcore.save(tmp_path / "a", {"w": weight, "n": 1, "same": np.ones(5)})
    weight[1, 2], weight[2, 3] = 3.0, -4.0
    ckptcore.save(tmp_path / "b", {"w": weight, "n": 3, "same": np.ones(5), "new": np.ones(2)})
    return tmp_path / "a", tmp_path / "b"


def test_equal_checkpoints_give_an_empty_and_false_result(two: tuple[Path, Path]) -> None:
    same = DIFF(two[0], two[0])
    assert not same
    assert (same.leaves, same.files, same.nbytes) == (3, 0, 88)


def test_differences_with_norm_and_worst_elements(two: tuple[Path, Path]) -> None:
    differences = DIFF(*two)
    assert [(difference.path, difference.kind) for difference in differences] == [
        ("n", "values"),
        ("new", "only_in_b"),
        ("w", "values"),
    ]
    weight = differences[-1]
    assert (weight.elements, weight.distance.differing, weight.distance.largest) == (12, 2, 4.0)
    assert weight.distance.norm == 5.0
    assert weight.distance.worst == (((2, 3), 0.0, -4.0, 4.0), ((1, 2), 0.0, 3.0, 3.0))
    assert differences[:2] == (differences[0], differences[1])


def test_tolerances_and_structure_alone(two: tuple[Path, Path]) -> None:
    assert [difference.path for difference in DIFF(*two, absolute=4.0)] == ["n", "new"]
    assert [difference.path for difference in DIFF(*two, values=False)] == ["n", "new"]
    assert DIFF(*two, values=False).nbytes == 0


def test_long_lists_of_numbers(tmp_path: Path) -> None:
    numbers = list(range(2000))
    ckptcore.save(tmp_path / "a", {"v": numbers, "d": dict.fromkeys(numbers, 1), "same": [0.5] * 2000})
    changed = [*numbers[:-1], 0]
    ckptcore.save(tmp_path / "b", {"v": changed, "d": dict.fromkeys(numbers, 2), "same": [0.5] * 2000})
    second, first = DIFF(tmp_path / "a", tmp_path / "b")
    assert (first.path, first.kind, first.a, first.distance) == ("d", "values", "2,000 int", None)
    assert (second.path, second.kind, second.b, second.elements) == ("v", "values", "2,000 int", 2000)
    assert (second.distance.differing, second.distance.largest) == (1, 1999.0)


@pytest.mark.parametrize("damaged", [{}, {"items": {"int": [9, "AAAA"]}}, {"items": {"float": "!"}}], ids=str)
def test_a_damaged_list_is_an_error(damaged: Any, tmp_path: Path) -> None:
    for name in "ab":
        ckptcore.save(tmp_path / name, {"list": list(range(1000))})
    path = tmp_path / "b" / "checkpoint.json"
    root = json.loads(path.read_bytes())
    (value,) = root["tables"]["tree"]["values"]
    value[2] = damaged
    path.write_bytes(sealed(root))
    with pytest.raises(CorruptCheckpointError, match="a saved list"):
        ckptcore.diff(tmp_path / "a", tmp_path / "b")


def test_progress_ends_at_the_total(two: tuple[Path, Path]) -> None:
    calls: list[tuple[int, int]] = []
    DIFF(*two, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (88, 88)
    assert calls == sorted(calls)
