"""Files and directories that no layout reads: the error says what they are, and what to do."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest
import torch

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21461\nsize 12345\n"
HTML = b"\n<!DOCTYPE html><html><body>Sign in</body></html>"


def _bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _tar(file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.pth"))


def _zip(file: io.BytesIO, name: str = "data") -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, "{}")


FILES = [
    ("pytorch_model.bin", LFS, "a pointer of Git LFS in place of the file: run `git lfs pull`"),
    ("model.safetensors", LFS, "a pointer of Git LFS in place of the file: run `git lfs pull`"),
    ("model.safetensors", HTML, "a page of HTML, such as an error or a login page: download the file again"),
    ("model.pt", HTML, "a page of HTML, such as an error or a login page: download the file again"),
    ("model.pt", b"<?xml version='1.0'?><Error/>", "an XML document, such as the error of an object store"),
    ("model.safetensors", b"", "empty: restore it from a copy, or load another one"),
    ("model.pt", b"", "empty: restore it from a copy, or load another one"),
    ("model.keras", _bytes(lambda file: _zip(file, "metadata.json")), "a model of Keras: read it with keras"),
    ("model.gguf", b"GGUF\x03\0\0\0" + bytes(90), "a GGUF file of llama.cpp: read it with the package gguf"),
    ("model.onnx", b"\x08\x07\x12\x07pytorch", "an ONNX model: read it with onnx"),
    ("model.tflite", b"\x1c\0\0\0TFL3" + bytes(90), "a TensorFlow Lite model: read it with TensorFlow"),
    (
        "policy.zip",
        _bytes(_zip),
        "a zip archive that begins with data. It has data. Load one of them by",
    ),
    ("model.tar", _bytes(_tar), "a tar archive. It has model.pth. Load one of them by its own location"),
    (
        "model.tar.gz",
        gzip.compress(_bytes(_tar)),
        "compressed by gzip. It has model.pth. Load one of them",
    ),
    ("config.json", b'{"a": 1}', "a text of JSON: load the directory or the file with the weights"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=[f"{name} {text[:20]}" for name, _, text in FILES])
def test_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        ckptcore.load(tmp_path / name)
    assert name in str(caught.value) and f"is {message}" in str(caught.value)
    assert "check the path" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["saved_model.pb", "variables/x"], "a SavedModel of TensorFlow"),
        (["model.ckpt-1.index", "model.ckpt-1.data-00000-of-00001", "checkpoint"], "a checkpoint of TensorFlow"),
        ([".zgroup", "a/.zarray"], "a zarr hierarchy without the metadata of a checkpoint"),
        (["llama-q4.gguf", "README.md"], "a directory of GGUF files of llama.cpp"),
        (["model.onnx", "model.onnx_data"], "a directory of an ONNX model"),
    ],
)
def test_the_error_says_what_a_directory_is(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"model_checkpoint_path: x")
    with pytest.raises(CheckpointNotFoundError, match=f"it is {message}"):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"model_checkpoint_path: 'x'\n", b"{}", pickle.dumps({"a": 1}), b"\x89HDF\r\n\x1a\n"]
)
def test_a_file_called_checkpoint_need_not_be_from_orbax(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(content)
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint that an installed|has separate files"):
        ckptcore.load(tmp_path)


def test_an_old_checkpoint_of_flax_loads(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(msgpack.packb({"step": 3}))
    assert ckptcore.load(tmp_path) == {"step": 3}


def test_a_shard_that_is_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    """The other shards are complete."""
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(LFS)
    weight_map = '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}}'
    (tmp_path / "pytorch_model.bin.index.json").write_text(weight_map)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.bin, which is a pointer of Git LFS"):
        ckptcore.load(tmp_path)
    assert list(ckptcore.load(tmp_path, select=ckptcore.select.names("a"))) == ["a"]
