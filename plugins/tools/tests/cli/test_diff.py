"""``ckptcore diff``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_tools import comparison
from ckptcore_tools.elements import BoxReader
from safetensors.numpy import save_file

import ckptcore
from ckptcore.model import Box, HostArray
from plugins.tools.tests.cli.conftest import Run, RunJson, flip, state
from plugins.tools.tests.cli.expected_documents import DiffDocument, ErrorDocument


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """Return a function that saves a second checkpoint."""

    def save(value: object) -> Path:
        ckptcore.save(tmp_path / "other", value)
        return tmp_path / "other"

    return save


def differences(document: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the contents of A and B for each difference. The keys contain its path and kind."""
    return {
        f"{difference['path']} {difference['kind']}": (difference["a"], difference["b"])
        for difference in document["differences"]
    }


def test_equal_checkpoints(run: Run, run_json: RunJson, checkpoint: Path, other: Any) -> None:
    second = other(state())
    code, document = run_json(DiffDocument, "diff", checkpoint, second)
    assert (code, document["same"], document["differences"]) == (0, True, [])
    assert (document["leaves_compared"], document["nbytes_compared"]) == (9, 66)
    assert run("diff", checkpoint, second).stdout == "the same: 9 leaves, 66 B of elements compared\n"


def test_every_kind_of_difference(run: Run, run_json: RunJson, checkpoint: Path, other: Any) -> None:
    changed = state()
    changed["params"]["w"] = changed["params"]["w"].copy()
    changed["params"]["w"][1, 2] += 0.25
    changed["params"]["w"][2, 3] -= 0.5
    changed["params"]["half"] = changed["params"]["half"].astype(np.float32)
    changed["moments"][0] = list(changed["moments"][0])
    changed["moments"][0][1] = np.zeros((0, 3))
    changed["step"] = 7
    changed["name"] = 5
    del changed["rate"]
    changed["more"] = {"deep": {"x": 1}}
    second = other(changed)
    code, document = run_json(DiffDocument, "diff", checkpoint, second)
    assert code == 1
    assert differences(document) == {
        "moments[0] structure": ("tuple", "list"),
        "moments[0][1] shape": ([0, 2], [0, 3]),
        "step values": (5, 7),
        "rate only_in_a": ("float", None),
        "name kind": ("str", "int"),
        "more only_in_b": (None, "dict"),
        "params/w values": (None, None),
        "params/half dtype": ("bfloat16", "float32"),
    }
    by_path = {difference["path"]: difference for difference in document["differences"]}
    weight = by_path["params/w"]
    assert (weight["differing"], weight["elements"], weight["max_absolute_error"]) == (2, 12, 0.5)
    assert weight["keys"] == ["params", "w"]
    half = by_path["params/half"]
    assert (half["differing"], half["elements"], half["max_absolute_error"]) == (0, 5, 0.0)
    assert by_path["step"]["max_absolute_error"] == 2
    result = run("diff", checkpoint, second)
    assert result.exit_code == 1
    assert sorted(result.stdout.splitlines()[:-1]) == sorted(
        [
            "~ moments[0]  structure: tuple -> list",
            "~ moments[0][1]  shape: [0, 2] -> [0, 3]",
            "~ step  values: 5 -> 7, max abs error 2",
            "- rate  only in A: float",
            "~ name  kind: str -> int",
            "+ more  only in B: dict",
            "~ params/w  2 of 12 elements differ, max abs error 0.5",
            "~ params/half  dtype: bfloat16 -> float32",
        ]
    )
    assert result.stdout.splitlines()[-1].startswith("8 differences: ")


def test_a_tolerance(run: Run, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "a", np.array([1.0, 100.0, np.nan]))
    ckptcore.save(tmp_path / "b", np.array([1.5, 101.0, np.nan]))
    assert run("diff", tmp_path / "a", tmp_path / "b").exit_code == 1
    assert run("diff", tmp_path / "a", tmp_path / "b", "--atol", "1").exit_code == 0
    assert run("diff", tmp_path / "a", tmp_path / "b", "--atol", "0.5").exit_code == 1
    assert run("diff", tmp_path / "a", tmp_path / "b", "--atol", "0.5", "--rtol", "0.01").exit_code == 0


def test_a_difference_from_nan(run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "a", np.array([1.0, np.inf], np.float32))
    ckptcore.save(tmp_path / "b", np.array([np.nan, np.inf], np.float32))
    _, document = run_json(DiffDocument, "diff", tmp_path / "a", tmp_path / "b")
    assert document["differences"][0]["max_absolute_error"] == "nan"
    assert document["differences"][0]["differing"] == 1


def test_structure_alone_reads_no_array(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "a", {"x": np.ones(4, np.float32), "y": np.ones(4, np.float32)})
    ckptcore.save(tmp_path / "b", {"x": np.zeros(4, np.float32), "y": np.ones(4, np.float16)})
    (tmp_path / "a" / "model.safetensors").unlink()
    code, document = run_json(DiffDocument, "diff", tmp_path / "a", tmp_path / "b", "--no-values")
    assert code == 1
    assert differences(document) == {"y dtype": ("float32", "float16")}
    assert document["nbytes_compared"] == 0


def test_across_writers(run: Run, tmp_path: Path) -> None:
    arrays = {"layer.0.weight": np.ones((4, 4), np.float32), "layer.0.bias": np.ones(4, ml_dtypes.bfloat16)}
    save_file(arrays, tmp_path / "model.safetensors")
    ckptcore.save(tmp_path / "ours", arrays)
    assert run("diff", tmp_path / "model.safetensors", tmp_path / "ours").exit_code == 0


def test_an_int_key_differs_from_a_text_key(run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "a", {0: 1, "b": OrderedDict(x=1)})
    ckptcore.save(tmp_path / "b", {"0": 1, "b": {"x": 1}})
    code, document = run_json(DiffDocument, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert sorted(difference["kind"] for difference in document["differences"]) == [
        "only_in_a",
        "only_in_b",
        "structure",
    ]


def test_many_batches_find_the_same_differences_as_one(
    run_json: RunJson, checkpoint: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = state()
    changed["params"]["w"] = changed["params"]["w"] * 2
    changed["params"]["half"] = changed["params"]["half"].astype(np.float64) + 0.5
    second = other(changed)
    whole = run_json(DiffDocument, "diff", checkpoint, second)
    monkeypatch.setattr(comparison, "_BATCH_BYTES", 8)
    assert run_json(DiffDocument, "diff", checkpoint, second) == whole
    assert whole[1]["differences"][0]["elements"] == 12


def test_tied_arrays_are_read_once(run_json: RunJson, checkpoint: Path) -> None:
    _, document = run_json(DiffDocument, "diff", checkpoint, checkpoint)
    assert document["nbytes_compared"] == ckptcore.metadata(checkpoint).nbytes


def test_damage_is_an_error_and_not_a_difference(run_json: RunJson, checkpoint: Path, other: Any) -> None:
    second = other(state())
    flip(second / "model.safetensors", -1)
    code, document = run_json(ErrorDocument, "diff", checkpoint, second)
    assert code == 4
    assert document["error"] in ("ChecksumError", "CorruptCheckpointError")


def test_a_missing_checkpoint_is_an_error(run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    assert run_json(ErrorDocument, "diff", checkpoint, tmp_path / "nothing")[0] == 3
    assert run_json(ErrorDocument, "diff", tmp_path / "nothing", checkpoint)[0] == 3


def test_memory_is_limited(run_json: RunJson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save(
        tmp_path / "a", {"large": np.arange(10_000, dtype=np.int16), **{f"s{n}": np.ones(30) for n in range(50)}}
    )
    ckptcore.save(tmp_path / "b", {"large": np.arange(10_000.0), **{f"s{n}": np.ones(30) for n in range(50)}})
    held = []
    read = BoxReader.read

    def watched(reader: BoxReader, boxes: Mapping[int, Box]) -> dict[int, HostArray]:
        elements = read(reader, boxes)
        held.append(sum(array.nbytes for array in elements.values()))
        return elements

    monkeypatch.setattr(BoxReader, "read", watched)
    monkeypatch.setattr(comparison, "_BATCH_BYTES", 4096)
    code, document = run_json(DiffDocument, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert [difference["kind"] for difference in document["differences"]] == ["dtype"]
    assert max(held) <= 4096
    assert sum(held) == 10_000 * (2 + 8) + 2 * 50 * 240
