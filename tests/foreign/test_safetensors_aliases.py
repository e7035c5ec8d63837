"""Tensors with several names, of which `safetensors.torch.save_model` stores one. Every name can be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import ckptcore
from ckptcore.errors import TreeMismatchError


class _Tied(torch.nn.Module):
    """A module with three names for one weight, like the embeddings of an encoder, a decoder and a head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.encoder = torch.nn.Embedding(5, 3)
        self.decoder = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5)
        if tied:
            self.decoder.weight = self.head.weight = self.encoder.weight


_NAMES = {"encoder.weight", "decoder.weight", "head.weight", "head.bias"}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, _Tied]:
    model = _Tied()
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(model, str(path), {"format": "pt", "license": "mit"})
    assert safetensors.torch.load_file(path).keys() == {"decoder.weight", "head.bias"}
    return path, model


@pytest.mark.brings("tied weights of `save_model`", "safetensors", "same")
def test_every_name_can_be_loaded(saved: tuple[Path, _Tied]) -> None:
    path, model = saved
    loaded = ckptcore.load(path)
    assert loaded.keys() == _NAMES
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(loaded[name], tensor.numpy())
    with ckptcore.open(path.parent) as checkpoint:
        np.testing.assert_array_equal(checkpoint["encoder.weight"][1:3], model.encoder.weight.detach()[1:3].numpy())
    metadata = ckptcore.metadata(path)
    assert metadata.nbytes == 4 * (15 + 5)
    assert metadata.custom["license"] == "mit"
    assert metadata.unused == {}
    chosen = ckptcore.load(path, select=ckptcore.select.names("head.weight"))
    np.testing.assert_array_equal(chosen["head.weight"], model.head.weight.detach().numpy())


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_is_filled_as_load_model_fills_it(tied: bool, saved: tuple[Path, _Tied]) -> None:
    path, model = saved
    ours = _Tied(tied=tied)
    ckptcore.load_into(path, ours)
    assert (ours.head.weight is ours.encoder.weight) is tied
    expected = _Tied()
    safetensors.torch.load_model(expected, path)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)
        assert torch.equal(tensor, model.state_dict()[name])


def test_one_of_several_names_is_enough(saved: tuple[Path, _Tied]) -> None:
    path, model = saved
    for name in ("encoder.weight", "decoder.weight"):
        loaded = ckptcore.load(path, {name: torch.empty(5, 3), "head.bias": torch.empty(5)})
        assert torch.equal(loaded[name], model.encoder.weight)


def test_a_copy_keeps_the_names(saved: tuple[Path, _Tied], tmp_path: Path) -> None:
    path, model = saved
    ckptcore.copy(path, tmp_path / "copy", layout="safetensors")
    copied = _Tied()
    ckptcore.load_into(tmp_path / "copy", copied)
    assert torch.equal(copied.head.weight, model.head.weight)
    assert ckptcore.load(tmp_path / "copy").keys() == _NAMES
    assert ckptcore.metadata(tmp_path / "copy").nbytes == 4 * (15 + 5)


def test_metadata_that_names_no_tensor_is_ignored(tmp_path: Path) -> None:
    tensors = {"pt": torch.ones(2), "w": torch.zeros(2)}
    metadata = {"format": "pt", "w": "pt", "license": "mit", "gone": "lost"}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata)
    loaded = ckptcore.load(tmp_path)
    assert loaded.keys() == tensors.keys()
    assert not loaded["w"].any()


def test_names_in_several_files_are_loaded(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / first, {"b": "a", "c": "a"})
    safetensors.torch.save_file({"d": torch.zeros(2)}, tmp_path / second, {"c": "d"})
    # The index also lists `b`. `c` is only in the metadata of both files, of which the first one is used.
    index = {"weight_map": {"a": first, "b": first, "d": second}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = ckptcore.load(tmp_path)
    assert {name: float(array[0]) for name, array in loaded.items()} == {"a": 1, "b": 1, "c": 1, "d": 0}
    assert ckptcore.metadata(tmp_path).nbytes == 16


def test_a_name_of_a_part_of_a_tensor_is_refused(tmp_path: Path) -> None:
    """`save_model` writes the same entry for a view of a part of a tensor, but does not store its shape."""
    model = _Tied()
    model.part = torch.nn.Parameter(model.encoder.weight.data[:2])
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(model, str(path))
    with pytest.raises(
        TreeMismatchError, match=r"part: shape: float32\[2, 3\] is requested, float32\[5, 3\] is stored"
    ):
        ckptcore.load_into(path, model)
