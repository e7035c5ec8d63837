"""Dtypes of safetensors that are smaller than a byte, and dtypes that ckptcore does not know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import ckptcore
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError
from ckptcore.model import ArrayRecord


def _pairs(*shape: int) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.arange(count, dtype=torch.uint8).reshape(shape).view(torch.float4_e2m1fn_x2)


def _file(header: Mapping[str, Any], data: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def _header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def _tensors(path: Path) -> dict[str, Any]:
    """Return the tensors that the library reads in a file: dtype, shape and bytes by name."""
    tensors: Any = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]  # the library has no types for it
    return dict(tensors)


def _record(location: Path, name: str) -> ArrayRecord:
    tree = ckptcore.metadata(location).tree
    record = tree.leaves[tree.paths.index((name,))]
    assert isinstance(record, ArrayRecord)
    return record


def test_pairs_of_float4_are_stored_as_safetensors_stores_them(tmp_path: Path) -> None:
    state = {"w": _pairs(3, 4), "one": _pairs(5), "none": _pairs(2, 0), "scale": torch.ones(3)}
    ckptcore.save(tmp_path / "ours", state)
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    ours, theirs = _header(tmp_path / "ours" / "model.safetensors"), _header(tmp_path / "theirs.safetensors")
    for name in state:
        assert (ours[name]["dtype"], ours[name]["shape"]) == (theirs[name]["dtype"], theirs[name]["shape"])
    assert (ours["w"]["dtype"], ours["w"]["shape"]) == ("F4", [3, 8])
    loaded = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors")
    for name in ("w", "one", "none"):
        assert loaded[name].dtype == torch.float4_e2m1fn_x2
        assert loaded[name].view(torch.uint8).equal(state[name].view(torch.uint8))


def test_a_zero_dimensional_pair_of_float4_is_stored_as_a_byte(tmp_path: Path) -> None:
    state = {"w": _pairs()}
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.save(state)  # the format has no such tensor
    ckptcore.save(tmp_path / "c", state)
    assert _header(tmp_path / "c" / "model.safetensors")["w"]["dtype"] == "U8"
    assert ckptcore.load(tmp_path / "c", state)["w"].dtype == torch.float4_e2m1fn_x2


def test_pairs_of_float4_that_safetensors_wrote_are_loaded(tmp_path: Path) -> None:
    state = {"w": _pairs(3, 4), "scale": torch.ones(3)}
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, file)
    for location in (file, tmp_path):
        loaded = ckptcore.load(location, state)
        assert loaded["w"].dtype == torch.float4_e2m1fn_x2
        assert loaded["w"].view(torch.uint8).equal(state["w"].view(torch.uint8))
        plain = ckptcore.load(location)
        assert plain["w"].dtype == np.uint8 and plain["w"].tolist() == state["w"].view(torch.uint8).tolist()
        assert plain["scale"].tolist() == [1, 1, 1]
    with pytest.raises(TreeMismatchError, match="'w'|w: "):
        ckptcore.load(file, {"w": np.zeros((3, 8), np.float32), "scale": np.zeros(3, np.float32)})


def test_conversions_keep_pairs_of_float4(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": _pairs(3, 4)}, tmp_path / "model.safetensors")
    ckptcore.copy(tmp_path / "model.safetensors", tmp_path / "converted", layout="safetensors")
    ckptcore.copy(tmp_path / "converted", tmp_path / "consolidated", subtree=())
    for name in ("converted", "consolidated"):
        loaded = safetensors.torch.load_file(tmp_path / name / "model.safetensors")["w"]
        assert loaded.dtype == torch.float4_e2m1fn_x2
        assert loaded.view(torch.uint8).equal(_pairs(3, 4).view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("F6_E2M3", [2, 4], 6), ("F6_E3M2", [2, 2], 3), ("F4", [2, 3], 3), ("F4", [2, 1], 1)],
)
def test_other_dtypes_below_a_byte_are_stored_as_bytes_and_restored(
    dtype: str, shape: list[int], nbytes: int, tmp_path: Path
) -> None:
    data = bytes(range(8 + nbytes))
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": dtype, "shape": shape, "data_offsets": [8, 8 + nbytes]},
    }
    (tmp_path / "model.safetensors").write_bytes(_file(header, data))
    theirs = _tensors(tmp_path / "model.safetensors")
    loaded = ckptcore.load(tmp_path / "model.safetensors")
    assert loaded["a"].tobytes() == data[:8]
    assert loaded["b"].dtype == np.uint8 and loaded["b"].tobytes() == bytes(theirs["b"]["data"])
    record = _record(tmp_path / "model.safetensors", "b")
    assert record.kind == f"safetensors.{dtype}" and record.notes == {"shape": shape}
    ckptcore.copy(tmp_path / "model.safetensors", tmp_path / "converted", layout="safetensors")
    assert _tensors(tmp_path / "converted" / "model.safetensors") == theirs
    assert ckptcore.load(tmp_path / "converted")["b"].tobytes() == data[8:]


def test_a_tensor_of_an_unknown_dtype_leaves_the_others_readable(tmp_path: Path) -> None:
    header = {
        "known": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "new": {"dtype": "Q9", "shape": [3], "data_offsets": [8, 12]},
    }
    (tmp_path / "model.safetensors").write_bytes(_file(header, bytes(range(12))))
    loaded = ckptcore.load(tmp_path)
    assert loaded["known"].tobytes() == bytes(range(8))
    assert loaded["new"].dtype == np.uint8 and loaded["new"].tobytes() == bytes(range(8, 12))
    assert _record(tmp_path, "new").kind == "safetensors.Q9"
    with pytest.raises(TreeMismatchError, match="new"):
        ckptcore.load(tmp_path, {"known": np.zeros(2, np.float32), "new": np.zeros(3, np.float32)})
    ckptcore.copy(tmp_path / "model.safetensors", tmp_path / "converted", layout="safetensors")
    # The safetensors library opens no file with a dtype that it does not know.
    assert set(safetensors.numpy.load_file(tmp_path / "converted" / "model.safetensors")) == {"known", "new"}


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_a_wrong_number_of_bytes_is_damage(dtype: str, tmp_path: Path) -> None:
    header = {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 8]}}
    (tmp_path / "model.safetensors").write_bytes(_file(header, bytes(8)))
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors is damaged: the tensor 'w'"):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize("dtype", ["", "Q" * 100, "a b", "\n"])
def test_an_invalid_name_of_a_dtype_is_damage(dtype: str, tmp_path: Path) -> None:
    header = {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 8]}}
    (tmp_path / "model.safetensors").write_bytes(_file(header, bytes(8)))
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        ckptcore.load(tmp_path)
