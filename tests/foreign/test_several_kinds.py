"""Directories with weights in several formats: the one that is read, the list of others, and how to choose."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from ckptcore_testing.commands import runner
from ckptcore_tools.cli.application import application
from safetensors.numpy import save_file

import ckptcore
from ckptcore.errors import CheckpointNotFoundError

_PLUGINS: Final = Path(__file__).parents[2] / "plugins"
_ORBAX: Final = _PLUGINS / "layout_orbax" / "tests" / "golden" / "v1_default"
_DCP_APART: Final = _PLUGINS / "layout_dcp" / "tests" / "golden" / "two_processes_apart"
_ZERO: Final = _PLUGINS / "formats" / "tests" / "golden" / "deepspeed" / "zero2_bf16"


def _safetensors(directory: Path) -> None:
    save_file({"w": np.full(3, 1.0)}, directory / "model.safetensors")


def _torch(directory: Path, name: str = "pytorch_model.bin") -> None:
    torch.save({"w": torch.full((3,), 2.0)}, directory / name)


def _hdf5(directory: Path) -> None:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(directory / "tf_model.h5", "w") as file:
        file["w"] = np.full(3, 3.0)


def _flax(directory: Path) -> None:
    from flax.serialization import to_bytes

    (directory / "flax_model.msgpack").write_bytes(to_bytes({"w": np.full(3, 4.0)}))


def _dcp(directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it runs in a single process
        torch.distributed.checkpoint.save(  # type: ignore[attr-defined]  # torch does not export it
            {"w": torch.full((3,), 5.0)}, checkpoint_id=directory, no_dist=True
        )


def _gguf(directory: Path) -> None:
    (directory / "model.gguf").write_bytes(b"GGUF" + bytes(60))


def _orbax(directory: Path) -> None:
    shutil.copytree(_ORBAX, directory, dirs_exist_ok=True)


def _zero(directory: Path) -> None:
    shutil.copytree(_ZERO, directory, dirs_exist_ok=True)


def _pickle(directory: Path) -> None:
    (directory / "params.pkl").write_bytes(pickle.dumps({"w": np.full(3, 6.0)}))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return an empty directory."""
    (tmp_path / "c").mkdir()
    return tmp_path / "c"


def _inspect(directory: Path, *options: str) -> str:
    return runner().invoke(application, ["inspect", str(directory), *options]).output


@pytest.mark.parametrize(
    ("write", "value", "others"),
    [
        (
            [_safetensors, _torch, _hdf5, _flax, _gguf],
            1.0,
            ["flax_model.msgpack", "model.gguf", "pytorch_model.bin", "tf_model.h5"],
        ),
        ([_torch, _hdf5, _flax], 2.0, ["flax_model.msgpack", "tf_model.h5"]),
        ([_dcp, _safetensors], 5.0, ["model.safetensors"]),
    ],
)
def test_the_preferred_format_is_read_and_the_others_are_listed(
    write: list[Callable[[Path], None]], value: float, others: list[str], place: Path
) -> None:
    """The order is that of transformers: safetensors first."""
    for each in write:
        each(place)
    assert np.asarray(ckptcore.load(place, framework="numpy")["w"]).tolist() == [value] * 3
    document = json.loads(_inspect(place, "--json"))
    assert document["other_weights"] == others and "left_out" not in document
    text = _inspect(place)
    assert all(re.search(rf"also here +{name}: weights in another format", text) for name in others)
    assert np.asarray(ckptcore.load(place / others[-1], framework="numpy")["w"]).tolist() != [value] * 3
    ckptcore.copy(place, place.parent / "copy", layout="safetensors")


def test_a_file_of_training_state_is_not_listed_as_other_weights(place: Path) -> None:
    _dcp(place)
    _torch(place, "optimizer.pt")
    document = json.loads(_inspect(place, "--json"))
    assert document["left_out"] == ["optimizer.pt"] and "other_weights" not in document


@pytest.mark.parametrize(
    ("write", "named"),
    [
        ([_hdf5, _flax], "flax_model.msgpack; tf_model.h5: an HDF5 file"),
        ([_hdf5, _pickle], "params.pkl: a pickle of Python; tf_model.h5: an HDF5 file"),
        ([_gguf, lambda directory: _torch(directory, "a.pt")], "a.pt; model.gguf: a GGUF file of llama.cpp"),
    ],
)
def test_the_error_lists_files_of_several_kinds(write: list[Callable[[Path], None]], named: str, place: Path) -> None:
    for each in write:
        each(place)
    (place / "config.json").write_text("{}")
    for call in (ckptcore.load, ckptcore.metadata, ckptcore.verify):
        with pytest.raises(CheckpointNotFoundError) as raised:
            call(place)
        assert f"it has separate files ({named})" in str(raised.value)
    advised = str(raised.value).rpartition("such as ")[2]
    assert "w" in ckptcore.load(advised, framework="numpy")


@pytest.mark.parametrize(
    ("write", "formats"),
    [
        ([_dcp, _orbax], ["torch.distributed.checkpoint", "Orbax"]),
        ([_dcp, _zero], ["torch.distributed.checkpoint", "DeepSpeed"]),
        ([_orbax, _zero], ["Orbax", "DeepSpeed"]),
    ],
)
def test_two_checkpoints_in_one_directory_are_an_error(
    write: list[Callable[[Path], None]], formats: list[str], place: Path
) -> None:
    """The test loads the locations that the error names."""
    for each in write:
        each(place)
    copy: Callable[..., object] = ckptcore.copy
    calls: list[Callable[[], object]] = [
        lambda: ckptcore.load(place),
        lambda: ckptcore.load_checkpointables(place),
        lambda: ckptcore.metadata(place),
        lambda: ckptcore.verify(place),
        lambda: copy(place, place.parent / "copy"),
        lambda: copy(place, place.parent / "copy", layout="safetensors"),
    ]
    for call in calls:
        with pytest.raises(CheckpointNotFoundError, match=f"several formats: {', '.join(formats)}") as raised:
            call()
    advised = re.findall(rf"({re.escape(str(place))}/\S+) for", str(raised.value))
    assert len(advised) == 2
    for location in advised:
        assert ckptcore.load(location.replace("ITEM", "state"), framework="numpy")


def test_the_error_says_to_move_checkpoints_without_their_own_path(place: Path) -> None:
    """Per-rank metadata of DCP has no path to load by. The test applies the remedy that the error suggests."""
    shutil.copytree(_DCP_APART, place, dirs_exist_ok=True)
    shutil.copytree(_ORBAX.parent / "v0_pytree_plain", place, dirs_exist_ok=True)
    with pytest.raises(CheckpointNotFoundError, match=r"torch\.distributed\.checkpoint, Orbax\. Move the files of one"):
        ckptcore.load(place)
    (place.parent / "dcp").mkdir()
    for path in [*place.glob("__*.metadata"), *place.glob("*.distcp")]:
        path.rename(place.parent / "dcp" / path.name)
    assert "by_rows" in ckptcore.load(place.parent / "dcp", framework="numpy")
    assert "params" in ckptcore.load(place, framework="numpy")
