"""Indexes of safetensors files decide which tensors are loaded. A wrong entry affects only its own tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import ckptcore
from ckptcore import PLACEHOLDER
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.model import unreadable_error
from plugins.tools.tests.cli.conftest import Run, RunJson
from plugins.tools.tests.cli.expected_documents import InspectDocument, VerifyDocument

_INDEX = "model.safetensors.index.json"
_FIRST, _SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _put(path: Path, **values: float) -> None:
    safetensors.numpy.save_file({name: np.full(2, float(value)) for name, value in values.items()}, path)


def _index(directory: Path, **weight_map: str) -> Path:
    path = directory / _INDEX
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def _values(tree: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: float(array[0]) for name, array in tree.items()}


def _shards(directory: Path) -> None:
    """Write two shards that both contain `w`, like an overlay over an older shard. The index names the second one."""
    _put(directory / _FIRST, a=1, w=2, old=3)
    _put(directory / _SECOND, b=4, w=5)
    _index(directory, a=_FIRST, b=_SECOND, w=_SECOND)


@pytest.mark.parametrize("location", ["", _INDEX])
@pytest.mark.brings("tensor in two shards, of which the index names one", "safetensors", "same")
def test_the_index_names_one_of_two_copies(location: str, tmp_path: Path) -> None:
    _shards(tmp_path)
    assert _values(ckptcore.load(tmp_path / location)) == {"a": 1, "b": 4, "w": 5}
    _index(tmp_path, a=_FIRST, b=_SECOND, w=_FIRST)
    assert _values(ckptcore.load(tmp_path / location)) == {"a": 1, "b": 4, "w": 2}
    with ckptcore.open(tmp_path / location) as checkpoint:
        assert checkpoint["w"][0] == 2


def test_copies_and_unlisted_tensors_are_shown(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    _shards(tmp_path)
    _put(tmp_path / "model-00003-of-00003.safetensors", stray=6)
    _put(tmp_path / "other.safetensors", foreign=7)
    unused = {_FIRST: ["old", "w"], "model-00003-of-00003.safetensors": ["stray"]}
    assert ckptcore.metadata(tmp_path).unused == unused
    report = ckptcore.verify(tmp_path)
    assert report.ok
    assert report.unused == unused
    for command, kind in (("inspect", InspectDocument), ("verify", VerifyDocument)):
        code, document = run_json(kind, command, tmp_path)
        assert (code, document["unused"]) == (0, unused)
        assert f"{_FIRST}: old, w" in run(command, tmp_path).stdout


_MISSING = {
    "tensor": (_SECOND, f"lists 'lost' in {_SECOND}, which does not have it: restore {_SECOND}"),
    "tensor of another shard": (_SECOND, f"or correct {_INDEX}, if the copy in {_FIRST} is meant"),
    "shard": ("gone.safetensors", "lists 'lost' in gone.safetensors, which does not exist: restore gone.safetensors"),
    "damaged shard": ("cut.safetensors", "lists 'lost' in cut.safetensors, which is damaged: .* cut off"),
}


@pytest.fixture(params=_MISSING)
def with_a_missing_entry(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """Return a directory whose index lists a tensor that does not exist, the file, and the message."""
    _shards(tmp_path)
    file, message = _MISSING[request.param]
    if request.param == "tensor of another shard":
        _put(tmp_path / _FIRST, a=1, w=2, lost=9)
    if request.param == "damaged shard":
        _put(tmp_path / file, lost=1)
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-1])
    _index(tmp_path, a=_FIRST, lost=file, b=_SECOND, w=_SECOND)
    return tmp_path, file, message


def test_other_entries_can_be_loaded(with_a_missing_entry: tuple[Path, str, str]) -> None:
    directory, _, message = with_a_missing_entry
    tree = ckptcore.metadata(directory).tree
    assert tree is not None
    (error,) = filter(None, map(unreadable_error, tree.leaves))
    assert isinstance(error, CorruptCheckpointError)
    with ckptcore.open(directory) as checkpoint:
        assert checkpoint["w"][0] == 5
        with pytest.raises(CorruptCheckpointError, match=f"lost: it cannot be loaded, because .*{message}"):
            checkpoint["lost"]
    others = {"a": 1.0, "b": 4.0, "w": 5.0}
    assert _values(ckptcore.load(directory, select=~ckptcore.select.names("lost"))) == others
    abstract = {"a": np.empty(2), "b": np.empty(2), "w": np.empty(2), "lost": PLACEHOLDER}
    loaded = ckptcore.load(directory, abstract)
    assert loaded.pop("lost") is PLACEHOLDER
    assert _values(loaded) == others
    assert ckptcore.load(directory, ckptcore.metadata(directory).abstract)["lost"] is PLACEHOLDER
    target = {"a": np.zeros(2), "b": np.zeros(2), "w": np.zeros(2)}
    ckptcore.load_into(directory, target, select=~ckptcore.select.names("lost"))
    assert _values(target) == others


@pytest.mark.brings("entry of an index that does not exist", "safetensors", "refused")
def test_a_missing_entry_is_an_error_when_it_is_requested(
    with_a_missing_entry: tuple[Path, str, str], run: Run
) -> None:
    directory, file, message = with_a_missing_entry
    with pytest.raises(CorruptCheckpointError, match=f"lost.*{message}"):
        ckptcore.load(directory)
    target = {name: np.zeros(2) for name in ("a", "b", "w", "lost")}
    with pytest.raises(CorruptCheckpointError, match=f"lost.*{message}"):
        ckptcore.load_into(directory, target)
    assert not target["a"].any()
    with pytest.raises(CorruptCheckpointError, match=f"lost cannot be copied, because .*{message}"):
        ckptcore.copy(directory, directory / "copy", layout="safetensors")
    ckptcore.copy(directory, directory / "copy", layout="dcp", transforms=[ckptcore.transforms.Drop("lost")])
    assert sorted(ckptcore.load(directory / "copy")) == ["a", "b", "w"]
    ckptcore.delete(directory / "copy")
    report = ckptcore.verify(directory)
    (problem,) = report.problems
    assert (problem.key, problem.arrays) == (file, ("lost",))
    shown = run("inspect", directory)
    assert shown.exit_code == 0
    assert "unreadable" in shown.stdout


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "w"):
            setattr(self, name, torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)))


def test_a_module_is_filled_from_the_selected_entries(with_a_missing_entry: tuple[Path, str, str]) -> None:
    directory, _, _ = with_a_missing_entry
    model = _Model()
    with pytest.raises(CheckpointError, match="lost"):
        ckptcore.load_into(directory, model)
    ckptcore.load_into(directory, model, select=~ckptcore.select.names("lost"))
    assert {name: parameter[0].item() for name, parameter in model.named_parameters()} == {"a": 1, "b": 4, "w": 5}


def test_a_single_file_is_used_if_the_files_of_the_index_are_missing(tmp_path: Path) -> None:
    _index(tmp_path, a=_FIRST, b=_SECOND)
    _put(tmp_path / "model.safetensors", a=1, b=2)
    assert _values(ckptcore.load(tmp_path)) == {"a": 1, "b": 2}
    _put(tmp_path / _FIRST, a=3)
    with ckptcore.open(tmp_path) as checkpoint:
        assert checkpoint["a"][0] == 3
        with pytest.raises(CorruptCheckpointError, match=f"lists 'b' in {_SECOND}, which does not exist"):
            checkpoint["b"]


def test_a_name_in_two_shards_without_an_index_is_an_error(tmp_path: Path) -> None:
    _shards(tmp_path)
    (tmp_path / _INDEX).unlink()
    with ckptcore.open(tmp_path) as checkpoint:
        assert checkpoint["b"][0] == 4
        with pytest.raises(
            CorruptCheckpointError, match=f"'w' is both in {_FIRST} and in {_SECOND}, and no index says"
        ):
            checkpoint["w"]
    assert _values(ckptcore.load(tmp_path / _FIRST)) == {"a": 1, "w": 2, "old": 3}


@pytest.mark.parametrize("dtype", ["", "F 33", "?", "F32\n"])
def test_an_invalid_name_of_a_dtype_affects_only_its_tensor(dtype: str, tmp_path: Path) -> None:
    # torchtitan wrote an entry with the dtype "" and the shape [] (pytorch/torchtitan pull request 3764).
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "odd": {"dtype": dtype, "shape": [], "data_offsets": [8, 8]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    encoded = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + np.arange(3, dtype=np.float32).tobytes())
    with ckptcore.open(path) as checkpoint:
        assert checkpoint["b"][0] == 2
        with pytest.raises(CorruptCheckpointError, match="describes 'odd' with dtype .* and shape"):
            checkpoint["odd"]
    assert ckptcore.load(path, {"a": np.empty(2, np.float32), "b": np.empty(1, np.float32), "odd": PLACEHOLDER})


@pytest.mark.brings("tensor of an unknown dtype", "safetensors", "plain form")
def test_an_unknown_dtype_is_loaded_as_bytes(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "new": {"dtype": "F3_E1M1", "shape": [8], "data_offsets": [4, 7]},
    }
    encoded = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(7))
    loaded = ckptcore.load(path)
    assert (loaded["a"].dtype, loaded["new"].dtype, loaded["new"].shape) == (np.float32, np.uint8, (3,))
