"""Safetensors files with other stems than ``model``: writing them, and reading directories of libraries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError

_TREE = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4, np.float32)}


def _put(path: Path, **arrays: float) -> None:
    safetensors.numpy.save_file({name: np.full(2, value) for name, value in arrays.items()}, path)


def test_a_single_file_has_the_stem(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", _TREE, layout=ckptcore.SafetensorsLayout(stem="adapter_model"))
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"adapter_model.safetensors", "checkpoint.json"}
    theirs = safetensors.numpy.load_file(tmp_path / "c" / "adapter_model.safetensors")
    ours = ckptcore.load(tmp_path / "c")
    for name, array in _TREE.items():
        assert theirs[name].tobytes() == ours[name].tobytes() == array.tobytes()
    assert ckptcore.verify(tmp_path / "c").ok


def test_several_files_and_their_index_have_the_stem(tmp_path: Path) -> None:
    layout = ckptcore.SafetensorsLayout(max_file_bytes=20, stem="diffusion_pytorch_model", standalone=True)
    ckptcore.save(tmp_path / "c", _TREE, layout=layout)
    shards = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert {path.name for path in (tmp_path / "c").iterdir()} == {*shards, index, "checkpoint.json"}
    assert json.loads((tmp_path / "c" / index).read_bytes())["weight_map"] == dict(zip("ab", shards, strict=True))
    (tmp_path / "c" / "checkpoint.json").unlink()
    loaded = ckptcore.load(tmp_path / "c")  # without its root, as in a directory that diffusers wrote
    assert all(loaded[name].tobytes() == array.tobytes() for name, array in _TREE.items())


@pytest.mark.parametrize("stem", ["", ".hidden", "a/b", "..", "a\\b", "-x", "é", "checkpoint.model", "x" * 129, "a\n"])
def test_invalid_stems_are_refused(stem: str) -> None:
    with pytest.raises(ValueError, match="SafetensorsLayout.stem="):
        ckptcore.SafetensorsLayout(stem=stem)


def test_a_directory_of_an_adapter_loads_the_adapter(tmp_path: Path) -> None:
    _put(tmp_path / "adapter_model.safetensors", lora=1)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    assert list(ckptcore.load(tmp_path)) == ["lora"]
    assert ckptcore.metadata(tmp_path).custom["adapter_config"] == {"r": 8}
    ckptcore.copy(tmp_path, tmp_path / "ours", layout="safetensors")
    assert ckptcore.metadata(tmp_path / "ours").custom["adapter_config"] == {"r": 8}


@pytest.mark.parametrize(
    "config", ["", "[]", '{"r": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' * 70 + "1" + "}" * 70]
)
def test_invalid_config_is_refused(tmp_path: Path, config: str) -> None:
    _put(tmp_path / "adapter_model.safetensors", lora=1)
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(CorruptCheckpointError, match="adapter_config.json"):
        ckptcore.load(tmp_path)
    assert list(ckptcore.load(tmp_path / "adapter_model.safetensors")) == ["lora"]


def test_a_huge_config_is_refused(tmp_path: Path) -> None:
    _put(tmp_path / "adapter_model.safetensors", lora=1)
    with (tmp_path / "adapter_config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptCheckpointError, match="at most 16777216 are expected"):
        ckptcore.load(tmp_path)


def test_the_model_is_read_if_an_adapter_is_in_the_same_directory(tmp_path: Path) -> None:
    for number in (1, 2):
        _put(tmp_path / f"model-0000{number}-of-00002.safetensors", **{f"w{number}": number})
    _put(tmp_path / "adapter_model.safetensors", lora=3)
    assert list(ckptcore.load(tmp_path)) == ["w1", "w2"]
    assert list(ckptcore.load(tmp_path / "adapter_model.safetensors")) == ["lora"]


def test_a_plain_file_is_preferred_to_a_variant(tmp_path: Path) -> None:
    _put(tmp_path / "diffusion_pytorch_model.safetensors", w=1)
    _put(tmp_path / "diffusion_pytorch_model.fp16.safetensors", w=2)
    assert ckptcore.load(tmp_path)["w"].tolist() == [1, 1]


def test_one_of_several_unknown_files_must_be_named(tmp_path: Path) -> None:
    _put(tmp_path / "one.safetensors", w=1)
    _put(tmp_path / "two.safetensors", w=2)
    with pytest.raises(CheckpointNotFoundError, match=r"one.safetensors, two.safetensors\. Name one of them"):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize(("counts", "said"), [((3,), "3 safetensors"), ((2, 3), r"\[2, 3\] safetensors")])
def test_the_error_lists_missing_shards(tmp_path: Path, counts: tuple[int, ...], said: str) -> None:
    for count in counts:
        _put(tmp_path / f"adapter_model-00001-of-0000{count}.safetensors", w=count)
    with pytest.raises(
        CorruptCheckpointError, match=f"expected {said} shards that belong together, found {len(counts)}"
    ):
        ckptcore.load(tmp_path)
