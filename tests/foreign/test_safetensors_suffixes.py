"""Safetensors files are recognized by their content, for all file names. Files of other formats are not affected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import ckptcore
from ckptcore.errors import CheckpointNotFoundError

_TREE = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4, np.float32)}
_NAMES = [
    "weights.bin",
    "model.st",
    "model",
    "model.pt",
    "model.ckpt",
    "model.safetensors.fp16",
    "a.json",
    "__0_0.distcp",
]


@pytest.mark.parametrize("name", _NAMES)
def test_a_file_of_any_name_is_opened(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    safetensors.numpy.save_file(_TREE, file, {"by": "somebody"})
    loaded = ckptcore.load(file)
    assert loaded.keys() == _TREE.keys() and all(np.array_equal(loaded[name], _TREE[name]) for name in _TREE)
    metadata = ckptcore.metadata(file)
    assert (metadata.layout, metadata.custom) == ("safetensors", {"by": "somebody"})
    assert ckptcore.verify(file).ok
    with ckptcore.open(file) as checkpoint:
        assert checkpoint["a"][0].tolist() == [0, 1, 2]
    ckptcore.copy(file, tmp_path / "converted", layout="safetensors")
    assert np.array_equal(ckptcore.load(tmp_path / "converted")["a"], _TREE["a"])
    ckptcore.copy(file, tmp_path / "consolidated", subtree=())
    assert safetensors.numpy.load_file(tmp_path / "consolidated" / "model.safetensors").keys() == _TREE.keys()


def test_a_file_without_tensors_is_opened(tmp_path: Path) -> None:
    safetensors.numpy.save_file({}, tmp_path / "none.bin")
    assert ckptcore.load(tmp_path / "none.bin") == {}


def test_files_of_torch_are_still_read_as_such(tmp_path: Path) -> None:
    for name, zipped in (("zip.bin", True), ("legacy.bin", False)):
        torch.save({"w": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=zipped)
        assert ckptcore.metadata(tmp_path / name).layout == "torch"
        assert ckptcore.load(tmp_path / name)["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\x02\0\0\0\0\0\0\0",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x03\0\0\0\0\0\0\0{}",
        json.dumps({"weight_map": {}}).encode(),
    ],
)
def test_other_files_are_no_checkpoint(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(data)
    with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint that an installed layout reads"):
        ckptcore.load(tmp_path / "file.bin")
