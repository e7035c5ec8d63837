"""Pipelines of diffusers load as several checkpointables. The index of a variant decides which files it has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, CompositeCheckpointError, CorruptCheckpointError

_GOLDEN = Path(__file__).parent / "golden_diffusers"
_PIPELINE = _GOLDEN / "pipeline"
_MEMBERS = ["text_encoder", "unet", "vae"]


def _expected(directory: Path, variant: str = "") -> dict[str, np.ndarray]:
    """Read all files of a variant with safetensors."""
    files = [path for path in directory.glob("*.safetensors") if (".fp16" in path.name) == (variant == "fp16")]
    assert files
    return {name: array for path in files for name, array in safetensors.numpy.load_file(path).items()}


def _assert_equal(loaded: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype


@pytest.mark.parametrize("name", _MEMBERS)
def test_the_plain_files_are_loaded(name: str) -> None:
    loaded = ckptcore.load(_PIPELINE / name)
    _assert_equal(loaded, _expected(_PIPELINE / name))
    assert {array.dtype for array in loaded.values()} == {np.dtype(np.float32)}


_VARIANTS = {
    "one file": "pipeline/vae/diffusion_pytorch_model.fp16.safetensors",
    "several files of diffusers": "pipeline/unet/diffusion_pytorch_model.safetensors.index.fp16.json",
    "several files of transformers": "pipeline/text_encoder/model.safetensors.index.fp16.json",
    "several files of diffusers 0.29": "older_variant/diffusion_pytorch_model.safetensors.fp16.index.json",
}


@pytest.mark.parametrize("name", _VARIANTS)
@pytest.mark.brings("variants `fp16` of diffusers, also sharded", "safetensors", "same")
def test_a_variant_is_opened_by_its_file_or_index(name: str) -> None:
    path = _GOLDEN / _VARIANTS[name]
    expected = _expected(path.parent, "fp16")
    _assert_equal(ckptcore.load(path), expected)
    assert ckptcore.verify(path).ok
    assert ckptcore.metadata(path).unused == {}
    with ckptcore.open(path) as checkpoint:
        assert checkpoint.keys() == expected.keys()


@pytest.mark.parametrize("name", _VARIANTS)
def test_a_directory_with_a_single_variant_loads_this_variant(name: str, tmp_path: Path) -> None:
    source = (_GOLDEN / _VARIANTS[name]).parent
    for path in source.glob("*.fp16*"):
        shutil.copy(path, tmp_path)
    _assert_equal(ckptcore.load(tmp_path), _expected(source, "fp16"))


def test_one_of_several_variants_must_be_named(tmp_path: Path) -> None:
    for variant in ("ema", "fp16"):
        safetensors.numpy.save_file({"w": np.ones(1)}, tmp_path / f"model.{variant}.safetensors")
    with pytest.raises(
        CheckpointNotFoundError, match="model.ema.safetensors, model.fp16.safetensors. Name one of them"
    ):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize(
    ("safe", "plain"),
    [("model", "pytorch_model"), ("diffusion_pytorch_model", "diffusion_pytorch_model")],
)
@pytest.mark.parametrize("several", [False, True], ids=["one_file", "several_files"])
def test_a_plain_file_of_torch_is_preferred_to_variants(safe: str, plain: str, several: bool, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(1)}, tmp_path / f"{safe}.fp16.safetensors")
    file = f"{plain}-00001-of-00001.bin" if several else f"{plain}.bin"
    torch.save({"w": torch.zeros(1)}, tmp_path / file)
    if several:
        (tmp_path / f"{plain}.bin.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    assert ckptcore.load(tmp_path)["w"].tolist() == [0]
    assert ckptcore.load(tmp_path / f"{safe}.fp16.safetensors")["w"].tolist() == [1]


def _bfloat16(model: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).bfloat16() for name, array in _expected(_PIPELINE / model).items()}


@pytest.mark.parametrize(
    ("index", "pattern"),
    [
        ("diffusion_pytorch_model.bin.index.bf16.json", "diffusion_pytorch_model.bf16-0000{}-of-00002.bin"),
        ("diffusion_pytorch_model.bin.bf16.index.json", "diffusion_pytorch_model-0000{}-of-00002.bf16.bin"),
        ("pytorch_model.bin.index.bf16.json", "pytorch_model.bf16-0000{}-of-00002.bin"),
    ],
)
def test_a_variant_in_several_files_of_torch_loads(index: str, pattern: str, tmp_path: Path) -> None:
    state = _bfloat16("vae")
    weight_map = {name: pattern.format(1 + number % 2) for number, name in enumerate(state)}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in state if weight_map[name] == file}, tmp_path / file)
    (tmp_path / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for location in (tmp_path, tmp_path / index):
        loaded = ckptcore.load(location)
        assert loaded.keys() == state.keys()
        assert {array.dtype for array in loaded.values()} == {np.dtype(ml_dtypes.bfloat16)}
    plain = index.partition(".")[0] + ".bin"
    torch.save({"plain": torch.ones(1)}, tmp_path / plain)
    assert list(ckptcore.load(tmp_path)) == ["plain"]
    assert ckptcore.load(tmp_path / index).keys() == state.keys()


def test_a_variant_in_one_file_of_torch_loads(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.fp16.bin")
    assert ckptcore.load(tmp_path)["w"].tolist() == [1, 1]


@pytest.mark.brings("root of a pipeline of diffusers", "safetensors", "same")
def test_a_pipeline_is_several_checkpointables() -> None:
    metadata = ckptcore.metadata(_PIPELINE)
    assert metadata.is_composite
    assert list(metadata.checkpointables) == _MEMBERS
    assert metadata.writer == f"diffusers {json.loads((_GOLDEN / 'written_with.json').read_bytes())['diffusers']}"
    assert metadata.custom["model_index"] == json.loads((_PIPELINE / "model_index.json").read_bytes())
    assert metadata.checkpointables.deleted == ()
    loaded = ckptcore.load_checkpointables(_PIPELINE)
    assert list(loaded) == _MEMBERS
    for name, tree in loaded.items():
        _assert_equal(tree, _expected(_PIPELINE / name))
    report = ckptcore.verify(_PIPELINE)
    assert report.ok
    assert set(report.unverified) == {
        "text_encoder/model.safetensors",
        *(f"{name}/diffusion_pytorch_model.safetensors" for name in ("unet", "vae")),
    }


def test_a_pipeline_is_not_one_tree() -> None:
    for use in (ckptcore.load, ckptcore.open):
        with pytest.raises(CompositeCheckpointError, match=r"text_encoder, unet, vae.*load_checkpointables") as caught:
            use(_PIPELINE)
        assert list(caught.value.names) == _MEMBERS


def test_one_model_of_a_pipeline_is_restored_in_place() -> None:
    expected = _expected(_PIPELINE / "vae")
    target = {name: torch.zeros(array.shape) for name, array in expected.items()}
    ckptcore.load_checkpointables(_PIPELINE, into={"vae": target})
    _assert_equal({name: tensor.numpy() for name, tensor in target.items()}, expected)


def test_single_files_next_to_a_pipeline_are_ignored(tmp_path: Path) -> None:
    """Some repositories also have the whole model in one file, such as flux1-dev.safetensors."""
    shutil.copytree(_PIPELINE, tmp_path, dirs_exist_ok=True)
    safetensors.numpy.save_file({"w": np.ones(1)}, tmp_path / "flux1-dev.safetensors")
    assert list(ckptcore.metadata(tmp_path).checkpointables) == _MEMBERS
    with pytest.raises(CompositeCheckpointError, match="load_checkpointables"):
        ckptcore.load(tmp_path)
    assert ckptcore.load(tmp_path / "flux1-dev.safetensors")["w"].tolist() == [1]


def test_the_other_models_load_if_one_is_damaged(tmp_path: Path) -> None:
    shutil.copytree(_PIPELINE, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    metadata = ckptcore.metadata(tmp_path)
    assert list(metadata.checkpointables) == ["text_encoder", "unet"]
    assert "cut off" in metadata.checkpointables.unreadable["vae"]
    report = ckptcore.verify(tmp_path)
    assert [problem.key for problem in report.problems] == ["vae/diffusion_pytorch_model.safetensors"]
    assert list(ckptcore.load_checkpointables(tmp_path, ["unet"])) == ["unet"]
    with pytest.raises(CorruptCheckpointError, match="cut off"):
        ckptcore.load_checkpointables(tmp_path)


def test_missing_models_are_no_members(tmp_path: Path) -> None:
    shutil.copytree(_PIPELINE, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "unet")
    shutil.rmtree(tmp_path / "text_encoder")
    assert list(ckptcore.metadata(tmp_path).checkpointables) == ["vae"]
    assert list(ckptcore.load_checkpointables(tmp_path)) == ["vae"]
    shutil.rmtree(tmp_path / "vae")
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", '{"a": 1, "a": 2}', '{"a": ' * 70 + "1" + "}" * 70])
def test_a_damaged_list_of_models_is_an_error(index: str, tmp_path: Path) -> None:
    shutil.copytree(_PIPELINE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(CorruptCheckpointError, match="model_index.json"):
        ckptcore.load_checkpointables(tmp_path)
    assert ckptcore.load(tmp_path / "vae")


@pytest.mark.parametrize("name", ["..", "a/b", ".", "", "/etc"])
def test_names_outside_of_a_pipeline_are_no_members(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "pipeline"
    shutil.copytree(_PIPELINE, directory)
    safetensors.numpy.save_file({"w": np.ones(1)}, tmp_path / "model.safetensors")
    index = json.loads((directory / "model_index.json").read_bytes())
    (directory / "model_index.json").write_text(json.dumps({**index, name: ["diffusers", "Model"]}))
    assert list(ckptcore.metadata(directory).checkpointables) == _MEMBERS
