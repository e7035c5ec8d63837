"""Remedies in errors about stored files, names and replaced checkpoints. Each test follows the text of a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from ckptcore_testing import ThreadJob
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value
from safetensors.numpy import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch

import ckptcore
from ckptcore import ArrayShard, Checkpointer, CheckpointReader, Context, ShardedArray
from ckptcore.context import JobOptions
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CompositeCheckpointError
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from tests.errors.refusals import ONE, TWO, interrupted

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Return a directory with two files, and with the index that lists their tensors."""
    save_file({"a": ONE, "b": TWO}, tmp_path / FIRST)
    save_file({"c": TWO}, tmp_path / SECOND)
    _write_index(tmp_path, a=FIRST, b=FIRST, c=SECOND)
    return tmp_path


def _write_index(directory: Path, **files: str) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": files}))


WHOLE = {"a": ONE, "b": TWO, "c": TWO}


def test_a_file_that_an_index_lists_is_gone(sharded: Path) -> None:
    content = (sharded / SECOND).read_bytes()
    (sharded / SECOND).unlink()
    refused(lambda: ckptcore.load(sharded), f"restore {SECOND} from a copy, or correct {INDEX}")
    (sharded / SECOND).write_bytes(content)
    assert same_value(ckptcore.load(sharded), WHOLE)
    (sharded / SECOND).unlink()
    _write_index(sharded, a=FIRST, b=FIRST)
    assert same_value(ckptcore.load(sharded), {"a": ONE, "b": TWO})


def test_a_tensor_is_in_another_file_than_the_index_lists(sharded: Path) -> None:
    _write_index(sharded, a=FIRST, b=SECOND, c=SECOND)
    advice = f"restore {SECOND} from a copy, or correct {INDEX}, if the copy in {FIRST} is meant"
    refused(lambda: ckptcore.load(sharded), advice)
    content = (sharded / SECOND).read_bytes()
    save_file({"b": ONE, "c": TWO}, sharded / SECOND)
    assert same_value(ckptcore.load(sharded), {"a": ONE, "b": ONE, "c": TWO})
    (sharded / SECOND).write_bytes(content)
    _write_index(sharded, a=FIRST, b=FIRST, c=SECOND)
    assert same_value(ckptcore.load(sharded), WHOLE)


def test_a_configuration_that_is_too_large(tmp_path: Path) -> None:
    save_file({"w": ONE}, tmp_path / "adapter_model.safetensors")
    with (tmp_path / "adapter_config.json").open("wb") as file:
        file.truncate((1 << 24) + 1)
    refused(lambda: ckptcore.load(tmp_path), "adapter_config.json has", "Name a file of tensors to load it alone")
    assert same_value(ckptcore.load(tmp_path / "adapter_model.safetensors"), {"w": ONE})


def test_a_tensor_in_two_files_without_an_index(sharded: Path) -> None:
    save_file({"c": TWO, "a": TWO}, sharded / SECOND)
    index = (sharded / INDEX).read_text()
    (sharded / INDEX).unlink()
    advice = "load one of these files by its own location, or restore the index"
    refused(lambda: ckptcore.load(sharded), f"'a' is both in {FIRST} and in {SECOND}", advice)
    assert same_value(ckptcore.load(sharded / FIRST), {"a": ONE, "b": TWO})
    (sharded / INDEX).write_text(index)
    assert same_value(ckptcore.load(sharded), WHOLE)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name, value in (("one", ONE), ("two", TWO)):
        save_file({"w": value}, tmp_path / f"{name}.safetensors")
    text = refused(lambda: ckptcore.load(tmp_path), "Name one of them as the location", error=CheckpointNotFoundError)
    for name, value in zip(re.findall(r"\w+\.safetensors", text), (ONE, TWO), strict=True):
        assert same_value(ckptcore.load(tmp_path / name), {"w": value})


def test_a_pipeline_of_several_models(tmp_path: Path) -> None:
    for name, value in (("vae", ONE), ("unet", TWO)):
        (tmp_path / name).mkdir()
        save_file({"w": value}, tmp_path / name / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "Pipeline", "vae": ["diffusers", "Autoencoder"], "unet": ["diffusers", "UNet"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    advice = "use load_checkpointables, or load one by its own location"
    refused(lambda: ckptcore.load(tmp_path), advice, error=CompositeCheckpointError)
    loaded = ckptcore.load_checkpointables(tmp_path)
    assert {name: value["w"].tolist() for name, value in loaded.items()} == {
        "vae": ONE.tolist(),
        "unet": TWO.tolist(),
    }
    assert same_value(ckptcore.load(tmp_path / "vae"), {"w": ONE})


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
def test_slices_of_arrays_without_the_root(tmp_path: Path) -> None:
    """Without checkpoint.json, PyTorch can read the arrays."""

    def save(coordinator: Coordinator) -> None:
        rank = coordinator.rank
        half = ShardedArray((6,), "float64", [ArrayShard(Box((3 * rank,), (3 * rank + 3,)), (ONE, TWO)[rank])])
        ckptcore.save(tmp_path / "c", {"w": half}, context=Context(job=JobOptions(coordinator=coordinator)))

    ThreadJob(2).run(save)
    (file, _) = sorted((tmp_path / "c").glob("*.safetensors"))
    refused(
        lambda: ckptcore.load(file),
        "name the directory of its checkpoint as the location. Without checkpoint.json there, load the arrays alone "
        "with HuggingFaceStorageReader of torch.distributed.checkpoint",
        error=CheckpointNotFoundError,
    )
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": np.arange(6.0)})
    (tmp_path / "c" / "checkpoint.json").unlink()
    advice = "HuggingFaceStorageReader of torch.distributed.checkpoint loads the arrays alone, without checks"
    refused(lambda: ckptcore.load(tmp_path / "c"), "restore checkpoint.json from a copy", advice)
    loaded = {"w": torch.zeros(6, dtype=torch.float64)}
    load_with_torch(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path / "c")), no_dist=True)
    assert loaded["w"].tolist() == list(range(6))


def _raw(path: Path) -> None:
    ONE.tofile(path)


def _read_raw(path: Path) -> Any:
    return {"w": np.fromfile(path)}


def _directory(path: Path) -> None:
    path.mkdir()
    ONE.tofile(path / "w.raw")


@pytest.mark.parametrize(
    ("name", "write", "read", "shown"),
    [
        ("state.raw", _raw, _read_raw, f"it begins with {ONE.tobytes()[:8]!r}"),
        ("state", _directory, lambda path: _read_raw(path / "w.raw"), "it has w.raw"),
    ],
)
def test_files_of_unknown_software(
    name: str, write: Callable[[Path], None], read: Callable[[Path], Any], shown: str, tmp_path: Path
) -> None:
    """The files exist, so the text does not advise to check the path."""
    write(tmp_path / name)
    text = refused(
        lambda: ckptcore.load(tmp_path / name),
        shown,
        "Read it with the software that wrote it and pass the state to ckptcore.save, or load another location",
        error=CheckpointNotFoundError,
    )
    assert "check the path" not in text
    ckptcore.save(tmp_path / "converted", read(tmp_path / name))
    assert same_value(ckptcore.load(tmp_path / "converted"), {"w": ONE})


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_directory_around_a_group_of_zarr(zarr_format: Any, tmp_path: Path) -> None:
    """A zarr group without metadata of a checkpoint is not reported as a damaged array."""
    group = zarr.open_group(tmp_path / "run" / "data.zarr", mode="w", zarr_format=zarr_format)
    group.create_array("w", data=ONE)
    text = refused(lambda: ckptcore.load(tmp_path / "run"), "read it with zarr.open", error=CheckpointNotFoundError)
    named = re.search(r"\((\S+) is a zarr hierarchy without the metadata of a checkpoint", text)
    assert named is not None
    read: Any = zarr.open(named[1], mode="r")
    ckptcore.save(tmp_path / "converted", {"w": read["w"][:]})
    assert same_value(ckptcore.load(tmp_path / "converted"), {"w": ONE})


def test_an_empty_file_is_restored_from_a_copy(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "weights")
    content = (tmp_path / "weights").read_bytes()
    (tmp_path / "weights").write_bytes(b"")
    refused(lambda: ckptcore.load(tmp_path / "weights"), "it is empty: restore it from a copy, or load another one")
    (tmp_path / "weights").write_bytes(content)
    assert ckptcore.load(tmp_path / "weights")["w"].tolist() == [1, 1, 1]


def test_a_location_without_files(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step_10", {"w": ONE})
    text = refused(lambda: ckptcore.load(tmp_path / "step_01"), "check the path, or list its parent directory")
    assert text.startswith(f"{tmp_path}/step_01 does not exist")
    (name,) = [path.name for path in tmp_path.iterdir()]
    assert same_value(ckptcore.load(tmp_path / name), {"w": ONE})


@pytest.mark.parametrize("create", [Checkpointer, CheckpointReader])
def test_a_run_without_steps(create: Callable[[Path], Any], tmp_path: Path) -> None:
    """If a program resumes a run, a mistyped path is the likely cause."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_blocking(1, {"w": ONE})
    with create(tmp_path / "runs") as mistyped:
        refused(mistyped.load, "check the path of the run, or save a step first", error=CheckpointNotFoundError)
        if isinstance(mistyped, Checkpointer):
            mistyped.save_blocking(1, {"w": TWO})
            assert same_value(mistyped.load(), {"w": TWO})
    with create(tmp_path / "run") as right:
        assert same_value(right.load(), {"w": ONE})


# --- several checkpointables ------------------------------------------------------------------------------------------


def test_the_error_for_a_missing_name_lists_the_existing_names(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": ONE, "optimizer": TWO})
    text = refused(lambda: ckptcore.load_checkpointables(tmp_path / "c", ["modle"]), "did you mean 'model'?")
    names = text.partition("Existing names: ")[2].partition(";")[0].split(", ")
    assert same_value(ckptcore.load_checkpointables(tmp_path / "c", names), {"model": ONE, "optimizer": TWO})


def test_names_that_were_deleted(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": ONE, "optimizer": TWO, "data": 3})
    ckptcore.delete(tmp_path / "c" / "optimizer")
    text = refused(lambda: ckptcore.load_checkpointables(tmp_path / "c", ["optimizer"]), "Existing names: ")
    names = text.partition("Existing names: ")[2].split(", ")
    assert same_value(ckptcore.load_checkpointables(tmp_path / "c", names), {"model": ONE, "data": 3})


# --- checkpoints that are replaced ------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_always_replaced(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    saves = 0

    def replace() -> None:
        nonlocal saves
        saves += 1
        ckptcore.save(tmp_path / "c", {"w": ONE + saves}, overwrite=True, context=Context(durability="none"))

    context = interrupted("file", "get_into", ".safetensors", replace, times=100)
    refused(lambda: ckptcore.load(tmp_path / "c", context=context), "load it while no process saves to it")
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE + saves})


def test_another_checkpoint_that_is_replaced(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "one", {"w": ONE})
    ckptcore.save(tmp_path / "two", {"w": TWO})
    average = [ckptcore.transforms.Average([tmp_path / "two"])]

    def replace() -> None:
        ckptcore.save(tmp_path / "two", {"w": TWO + 2}, overwrite=True)

    context = interrupted("file", "get_into", "two/model.safetensors", replace)
    refused(
        lambda: ckptcore.load(tmp_path / "one", transforms=average, context=context),
        f"{tmp_path}/two was replaced while its arrays were combined with those of another checkpoint: load again",
    )
    assert same_value(ckptcore.load(tmp_path / "one", transforms=average, context=context), {"w": (ONE + TWO + 2) / 2})


# --- damage -----------------------------------------------------------------------------------------------------------


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([byte ^ 1 for byte in content[middle : middle + 1]]) + content[middle + 1 :]


def _lengthen(content: bytes) -> bytes:
    return content + b"more"


def _empty(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt", "zarr", "zarr3"])
def test_damaged_files_of_each_layout(layout: str, tmp_path: Path) -> None:
    """For each file of a checkpoint: damage, empty or remove the file, and restore it from a copy."""
    state = {"w": np.arange(2000.0), "v": TWO}
    for name in ("c", "another"):
        ckptcore.save(tmp_path / name, state, layout=layout, context=Context(durability="none"))
    refusals = []
    for file in [path for path in (tmp_path / "c").rglob("*") if path.is_file()]:
        content = file.read_bytes()
        for damage in (_cut, _flip, _lengthen, _empty, None):
            file.write_bytes(damage(content)) if damage is not None else file.unlink()
            try:
                ckptcore.load(tmp_path / "c")
            except CheckpointError as error:
                refusals.append(damage)
                assert re.search("from a copy|load another", str(error), re.IGNORECASE), error
            file.write_bytes(content)
        assert same_value(ckptcore.load(tmp_path / "c"), state)
    assert set(refusals) == {_cut, _flip, _lengthen, _empty, None}
    assert same_value(ckptcore.load(tmp_path / "another"), state)


@pytest.mark.parametrize("change", [_cut, _empty, lambda content: content.replace(b"[0,24]", b"[1,25]")])
def test_damaged_files_of_other_software(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": ONE}, file)
    content = file.read_bytes()
    file.write_bytes(change(content))
    refused(lambda: ckptcore.load(tmp_path), "restore it from a copy, or load another one")
    file.write_bytes(content)
    assert same_value(ckptcore.load(tmp_path), {"w": ONE})
