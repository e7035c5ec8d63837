"""Every golden checkpoint of torch and of ckptcore loads bit for bit, and torch loads those of ckptcore."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_testing.fixed_saves import fixed_saves

import ckptcore
from ckptcore.errors import ChecksumError

GOLDEN = Path(__file__).parent / "golden"
EXPECTED: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}
TREES = [name for name, told in EXPECTED.items() if "tree" in told]
OURS = [name for name, told in EXPECTED.items() if "ckptcore" in told["written_with"]]


def built(expected: Any) -> Any:
    """Return the value for a JSON value of a golden (see `golden/generate.py`)."""
    if isinstance(expected, dict) and len(expected) == 1 and next(iter(expected)).startswith("$"):
        ((tag, content),) = expected.items()
        match tag:
            case "$array":
                name, shape, start = content
                numbers = (np.arange(math.prod(shape)) + start) % 100
                return numbers.astype(np.dtype(getattr(ml_dtypes, name, name))).reshape(shape)
            case "$tuple":
                return tuple([built(child) for child in content])
            case "$complex":
                return complex(*content)
            case "$bytes":
                return bytes.fromhex(content)
            case "$float":
                return float(content)
    if isinstance(expected, dict):
        return {key: built(child) for key, child in expected.items()}
    return [built(child) for child in expected] if isinstance(expected, list) else expected


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert sorted(actual) == sorted(expected), where
        for key, child in expected.items():
            assert_same(actual[key], child, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for number, child in enumerate(expected):
            assert_same(actual[number], child, f"{where}/{number}")
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        assert actual.tobytes() == expected.tobytes(), where
    else:
        assert repr(actual) == repr(expected), where  # nan is not equal to nan


@pytest.mark.parametrize("name", TREES)
def test_a_golden_loads_as_the_saved_tree(name: str) -> None:
    assert_same(ckptcore.load(GOLDEN / name), built(EXPECTED[name]["tree"]))


def test_a_golden_with_several_checkpointables_loads_by_name() -> None:
    (name,) = [name for name, told in EXPECTED.items() if "checkpointables" in told]
    assert_same(ckptcore.load_checkpointables(GOLDEN / name), built(EXPECTED[name]["checkpointables"]))


def test_golden_files_load() -> None:
    for name, told in EXPECTED.items():
        for file, expected in told.get("files", {}).items():
            assert_same(ckptcore.load(GOLDEN / name / file), built(expected))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", [name for name in TREES if EXPECTED[name].get("torch_loads")])
def test_torch_loads_the_tensors_too(name: str) -> None:
    expected = built(EXPECTED[name]["tree"])
    target = {key: torch.zeros(value.shape, dtype=_dtype(value)) for key, value in _arrays(expected)}
    dcp.load(target, checkpoint_id=GOLDEN / name, no_dist=True)
    for key, value in _arrays(expected):
        flat = target[key].contiguous().reshape(-1)
        assert (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"") == value.tobytes(), key


def _arrays(tree: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    return ((key, value) for key, value in tree.items() if isinstance(value, np.ndarray))


def _dtype(array: np.ndarray[Any, Any]) -> torch.dtype:
    dtype = getattr(torch, array.dtype.name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@pytest.mark.parametrize("name", OURS)
def test_our_goldens_are_sound_and_load_without_their_root(name: str, tmp_path: Path) -> None:
    assert ckptcore.verify(GOLDEN / name).ok
    shutil.copytree(GOLDEN / name, tmp_path / "c", ignore=shutil.ignore_patterns("checkpoint.*"))
    metadata = ckptcore.metadata(tmp_path / "c")
    assert (metadata.layout, metadata.save_id) == ("dcp", None)
    assert_same(ckptcore.load(tmp_path / "c"), built(EXPECTED[name]["tree"]))


def test_a_save_writes_the_bytes_of_our_golden(tmp_path: Path) -> None:
    with fixed_saves():
        ckptcore.save(tmp_path / "ours", built(EXPECTED["ours"]["tree"]), layout="dcp")
    for path in (GOLDEN / "ours").iterdir():
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_changed_byte_of_a_golden_is_found(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "two_processes", tmp_path / "c")
    (file,) = (tmp_path / "c").glob("__1_0.distcp")
    data = file.read_bytes()
    position = data.index(np.arange(10, 16, dtype=np.float32).tobytes())
    file.write_bytes(data[:position] + b"\x01" + data[position + 1 :])
    with pytest.raises(ChecksumError):
        ckptcore.load(tmp_path / "c")


def test_goldens_are_small_and_contain_no_local_paths() -> None:
    files = [path for path in GOLDEN.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 300_000
    for path in files:
        assert str(GOLDEN.parent).encode() not in path.read_bytes(), path
