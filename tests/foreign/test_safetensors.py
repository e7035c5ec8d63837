"""Files written by ckptcore load in safetensors and Hugging Face tools, and the reverse, bit for bit."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

TORCH_DTYPES = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    made = {}
    for dtype in TORCH_DTYPES:
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (16 * dtype.itemsize,), dtype=torch.uint8)
        made[f"layer.{str(dtype)[6:]}"] = bits.view(dtype).reshape(4, 4)
    return {**made, "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}


def test_safetensors_reads_files_of_ckptcore(tmp_path: Path) -> None:
    state = tensors()
    ckptcore.save(tmp_path / "c", state)
    loaded = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert loaded.keys() == state.keys()
    assert all(same_value(loaded[name], state[name]) for name in state)
    with safetensors.safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"__ckptcore__": "1", "format": "pt"}  # Hugging Face loaders require the format


def test_ckptcore_reads_files_of_safetensors(tmp_path: Path) -> None:
    state = tensors()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"by": "somebody"})
    for location in (tmp_path, tmp_path / "model.safetensors"):
        loaded = ckptcore.load(location, state)
        assert all(same_value(loaded[name], state[name]) for name in state)
        metadata = ckptcore.metadata(location)
        assert (
            metadata.layout == "safetensors"
            and metadata.writer == "safetensors"
            and metadata.custom == {"by": "somebody"}
        )
        plain = ckptcore.load(location)
        assert plain["layer.bfloat16"].dtype == ml_dtypes.bfloat16
        report = ckptcore.verify(location)
        assert report.ok and report.unverified == ("model.safetensors",)


def test_dtypes_that_safetensors_lacks_are_stored_as_bytes(tmp_path: Path) -> None:
    tree = {
        "z": np.array([1 + 2j, 3]),
        "i": np.array([-1, 7], ml_dtypes.int4),
        "f": np.array([1, 2], ml_dtypes.float8_e3m4),
        "t": np.array(["2024-01-01"], "M8[D]"),
    }
    ckptcore.save(tmp_path / "c", tree)
    seen = safetensors.numpy.load_file(tmp_path / "c" / "model.safetensors")
    assert seen["z"].dtype == np.uint8 and seen["z"].shape == (2, 16) and seen["z"].tobytes() == tree["z"].tobytes()
    assert seen["i"].shape == (2,) and seen["f"].shape == (2,)
    assert seen["t"].dtype == np.int64 and seen["t"].view("M8[D]") == tree["t"]
    loaded = ckptcore.load(tmp_path / "c")
    assert all(
        loaded[name].dtype == tree[name].dtype and loaded[name].tobytes() == tree[name].tobytes() for name in tree
    )


def test_nested_trees_have_dotted_names(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"encoder": {"layer": [{"w": np.ones(2)}, {"w": np.zeros(2)}]}, "step": 3})
    assert set(safetensors.numpy.load_file(tmp_path / "c" / "model.safetensors")) == {
        "encoder.layer.0.w",
        "encoder.layer.1.w",
    }


def test_a_foreign_flat_checkpoint_loads_into_a_nested_tree(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"encoder.layer.0.w": np.ones(2), "bias": np.zeros(1)}, tmp_path / "x.safetensors")
    abstract = {"encoder": {"layer": [{"w": np.empty(2)}]}, "bias": np.empty(1)}
    assert ckptcore.load(tmp_path / "x.safetensors", abstract)["encoder"]["layer"][0]["w"].tolist() == [1, 1]


def test_tied_weights_have_the_names_that_save_model_gives(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    ckptcore.save(tmp_path / "c", {"a": shared, "b": shared})
    with safetensors.safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert file.keys() == ["a"] and file.metadata() == {"b": "a", "__ckptcore__": "1", "format": "pt"}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_load_model_of_safetensors_restores_ties(tmp_path: Path) -> None:
    saved, loaded = Tied(), Tied()
    ckptcore.save(tmp_path / "c", saved.state_dict())
    safetensors.torch.load_model(loaded, tmp_path / "c" / "model.safetensors")
    assert loaded.second.weight is loaded.first.weight
    assert same_value(loaded.first.weight.detach(), saved.first.weight.detach())


def test_transformers_and_ckptcore_read_shards_of_each_other(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config)
    layout = ckptcore.SafetensorsLayout(max_file_bytes=8000)
    ckptcore.save(tmp_path / "c", model.state_dict(), layout=layout)
    config.save_pretrained(tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors.index.json").exists()
    again = transformers.BertModel.from_pretrained(tmp_path / "c", local_files_only=True)
    assert all(same_value(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    for location in (tmp_path / "theirs", tmp_path / "theirs" / "model.safetensors.index.json"):
        loaded = ckptcore.load(location, model.state_dict())
        assert all(same_value(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_two_copies_of_a_tensor_load_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())["weight_map"]
    name = "pooler.dense.weight"
    other = next(file for file in sorted(set(weight_map.values())) if file < weight_map[name])
    old = safetensors.torch.load_file(tmp_path / other)
    safetensors.torch.save_file({**old, name: torch.zeros(16, 16)}, tmp_path / other, {"format": "pt"})
    theirs = transformers.BertModel.from_pretrained(tmp_path, local_files_only=True).state_dict()
    ours = ckptcore.load(tmp_path, model.state_dict())
    assert torch.equal(ours[name], model.state_dict()[name])
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_shards_without_an_index_are_joined_by_their_names(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CorruptCheckpointError, match="expected 2 safetensors shards that belong together, found 1"):
        ckptcore.load(tmp_path)
    safetensors.numpy.save_file({"b": np.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    assert set(ckptcore.load(tmp_path)) == {"a", "b"}


def test_one_of_several_unrelated_files_must_be_named(tmp_path: Path) -> None:
    for name in ("text_encoder", "vae"):
        safetensors.numpy.save_file({"w": np.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="Name one of them"):
        ckptcore.load(tmp_path)
    assert ckptcore.load(tmp_path / "vae.safetensors")["w"].tolist() == [1]


def header(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def file_of(described: Any, data: bytes = b"\0" * 8, *, length: int | None = None) -> bytes:
    encoded = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "seven bytes": lambda: b"\0" * 7,
    "huge header": lambda: file_of(header(), length=1 << 62),
    "header past the end": lambda: file_of(header(), length=1000),
    "not json": lambda: file_of(b"{nonsense"),
    "a list": lambda: file_of([1]),
    "deep": lambda: file_of(b"[" * 100_000 + b"]" * 100_000),
    "twice": lambda: file_of(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":0}'),
    "no dtype": lambda: file_of({"w": {"shape": [2], "data_offsets": [0, 8]}}),
    "dtype of another sort": lambda: file_of(header(dtype=[])),
    "negative": lambda: file_of(header(shape=[-2])),
    "huge shape": lambda: file_of(header(shape=[1 << 60, 1 << 60])),
    "shape of floats": lambda: file_of(header(shape=[2.0])),
    "shape of bools": lambda: file_of(header(shape=[True, 2])),
    "offsets reversed": lambda: file_of(header(data_offsets=[8, 0])),
    "offsets past the end": lambda: file_of(header(data_offsets=[8, 16])),
    "cut off": lambda: file_of(header(), b"\0" * 7),
    "appended": lambda: file_of(header(), b"\0" * 9),
    "overlap": lambda: file_of({**header(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
    "hole": lambda: file_of({**header(), "v": {"dtype": "F32", "shape": [1], "data_offsets": [9, 13]}}, b"\0" * 13),
    "metadata of numbers": lambda: file_of({**header(), "__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[name]())
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map":[]}',
        b'{"weight_map":{"w":5}}',
        b'{"weight_map":{"w":"../secret.safetensors"}}',
        b'{"weight_map":{"w":"/etc/passwd"}}',
        b'{"weight_map":{"w":"absent.safetensors"}}',
        b'{"weight_map":{"v":"a.safetensors"}}',
    ],
)
def test_hostile_indexes_are_refused(index: bytes, tmp_path: Path) -> None:
    directory = tmp_path / "inner"
    directory.mkdir()
    for place in (directory / "a.safetensors", tmp_path / "secret.safetensors"):
        safetensors.numpy.save_file({"w": np.ones(1)}, place)
    (directory / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError):
        ckptcore.load(directory)
