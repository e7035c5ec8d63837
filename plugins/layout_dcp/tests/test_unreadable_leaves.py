"""Files of ``torch.save`` and DCP in which some leaves have no array representation. The other leaves load."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore import PLACEHOLDER, select
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import UNREADABLE


def _cycle() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["itself"] = {"again": state}
    return state


def _with_warnings_ignored(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about prototypes and deprecated kinds of tensors
            return make()

    return made


_LEAVES: dict[str, Callable[[], Any]] = {
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "expanded": lambda: torch.ones(1).expand(1 << 30),
}


def _save(value: Any, location: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, location)


def _state(name: str) -> dict[str, Any]:
    return {"w": torch.arange(3.0), "odd": _with_warnings_ignored(_LEAVES[name])(), "list": [1, torch.ones(2)]}


@pytest.mark.parametrize("name", _LEAVES)
def test_other_leaves_can_be_loaded(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    _save(_state(name), path)
    loaded = ckptcore.load(path, {"w": torch.empty(3), "odd": PLACEHOLDER, "list": [0, PLACEHOLDER]})
    assert torch.equal(loaded["w"], torch.arange(3.0))
    assert loaded["list"][0] == 1
    loaded = ckptcore.load(path, ckptcore.metadata(path).abstract)
    np.testing.assert_array_equal(loaded["list"][1], np.ones(2))
    assert loaded["odd"] is PLACEHOLDER
    with ckptcore.open(path) as checkpoint:
        assert checkpoint["w"][1] == 1
        with pytest.raises(UnsupportedLeafError, match=r"odd: it cannot be loaded, because it was saved as a"):
            checkpoint["odd"]
    contents = ckptcore.metadata(path).tree
    assert contents is not None
    assert [record.kind for record in contents.leaves].count(UNREADABLE) == 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.brings(f"file of `torch.save` with a tensor: {name}", "torch", "refused"))
        for name in _LEAVES
    ],
)
def test_a_requested_leaf_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    _save(_state(name), path)
    with pytest.raises(UnsupportedLeafError, match="odd: it cannot be loaded"):
        ckptcore.load(path)
    target = {"w": torch.zeros(3), "odd": torch.zeros(3), "list": [0, torch.zeros(2)]}
    with pytest.raises(TreeMismatchError, match="odd: kind: the stored leaf cannot be loaded: a"):
        ckptcore.load_into(path, target)
    assert not target["w"].any()
    with pytest.raises(UnsupportedLeafError, match=r"odd cannot be copied.*transforms=\[.*Drop\('odd'\)\]") as caught:
        ckptcore.copy(path, tmp_path / "copy", layout="dcp")
    assert not (tmp_path / "copy").exists()
    transforms = eval(str(caught.value).partition("transforms=")[2].partition("). Nothing")[0], {"ckptcore": ckptcore})
    ckptcore.copy(path, tmp_path / "copy", layout="dcp", transforms=[*transforms, ckptcore.transforms.Drop("list/1")])
    assert list(ckptcore.load(tmp_path / "copy")) == ["w", "list"]


def test_the_remedy_for_a_copy_keeps_the_other_leaves(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    _save(_state("sparse"), path)
    loaded = ckptcore.load(path, ckptcore.metadata(path).abstract)
    del loaded["odd"]
    ckptcore.save(tmp_path / "copy", loaded)
    np.testing.assert_array_equal(ckptcore.load(tmp_path / "copy")["w"], np.arange(3.0))


@pytest.mark.brings("file of `torch.save` with a container that contains itself", "torch", "refused")
def test_a_cycle_closes_only_the_container_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"w": torch.ones(2), "cycle": _cycle()}, path)
    with ckptcore.open(path) as checkpoint:
        assert checkpoint["w"][0] == 1
        with pytest.raises(UnsupportedLeafError, match="cycle/itself/again: .* a container that contains itself"):
            checkpoint["cycle"]["itself"]["again"]
    loaded = ckptcore.load(path, {"w": torch.empty(2), "cycle": PLACEHOLDER})
    assert torch.equal(loaded["w"], torch.ones(2))


def test_a_container_that_occurs_twice_is_no_cycle(tmp_path: Path) -> None:
    shared = {"w": torch.ones(2)}
    torch.save({"a": shared, "b": [shared, shared]}, tmp_path / "state.pt")
    loaded = ckptcore.load(tmp_path / "state.pt")
    assert [list(loaded["a"]), [list(child) for child in loaded["b"]]] == [["w"], [["w"], ["w"]]]


class _Loader:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.brings("object whose stored state has a sparse tensor, in a file of `torch.save`", "torch", "refused")
def test_an_object_gets_no_placeholder_in_its_state(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    _save({"w": torch.ones(2), "loader": {"seen": 3, "odd": torch.eye(3).to_sparse()}}, path)
    loader = _Loader()
    with pytest.raises(UnsupportedLeafError, match="loader/odd cannot be loaded, .* stored state at loader"):
        ckptcore.load_into(path, {"w": torch.zeros(2), "loader": loader})
    assert loader.state == {"seen": 0}
    target = {"w": torch.zeros(2), "loader": PLACEHOLDER}
    ckptcore.load_into(path, target)
    assert target["w"].all()


def test_values_of_dcp(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"w": torch.ones(2), "n": 3, "odd": SimpleNamespace(tensor=torch.eye(3).to_sparse())},
            checkpoint_id=tmp_path / "c",
        )
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert checkpoint["n"] == 3
        assert checkpoint["w"][0] == 1
    with pytest.raises(UnsupportedLeafError, match="odd.* a sparse tensor"):
        ckptcore.load(tmp_path / "c")


@pytest.mark.parametrize("name", _LEAVES)
def test_an_index_of_several_files(name: str, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1-of-2.bin")
    _save({"odd": _with_warnings_ignored(_LEAVES[name])(), "c": torch.ones(3)}, tmp_path / "pytorch_model-2-of-2.bin")
    files = {"a": "pytorch_model-1-of-2.bin", "odd": "pytorch_model-2-of-2.bin", "c": "pytorch_model-2-of-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    loaded = ckptcore.load(tmp_path, {"a": torch.empty(2), "odd": PLACEHOLDER, "c": torch.empty(3)})
    assert torch.equal(loaded["c"], torch.ones(3))
    with pytest.raises(UnsupportedLeafError, match="odd: it cannot be loaded, because it was saved as a"):
        ckptcore.load(tmp_path)


_MISSING = {
    "file": ("gone.bin", "lists 'lost' in gone.bin, which does not exist: restore gone.bin"),
    "tensor": ("second.bin", "lists 'lost' in second.bin, which does not have it: restore second.bin"),
    "value": ("value.bin", "lists 'lost' in value.bin, which does not have it"),
    "file of text": ("text.bin", "lists 'lost' in text.bin, which is not a file of torch.save"),
    "cut off file": ("cut.bin", "lists 'lost' in cut.bin, which cannot be read"),
}


@pytest.mark.parametrize("name", _MISSING)
def test_an_index_with_invalid_entries(name: str, tmp_path: Path) -> None:
    file, message = _MISSING[name]
    torch.save({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "first.bin")
    torch.save({"b": torch.ones(2)}, tmp_path / "second.bin")
    torch.save({"lost": 3}, tmp_path / "value.bin")
    (tmp_path / "text.bin").write_text("text")
    torch.save({"lost": torch.ones(2)}, tmp_path / "cut.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-50])
    weight_map = {"a": "first.bin", "lost": file, "b": "second.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for location in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        with ckptcore.open(location) as checkpoint:
            assert checkpoint["b"][0] == 1
            with pytest.raises(CorruptCheckpointError, match=f"lost: it cannot be loaded, because .*{message}"):
                checkpoint["lost"]
        assert ckptcore.metadata(location).unused == {"first.bin": ["b"]}
    loaded = ckptcore.load(tmp_path, {"a": torch.empty(2), "b": torch.empty(2), "lost": PLACEHOLDER})
    assert torch.equal(loaded["b"], torch.ones(2))
    assert ckptcore.load(tmp_path, select=~select.names("lost")).keys() == {"a", "b"}
    with pytest.raises(CorruptCheckpointError, match=message):
        ckptcore.load(tmp_path)
    with pytest.raises(CorruptCheckpointError, match=message):
        ckptcore.load(tmp_path, dict.fromkeys(weight_map, torch.empty(2)))
    (problem,) = ckptcore.verify(tmp_path).problems
    assert (problem.key, problem.arrays) == (file, ("lost",))


@pytest.mark.brings("`torch.save` file without one storage", "torch", "refused")
def test_a_file_without_the_elements_of_one_tensor(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "lost": torch.zeros(3)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "state.pt", "w") as part:
        for name in whole.namelist():
            if not name.endswith("data/1"):
                part.writestr(name, whole.read(name))
    with ckptcore.open(tmp_path / "state.pt") as checkpoint:
        assert checkpoint["w"][0] == 1
        with pytest.raises(CorruptCheckpointError, match="lost.* has no elements: the storage '1' is missing"):
            checkpoint["lost"]
    assert [problem.arrays for problem in ckptcore.verify(tmp_path / "state.pt").problems] == [("lost",)]


def _save_in_files(directory: Path, **entries: Any) -> dict[str, Path]:
    """Save with DCP, one item in each file. Return the file of each entry."""
    writer = dcp.FileSystemWriter(directory, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.arange(3.0), "n": 3, **entries}, storage_writer=writer)
        stored = dcp.FileSystemReader(directory).read_metadata().storage_data
    return {index.fqn: directory / info.relative_path for index, info in stored.items()}


def _assert_others_are_readable(
    directory: Path, error: type[Exception], message: str, *, names: set[str], damaged: bool
) -> None:
    with ckptcore.open(directory) as checkpoint:
        assert checkpoint["a"][2] == 2
        assert set(checkpoint) == {*names, "lost"}
    assert ckptcore.metadata(directory).tree is not None
    assert ckptcore.load(directory, select=~select.names("lost")).keys() == names
    with pytest.raises(error, match=message):
        ckptcore.load(directory)
    report = ckptcore.verify(directory)
    assert report.ok is not damaged
    assert report.unsupported == (() if damaged else ("lost",))


def test_an_unsupported_dtype_in_dcp(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a prototype
        lost = torch.ones(2, dtype=torch.complex32)
    _save_in_files(tmp_path, lost=lost)
    _assert_others_are_readable(
        tmp_path, UnsupportedLeafError, "lost: .*dtype torch.complex32", names={"a", "n"}, damaged=False
    )


@pytest.mark.parametrize("lost", [torch.ones(2), 5], ids=["tensor", "value"])
@pytest.mark.parametrize("damage", ["missing", "cut off", "zeros"])
@pytest.mark.brings("damaged item of DCP", "torch", "refused")
def test_an_item_of_dcp_that_is_damaged(lost: object, damage: str, tmp_path: Path) -> None:
    file = _save_in_files(tmp_path, lost=lost)["lost"]
    data = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(data[:-20] if damage == "cut off" else bytes(len(data)))
    _assert_others_are_readable(tmp_path, CorruptCheckpointError, file.name, names={"a", "n"}, damaged=True)


def test_a_value_of_dcp_without_an_item(tmp_path: Path) -> None:
    _save_in_files(tmp_path, lost=5)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "lost")]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    message = "lost: .*lists no file for the value 'lost'"
    _assert_others_are_readable(tmp_path, CorruptCheckpointError, message, names={"a", "n"}, damaged=True)


def test_ranks_that_disagree_about_an_entry(tmp_path: Path) -> None:
    _save_in_files(tmp_path, lost=torch.ones(2))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (tmp_path / ".metadata").unlink()
    for rank in range(2):
        metadata.state_dict_metadata["lost"].size = torch.Size((2 + rank,))
        (tmp_path / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
    message = "lost: .*the processes saved different states"
    _assert_others_are_readable(tmp_path, CorruptCheckpointError, message, names={"a", "n"}, damaged=True)


def _change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:stop])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[stop:])


def _save_shards(directory: Path, state: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True))


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageWriter"), reason="PyTorch before 2.8 writes no such files")
def test_shards_of_dcp_with_an_unsupported_dtype(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0), "lost": torch.ones(2, dtype=torch.uint8)}
    _save_shards(tmp_path, state)
    (path,) = tmp_path.glob("shard-*.safetensors")
    _change_header(path, lambda header: header["lost"].update(dtype="F6_E2M3"))
    _assert_others_are_readable(
        tmp_path, UnsupportedLeafError, "'lost' .* has the dtype 'F6_E2M3'", names={"a"}, damaged=False
    )


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageWriter"), reason="PyTorch before 2.8 writes no such files")
def test_shards_of_dcp_with_different_dtypes(tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.int32, torch.float32), start=1):
        state = {"a": torch.arange(3.0), "lost": torch.ones(2, dtype=dtype)}
        _save_shards(tmp_path / "save", state)
        (path,) = (tmp_path / "save").glob("shard-*.safetensors")
        path.rename(tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors")
    shutil.rmtree(tmp_path / "save")
    message = "lost: .*the shards of the tensor 'lost' have different dtypes"
    _assert_others_are_readable(tmp_path, CorruptCheckpointError, message, names={"a"}, damaged=True)
