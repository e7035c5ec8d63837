"""Members of composites. Each is a checkpoint with its own location, but is valid only with its composite."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from ckptcore_testing.locations import store_at
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.commit.root import ROOT_KEY, Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, UncommittedCheckpointError
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageOptions
from tests.composites.objects import Counter, Files, Linear


def save_all(location: str, version: int = 3, **options: Any) -> None:
    objects = {"model": Linear(version), "data": Counter(version), "files": Files({"a/b": b"%d" % version})}
    ckptcore.save_checkpointables(location, objects, **options)


def replace_member(place: str, replaced: str, other: str) -> None:
    """Replace a member by another checkpoint. Copy object by object, because saves inside a checkpoint are refused."""
    target, source = (
        store_at(f"{place}/{at}" if "://" in place else f"file://{place}/{at}") for at in (replaced, other)
    )
    target.delete(list(target.list()))
    for key in source.list():
        target.put(key, source.get(key))


def test_other_software_opens_a_member(tmp_path: Path) -> None:
    save_all(str(tmp_path / "c"))
    arrays = safetensors.numpy.load_file(tmp_path / "c" / "model" / "model.safetensors")
    assert same_value(dict(sorted(arrays.items())), dict(sorted(Linear(3).get_state_tree().items())))
    assert (tmp_path / "c" / "files" / "a" / "b").read_bytes() == b"3"


def test_every_function_takes_the_location_of_a_member(place: str) -> None:
    save_all(place + "/c")
    assert same_value(ckptcore.load(place + "/c/model"), Linear(3).get_state_tree())
    model = Linear(0)
    ckptcore.load_into(place + "/c/model", model)
    assert model.bias.tolist() == Linear(3).bias.tolist()
    metadata = ckptcore.metadata(place + "/c/model")
    assert metadata.layout == "safetensors" and metadata.save_id == ckptcore.metadata(place + "/c").save_id
    assert ckptcore.verify(place + "/c/model").ok and ckptcore.verify(place + "/c/files").ok
    for name in ("model", "files"):
        ckptcore.copy(f"{place}/c/{name}", f"{place}/{name}", layout="safetensors")
        assert ckptcore.verify(f"{place}/{name}").ok
    assert same_value(ckptcore.load(place + "/model"), Linear(3).get_state_tree())


@pytest.mark.parametrize("into", ["alone", "deep/down/alone", "other/model"])
def test_a_member_copied_to_another_directory_loads(into: str, tmp_path: Path) -> None:
    save_all(str(tmp_path / "c"))
    (tmp_path / into).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tmp_path / "c" / "model", tmp_path / into)
    shutil.rmtree(tmp_path / "c")
    assert same_value(ckptcore.load(tmp_path / into), Linear(3).get_state_tree())
    assert ckptcore.verify(tmp_path / into).ok


def test_a_member_in_another_composite_is_ignored(tmp_path: Path) -> None:
    save_all(str(tmp_path / "one"), 1)
    save_all(str(tmp_path / "two"), 2)
    shutil.rmtree(tmp_path / "two" / "model")
    shutil.copytree(tmp_path / "one" / "model", tmp_path / "two" / "model")
    with pytest.raises(UncommittedCheckpointError):
        ckptcore.load(tmp_path / "two" / "model")
    model = Linear(0)
    with pytest.raises(CheckpointError):
        ckptcore.load_checkpointables(tmp_path / "two", into={"model": model})
    assert model.bias.tolist() == Linear(0).bias.tolist()
    assert not ckptcore.verify(tmp_path / "two").ok
    with pytest.raises(CheckpointError):
        ckptcore.copy(tmp_path / "two", tmp_path / "three", layout="safetensors")
    assert ckptcore.load_checkpointables(tmp_path / "two", ["data"])["data"]["position"] == 2


def test_a_member_of_an_uncommitted_composite_is_ignored(tmp_path: Path) -> None:
    location = f"memory://{tmp_path.name}/c"
    save_all(location)
    store = installed_plugins().storage("memory")(location, StorageOptions())
    store.put(ROOT_KEY, encode_claim(Claim("0123456789abcdef", "2024-01-01T00:00:00+00:00")))
    for name in ("model", "data", "files"):
        for function in (ckptcore.load, ckptcore.metadata, ckptcore.verify):
            with pytest.raises(UncommittedCheckpointError):
                function(f"{location}/{name}")
    with pytest.raises(UncommittedCheckpointError):
        ckptcore.load_checkpointables(location)


@pytest.mark.parametrize("rooted", [False, True])
def test_a_member_of_a_hidden_directory_is_ignored(rooted: bool, tmp_path: Path) -> None:
    """Such a directory belongs to a running save, to a save that failed before its rename, or to a deletion."""
    save_all(str(tmp_path / "c"))
    hidden = tmp_path / ".c.0123456789abcdef.ckptcore"
    (tmp_path / "c").rename(hidden)
    if not rooted:
        (hidden / ROOT_KEY).unlink()
    for name in ("model", "data", "files"):
        with pytest.raises(CheckpointNotFoundError):
            ckptcore.load(hidden / name)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(hidden)


@pytest.mark.parametrize("name", ["model", "data", "files"])
def test_a_member_that_was_replaced_is_refused(name: str, place: str) -> None:
    save_all(place + "/c")
    ckptcore.save(f"{place}/other", {"weight": np.ones((3, 4), np.float32), "bias": np.ones(4)})
    replace_member(place, f"c/{name}", "other")
    target = {"model": Linear(0), "data": Counter(), "files": Files()}[name]
    wanted: Sequence[dict[str, Any]] = ({"abstract": [name]}, {"into": {name: target}}, {})
    for how in wanted:
        with pytest.raises(CorruptCheckpointError, match="replaced"):
            ckptcore.load_checkpointables(place + "/c", **how)
    report = ckptcore.verify(place + "/c")
    assert [problem.key for problem in report.problems] == [f"{name}/{ROOT_KEY}"]
    with pytest.raises(CorruptCheckpointError, match="replaced"):
        ckptcore.copy(place + "/c", place + "/converted", layout="safetensors")
    others = [other for other in ("model", "data", "files") if other != name]
    assert list(ckptcore.load_checkpointables(place + "/c", others)) == others
    assert ckptcore.load(f"{place}/c/{name}")["bias"].tolist() == [1, 1, 1, 1]


def test_a_member_that_became_a_composite_is_refused(place: str) -> None:
    save_all(place + "/c")
    save_all(place + "/other")
    replace_member(place, "c/model", "other")
    with pytest.raises(CheckpointError):
        ckptcore.load_checkpointables(place + "/c", ["model"])
    assert not ckptcore.verify(place + "/c").ok


def test_overwriting_replaces_all_members(place: str) -> None:
    save_all(place + "/c", 1)
    ckptcore.save_checkpointables(place + "/c", {"other": {"a": 1}}, overwrite="non-atomic")
    assert ckptcore.load_checkpointables(place + "/c") == {"other": {"a": 1}}
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(place + "/c/model")
    ckptcore.save(place + "/c", {"one": "tree"}, overwrite="non-atomic")
    assert ckptcore.load(place + "/c") == {"one": "tree"}
    save_all(place + "/c", 4, overwrite="non-atomic")
    assert ckptcore.load_checkpointables(place + "/c", ["data"])["data"]["position"] == 4
    with pytest.raises(ckptcore.errors.CheckpointExistsError):
        save_all(place + "/c")


def test_delete_removes_all_members(place: str) -> None:
    save_all(place + "/c")
    save_all(place + "/d")
    ckptcore.delete(place + "/c")
    for name in ("", "/model", "/data", "/files"):
        with pytest.raises(CheckpointNotFoundError):
            ckptcore.load(place + "/c" + name)
    storage = installed_plugins().storage("memory" if "://" in place else "file")(place, StorageOptions())
    assert list(storage.list_names()) == ["d/"]
