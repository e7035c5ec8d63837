"""Checkpoints of Orbax, AXLearn and Flax with one unreadable array. The other leaves can be loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

import ckptcore
from ckptcore import PLACEHOLDER, select
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError

_FORMATS: dict[str, dict[str, bool]] = {
    "ocdbt": {"use_ocdbt": True},
    "ocdbt of zarr 3": {"use_ocdbt": True, "use_zarr3": True},
    "zarr": {"use_ocdbt": False},
    "zarr3": {"use_ocdbt": False, "use_zarr3": True},
}


class _Stored(NamedTuple):
    """A checkpoint, its key-value store, and the key of the metadata of the array `lost`."""

    directory: Path
    values: Any
    key: str

    def change(self, change: Callable[[bytes], bytes | None]) -> None:
        """Change the metadata of the array. None deletes it."""
        self.put(self.key, change(self.values[self.key]))

    def put(self, key: str, value: bytes | None) -> None:
        """Replace or delete a value."""
        self.values.write(key, value).result()


@pytest.fixture(params=_FORMATS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> _Stored:
    options = _FORMATS[request.param]
    directory = tmp_path / "checkpoint"
    tree = {"a": np.arange(4.0), "b": {"c": np.ones((2, 2), np.float32)}, "lost": np.full(3, 7, np.int16), "n": 5}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(directory, tree)
    base = {"driver": "file", "path": f"{directory}/"}
    spec = {"driver": "ocdbt", "base": base} if options["use_ocdbt"] else base
    document = "zarr.json" if options.get("use_zarr3") else ".zarray"
    return _Stored(directory, tensorstore.KvStore.open(spec).result(), f"lost/{document}")


def _with_dtype(data: bytes) -> bytes:
    document = json.loads(data)
    name = "data_type" if "data_type" in document else "dtype"
    return json.dumps({**document, name: "float9" if name == "data_type" else "<f9"}).encode()


def _with_codec(data: bytes) -> bytes:
    document = json.loads(data)
    if "codecs" in document:
        return json.dumps({**document, "codecs": [*document["codecs"], {"name": "unheard"}]}).encode()
    return json.dumps({**document, "compressor": {"id": "unheard"}}).encode()


class _Case(NamedTuple):
    change: Callable[[bytes], bytes | None]
    error: type[CheckpointError]
    message: str
    damaged: bool = True


_CASES = {
    "missing": _Case(lambda _: None, CorruptCheckpointError, "lost.* its array 'lost' is missing"),
    "damaged": _Case(lambda data: data[:-1], CorruptCheckpointError, "the array metadata in lost/.* is not JSON"),
    "unknown dtype": _Case(_with_dtype, UnsupportedLeafError, "lost/.* '(float|<f)9' is not supported", damaged=False),
    "unknown codec": _Case(_with_codec, CorruptCheckpointError, "'lost' cannot be decoded: .*unheard"),
}


@pytest.mark.parametrize("name", _CASES)
def test_other_leaves_can_be_loaded(name: str, stored: _Stored) -> None:
    case = _CASES[name]
    stored.change(case.change)
    _assert_others_are_readable(stored.directory, case)


def _assert_others_are_readable(directory: Path, case: _Case) -> None:
    with ckptcore.open(directory) as view:
        assert view["a"][2] == 2
        assert view["n"] == 5
        with pytest.raises(case.error, match=case.message):
            view["lost"][:]
    metadata = ckptcore.metadata(directory)
    assert len(metadata.tree.leaves) == 4
    assert ckptcore.load(directory, select=~select.names("lost")).keys() == {"a", "b", "n"}
    abstract = {"a": np.empty(4), "b": {"c": np.empty((2, 2), np.float32)}, "lost": PLACEHOLDER, "n": 0}
    loaded = ckptcore.load(directory, abstract)
    assert (loaded["n"], loaded["b"]["c"].sum()) == (5, 4)
    with pytest.raises(case.error, match=case.message):
        ckptcore.load(directory)
    target = {"a": np.zeros(4), "b": {"c": np.zeros((2, 2), np.float32)}, "lost": np.zeros(3, np.int16), "n": 0}
    with pytest.raises(CheckpointError, match=case.message):
        ckptcore.load_into(directory, target)
    report = ckptcore.verify(directory)
    assert len(report.problems) == case.damaged
    assert report.unsupported == (() if case.damaged else ("lost",))


def test_an_array_without_stored_chunks(stored: _Stored) -> None:
    for key in stored.values.list().result():
        if key.startswith(b"lost/") and key != stored.key.encode():
            stored.put(key, None)
    _assert_others_are_readable(stored.directory, _Case(lambda _: None, CorruptCheckpointError, "missing|no chunk"))


def test_a_damaged_number(stored: _Stored) -> None:
    for key in stored.values.list().result():
        if key.startswith(b"n/") and not key.endswith((b".zarray", b"zarr.json")):
            stored.put(key, b"?")
    with ckptcore.open(stored.directory) as view:
        assert view["a"][2] == 2
        with pytest.raises(CorruptCheckpointError, match="n: it cannot be loaded"):
            view["n"]
    assert ckptcore.load(stored.directory, select=~select.names("n")).keys() == {"a", "b", "lost"}
    assert [problem.arrays for problem in ckptcore.verify(stored.directory).problems] == [("n",)]


@pytest.mark.parametrize("damage", ["missing", "other dtype"])
def test_an_unreadable_array_in_a_step_of_axlearn(damage: str, tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden" / "axlearn" / "step_00000004"
    step = tmp_path / golden.name
    shutil.copytree(golden, step)
    document = min(step.rglob(".zarray"))
    message = "is missing" if damage == "missing" else "in the tree, but stored as"
    if damage == "missing":
        document.unlink()
    else:
        document.write_text(json.dumps({**json.loads(document.read_bytes()), "dtype": "|i1"}))
    (lost,) = [problem.arrays[0] for problem in ckptcore.verify(step).problems]
    assert ckptcore.load(step, select=~select.where(lambda path, _: path == lost))
    with pytest.raises(CorruptCheckpointError, match=f"{lost}: it cannot be loaded, because .*{message}"):
        ckptcore.load(step)


def test_an_unsupported_dtype_in_a_step_of_axlearn(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden" / "axlearn" / "step_00000004"
    shutil.copytree(golden, tmp_path / golden.name)
    index = tmp_path / golden.name / "index"
    entries = json.loads(index.read_bytes())
    path, _ = next(entry for entry in entries if isinstance(entry[1], dict))
    changed = [[name, {**value, "dtype": "float9"} if name == path else value] for name, value in entries]
    index.write_text(json.dumps(changed))
    with pytest.raises(UnsupportedLeafError, match=f"{path}: it cannot be loaded, because .*float9"):
        ckptcore.load(index.parent)
    assert ckptcore.load(index.parent, select=~select.where(lambda name, _: name == path))


def test_an_unsupported_dtype_in_a_file_of_flax(tmp_path: Path) -> None:
    elements = np.arange(3, dtype=np.float32)
    entries = msgpack.unpackb(flax.serialization.msgpack_serialize({"a": elements, "b": {"n": 3}}))
    lost = msgpack.ExtType(1, msgpack.packb([[3], "float9", elements.tobytes()]))
    (tmp_path / "checkpoint").write_bytes(msgpack.packb({**entries, "lost": lost}))
    with pytest.raises(UnsupportedLeafError, match="lost: it cannot be loaded, because .*float9"):
        ckptcore.load(tmp_path)
    loaded = ckptcore.load(tmp_path, select=~select.names("lost"))
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["b"] == {"n": 3}
