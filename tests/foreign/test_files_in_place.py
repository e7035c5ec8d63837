"""Pointers of Git LFS, web pages and empty files in place of files of a checkpoint."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.model.file_kinds import FILE_HEAD_BYTES, file_kind

STATE: dict[str, np.ndarray[Any, Any]] = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(3, dtype=np.int64),
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 67108864\n"
IN_PLACE = {
    "a pointer of Git LFS": POINTER,
    "a page of HTML": b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n",
    "is empty": b"",
}


def write_own(to: Path) -> None:
    ckptcore.save(to, STATE, layout="safetensors")


def write_safetensors(to: Path) -> None:
    from safetensors.numpy import save_file

    to.mkdir()
    for number, name in enumerate(STATE, 1):
        save_file({name: STATE[name]}, to / f"model-0000{number}-of-00002.safetensors")
    names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(STATE, 1)}
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def write_torch(to: Path) -> None:
    import torch

    to.mkdir()
    for number, (name, array) in enumerate(STATE.items(), 1):
        torch.save({name: torch.from_numpy(array)}, to / f"pytorch_model-0000{number}-of-00002.bin")
    names = {name: f"pytorch_model-0000{number}-of-00002.bin" for number, name in enumerate(STATE, 1)}
    (to / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def write_dcp(to: Path) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    save({name: torch.from_numpy(array) for name, array in STATE.items()}, checkpoint_id=to, no_dist=True)


def write_orbax(to: Path, *, ocdbt: bool) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        checkpointer.save(to, args=ocp.args.PyTreeSave(STATE))


def write_ocdbt(to: Path) -> None:
    write_orbax(to, ocdbt=True)


def write_zarr(to: Path) -> None:
    write_orbax(to, ocdbt=False)


def write_flax(to: Path) -> None:
    from flax.serialization import to_bytes

    to.mkdir()
    (to / "params.msgpack").write_bytes(to_bytes(STATE))


def load(location: Path) -> None:
    """Load the whole checkpoint. A file of Flax is loaded by its own path."""
    file = location / "params.msgpack"
    ckptcore.load(file if file.exists() else location)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("write", "optional"),
    [
        (write_own, ()),
        (write_safetensors, ()),
        (write_torch, ()),
        (write_dcp, ()),
        (write_ocdbt, ("_CHECKPOINT_METADATA", "commit_success.txt", "ocdbt.process_0/")),
        (write_zarr, ("_CHECKPOINT_METADATA", "commit_success.txt")),
        (write_flax, ()),
    ],
)
def test_the_error_names_the_kind_of_file_in_place_of_the_expected_one(
    tmp_path: Path, write: Callable[[Path], None], optional: Sequence[str]
) -> None:
    write(tmp_path / "whole")
    load(tmp_path / "whole")
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    unnamed = []
    for file in files:
        for noun, content in IN_PLACE.items():
            shutil.copytree(tmp_path / "whole", tmp_path / "copy")
            (tmp_path / "copy" / file).write_bytes(content)
            try:
                load(tmp_path / "copy")
            except CheckpointError as error:
                if noun not in str(error) or (content == POINTER and "git lfs pull" not in str(error)):
                    unnamed.append(f"{file}, which {noun}: {error}")
            else:
                if not file.as_posix().startswith(tuple(optional)):
                    unnamed.append(f"{file}, which {noun}, was loaded")
            shutil.rmtree(tmp_path / "copy")
    assert unnamed == []


def test_a_damaged_safetensors_file_with_another_name_is_recognized(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(STATE, tmp_path / "whole.bin")
    np.testing.assert_equal(ckptcore.load(tmp_path / "whole.bin"), STATE)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "whole.bin").read_bytes()[:40])
    with pytest.raises(CheckpointError, match="a safetensors file that is cut off or damaged: restore it"):
        ckptcore.load(tmp_path / "cut.bin")


def test_the_error_about_a_directory_names_the_kinds_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Trained on Monday.")
    (tmp_path / "weights.gguf2").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"\(weights.gguf2 is a GGUF file of llama.cpp"):
        ckptcore.load(tmp_path)
    (tmp_path / "weights.gguf2").unlink()
    with pytest.raises(CheckpointError, match=r"\(notes.txt is a text: load the directory"):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize("value", [STATE, [1, 2], STATE["w"]])
def test_a_pickle_of_protocol_0_is_recognized(tmp_path: Path, value: object) -> None:
    kind = file_kind(pickle.dumps(value, 0)[:FILE_HEAD_BYTES], "state")
    assert kind is not None
    assert kind.noun.startswith("a pickle of Python")
