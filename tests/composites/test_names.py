"""Loads of several checkpointables by name."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.locations import store_at
from ckptcore_testing.trees import same_value
from ckptcore_transforms import Rename

import ckptcore
from ckptcore.commit.root import check_name
from ckptcore.errors import (
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    StorageError,
    TreeMismatchError,
    UnsupportedKeyError,
    UnsupportedLeafError,
)
from ckptcore.loading.composites import CompositeLoad, CompositeRequest
from ckptcore.loading.load import recorded_load
from ckptcore.protocols import StorageBackend
from tests.checkpointer.runs import Watch, through, watched
from tests.composites.objects import Counter, Files, Linear

PARAMS = {"layers": [np.arange(6, dtype=np.int32).reshape(2, 3), np.float32(0.5)], "name": "a name"}


def save_all(location: str, **options: Any) -> None:
    """Save an object of each kind."""
    objects = {"params": PARAMS, "model": Linear(3), "data": Counter(5), "files": Files({"a/b": b"one", "c": b""})}
    ckptcore.save_checkpointables(location, objects, **options)


def test_none_loads_everything_as_python_types(place: str) -> None:
    save_all(place + "/c")
    loaded = ckptcore.load_checkpointables(place + "/c")
    assert list(loaded) == ["params", "model", "data", "files"]
    assert same_value(loaded["params"], PARAMS)
    assert same_value(loaded["model"], Linear(3).get_state_tree())
    assert loaded["data"] == {"position": 5, "seen": [0, 1, 2, 3, 4]}
    assert loaded["files"] == {"a/b": b"one", "c": b""}


def test_requested_names_are_returned_in_order(place: str) -> None:
    save_all(place + "/c")
    assert list(ckptcore.load_checkpointables(place + "/c", ["data", "params"])) == ["data", "params"]
    assert ckptcore.load_checkpointables(place + "/c", []) == {}
    assert list(ckptcore.load_checkpointables(place + "/c", ("model",))) == ["model"]


def test_objects_are_restored_in_place_and_trees_are_new(place: str) -> None:
    save_all(place + "/c")
    model, data, files = Linear(0), Counter(), Files()
    weight = model.weight
    abstract = {
        "layers": [ckptcore.AbstractArray((2, 3), "int32"), ckptcore.PLACEHOLDER],
        "name": "",
    }
    into = {"files": files, "data": data, "model": model}
    loaded = ckptcore.load_checkpointables(place + "/c", {"params": abstract}, into=into)
    assert list(loaded) == ["params", *into]
    assert loaded["model"] is model and loaded["data"] is data and loaded["files"] is files
    assert model.weight is weight and weight.tolist() == Linear(3).weight.tolist()
    assert next(data) == 5
    assert files.files == {"a/b": b"one", "c": b""}
    assert loaded["params"]["layers"][0].dtype == np.int32
    assert loaded["params"]["layers"][1] is ckptcore.PLACEHOLDER
    assert abstract["layers"][1] is ckptcore.PLACEHOLDER  # the load does not change the abstract tree


def test_objects_with_a_state_are_refused_in_the_abstract_mapping(place: str) -> None:
    save_all(place + "/c")
    model = Linear(0)
    for name, wrong in (("model", model), ("files", Files()), ("data", {"in": [Counter()]})):
        with pytest.raises(TypeError, match=f"pass it as into={{'{name}'"):
            ckptcore.load_checkpointables(place + "/c", {name: wrong})
    with pytest.raises(ValueError, match="in both abstract and into"):
        ckptcore.load_checkpointables(place + "/c", ["model"], into={"model": model})
    wrong_into: Any = [model]
    with pytest.raises(TypeError, match="pass a mapping of names to the objects to restore"):
        ckptcore.load_checkpointables(place + "/c", into=wrong_into)
    with pytest.raises(TypeError, match="pass the object to restore"):
        ckptcore.load_checkpointables(place + "/c", into={"model": None})
    assert model.weight.tolist() == Linear(0).weight.tolist()


def test_trees_can_be_filled_in_place(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"params": {"w": np.arange(3), "step": 7}})
    weight = np.zeros(3, np.int64)
    tree = {"w": weight, "step": 0}
    assert ckptcore.load_checkpointables(place + "/c", into={"params": tree})["params"] is tree
    assert tree["w"] is weight and weight.tolist() == [0, 1, 2] and tree["step"] == 7


def test_a_placeholder_skips_a_name_even_if_it_does_not_exist(place: str) -> None:
    save_all(place + "/c")
    wanted = {"params": ckptcore.PLACEHOLDER, "nothing": ckptcore.PLACEHOLDER, "data": None}
    assert list(ckptcore.load_checkpointables(place + "/c", wanted)) == ["data"]
    wrapped = {"data": ckptcore.PerProcess(ckptcore.PLACEHOLDER)}
    assert ckptcore.load_checkpointables(place + "/c", wrapped) == {}


def test_an_unknown_name_is_an_error(place: str) -> None:
    save_all(place + "/c")
    model = Linear(0)
    with pytest.raises(CheckpointNotFoundError, match=r"has no 'parms'.*did you mean 'params'"):
        ckptcore.load_checkpointables(place + "/c", {"parms": None}, into={"model": model})
    assert model.weight.tolist() == Linear(0).weight.tolist()


@pytest.mark.parametrize("name", ["params", "model", "data", "files"])
def test_deleting_one_leaves_the_others(name: str, place: str, caplog: pytest.LogCaptureFixture) -> None:
    save_all(place + "/c")
    ckptcore.delete(f"{place}/c/{name}")
    with caplog.at_level(logging.WARNING, "ckptcore"):
        loaded = ckptcore.load_checkpointables(place + "/c")
    assert sorted([*loaded, name]) == ["data", "files", "model", "params"]
    assert name in caplog.text and "deleted" in caplog.text
    report = ckptcore.verify(place + "/c")
    assert report.ok and report.deleted == (name,)
    with pytest.raises(CheckpointNotFoundError, match=f"'{name}' was saved and deleted"):
        ckptcore.load_checkpointables(place + "/c", [name])
    metadata = ckptcore.metadata(place + "/c")
    assert metadata.checkpointables.deleted == (name,) and name not in metadata.checkpointables
    ckptcore.copy(place + "/c", place + "/converted", layout="safetensors")
    assert list(ckptcore.load_checkpointables(place + "/converted")) == list(loaded)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.delete(f"{place}/c/{name}")


@pytest.mark.parametrize("keep_directory", [False, True])
def test_removing_one_by_hand_leaves_the_others(keep_directory: bool, tmp_path: Path) -> None:
    save_all(str(tmp_path / "c"))
    shutil.rmtree(tmp_path / "c" / "files")
    if keep_directory:
        (tmp_path / "c" / "files").mkdir()
    assert list(ckptcore.load_checkpointables(tmp_path / "c")) == ["params", "model", "data"]
    assert ckptcore.metadata(tmp_path / "c").checkpointables.deleted == ("files",)
    (problem,) = ckptcore.verify(tmp_path / "c").problems
    assert problem.key == "files" and "lost, or never copied here" in problem.message


def _store_of(location: str) -> StorageBackend:
    return store_at(location if "://" in location else f"file://{location}")


def test_a_missing_only_member_is_a_problem(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"params": {"w": np.ones(3)}})
    store = _store_of(place + "/c")
    store.delete(list(store.list("params")))
    report = ckptcore.verify(place + "/c")
    assert [problem.key for problem in report.problems] == ["params"] and report.deleted == ("params",)


def test_a_conversion_refuses_a_lost_member_until_it_is_deleted(place: str) -> None:
    """The test applies the remedy that the error suggests."""
    save_all(place + "/c")
    store = _store_of(place + "/c")
    store.delete(list(store.list("files")))
    ckptcore.copy(place + "/c", place + "/copied")
    assert not ckptcore.verify(place + "/copied").ok
    with pytest.raises(CorruptCheckpointError, match=r"'files' is listed but missing.*ckptcore\.delete: \S+c/files\. "):
        ckptcore.copy(place + "/c", place + "/converted", layout="safetensors")
    ckptcore.delete(place + "/c/files")
    assert ckptcore.verify(place + "/c").ok
    ckptcore.copy(place + "/c", place + "/converted", layout="safetensors")
    assert list(ckptcore.load_checkpointables(place + "/converted")) == ["params", "model", "data"]
    ckptcore.copy(place + "/c", place + "/whole")
    assert ckptcore.verify(place + "/whole").ok and ckptcore.verify(place + "/whole").deleted == ("files",)


def test_the_record_of_a_deletion_does_not_apply_to_the_next_checkpoint(place: str) -> None:
    save_all(place + "/c")
    ckptcore.delete(place + "/c/files")
    save_all(place + "/c", overwrite="non-atomic")
    store = _store_of(place + "/c")
    store.delete(list(store.list("files")))
    assert not ckptcore.verify(place + "/c").ok


def test_a_failed_deletion_leaves_no_record(place: str) -> None:
    """The object remains. If it is lost later, this is damage."""
    watch, marks = Watch(), list[str]()
    location, context = through(place + "/c"), watched(watch)
    save_all(location, context=context)

    def refuse(name: str, keys: Sequence[str]) -> None:
        if name == "put" and ".deleted." in keys[0]:
            marks.append(keys[0])
        elif marks and name in ("put", "rename"):
            raise StorageError("the test refuses this")

    watch.before = refuse
    with pytest.raises(StorageError, match="the test refuses this"):
        ckptcore.delete(location + "/files", context=context)
    watch.before = Watch().before
    assert marks and list(ckptcore.load_checkpointables(place + "/c")) == ["params", "model", "data", "files"]
    store = _store_of(place + "/c")
    store.delete(list(store.list("files")))
    assert not ckptcore.verify(place + "/c").ok


def test_loading_all_names_reports_deleted_ones(place: str) -> None:
    location, context = place + "/c", ckptcore.Context()
    save_all(location)
    with recorded_load(location, context) as recording:
        whole = CompositeLoad(location, CompositeRequest(absent="error"), context, recording).run()
        assert list(whole) == ["params", "model", "data", "files"]
        ckptcore.delete(location + "/model")
        with pytest.raises(CorruptCheckpointError, match="model was saved, and deleted or lost later"):
            CompositeLoad(location, CompositeRequest(absent="error"), context, recording).run()


def test_an_interrupted_deletion_leaves_the_others() -> None:
    """On storage without directories a deletion first turns the root into a claim."""
    from ckptcore.commit.root import ROOT_KEY, Claim
    from ckptcore.commit.root_json import encode_claim
    from ckptcore.plugins import installed_plugins
    from ckptcore.protocols import StorageOptions

    location = "memory://half-deleted/c"
    save_all(location)
    store = installed_plugins().storage("memory")(location, StorageOptions())
    store.put(f"model/{ROOT_KEY}", encode_claim(Claim("0123456789abcdef", "2024-01-01T00:00:00+00:00")))
    assert list(ckptcore.load_checkpointables(location)) == ["params", "data", "files"]
    assert ckptcore.metadata(location).checkpointables.deleted == ("model",)
    assert ckptcore.verify(location).ok
    ckptcore.copy(location, "memory://half-deleted/converted", layout="safetensors")
    assert list(ckptcore.load_checkpointables("memory://half-deleted/converted")) == ["params", "data", "files"]
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(location, ["model"])


_BAD_NAMES = [
    "",
    ".",
    "..",
    ".hidden",
    "a/b",
    "/",
    "checkpoint.json",
    "checkpoint.x",
    "x.rank_0",
    "ä" * 101,
    "a\0",
    "\ud800",
]


@pytest.mark.parametrize("name", [*_BAD_NAMES, 3, None])
def test_invalid_names_are_refused(name: Any, place: str) -> None:
    with pytest.raises(InvalidLocationError):
        check_name(name)
    for save in (ckptcore.save_checkpointables, ckptcore.save_checkpointables_async):
        with pytest.raises(InvalidLocationError):
            save(place + "/c", {"fine": {}, name: {}})
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(place + "/c")


@pytest.mark.parametrize(
    "name", ["model", "a name", "ä", "x.rank_", "rank_0", "model.safetensors", "checkpoint", "ä" * 100]
)
def test_valid_names_are_accepted(name: str, place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {name: {"w": np.ones(2)}})
    assert ckptcore.load_checkpointables(place + "/c", [name])[name]["w"].tolist() == [1, 1]
    assert ckptcore.load(f"{place}/c/{name}")["w"].tolist() == [1, 1]


def test_a_string_instead_of_a_list_of_names_is_refused(place: str) -> None:
    save_all(place + "/c")
    with pytest.raises(TypeError, match=r"\['model'\]"):
        ckptcore.load_checkpointables(place + "/c", "model")


def test_the_error_names_the_function_that_loads_each_kind(place: str) -> None:
    save_all(place + "/several")
    ckptcore.save(place + "/one", PARAMS)
    with pytest.raises(CompositeCheckpointError, match="load_checkpointables") as caught:
        ckptcore.load(place + "/several")
    assert caught.value.names == ("params", "model", "data", "files")
    with pytest.raises(CompositeCheckpointError):
        ckptcore.load_into(place + "/several", {})
    with pytest.raises(CompositeCheckpointError, match="one tree"):
        ckptcore.load_checkpointables(place + "/one")


def test_metadata_of_several_objects_has_no_tree_of_its_own(place: str) -> None:
    save_all(place + "/several")
    metadata = ckptcore.metadata(place + "/several")
    assert metadata.is_composite and metadata.contents is None
    with pytest.raises(CompositeCheckpointError, match=r"metadata.checkpointables\['params'\].tree"):
        _ = metadata.tree
    with pytest.raises(CompositeCheckpointError):
        ckptcore.metadata(place + "/several", transforms=[Rename("w", "v")])
    assert list(ckptcore.load_checkpointables(place + "/several", metadata.abstract)) == list(metadata.checkpointables)
    ckptcore.save(place + "/one", PARAMS)
    assert not ckptcore.metadata(place + "/one").is_composite


def test_a_checkpoint_can_have_no_checkpointables(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {})
    assert ckptcore.load_checkpointables(place + "/c") == {}
    assert ckptcore.verify(place + "/c").ok
    ckptcore.delete(place + "/c")
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(place + "/c")


def test_errors_name_the_checkpointable(place: str) -> None:
    for value, error in (({"odd": object()}, UnsupportedLeafError), ({1.5: 2}, UnsupportedKeyError)):
        with pytest.raises(error, match="in 'second'"):
            ckptcore.save_checkpointables(place + "/c", {"first": {}, "second": value})
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(place + "/c")
    save_all(place + "/c")
    wrong = Linear(0)
    wrong.bias = np.zeros(5)
    model = Linear(0)
    with pytest.raises(TreeMismatchError, match="bias") as caught:
        ckptcore.load_checkpointables(place + "/c", into={"model": wrong})
    assert f"{place}/c/model" in str(caught.value)
    with pytest.raises(TreeMismatchError, match=f"{place}/c/params"):
        ckptcore.load_checkpointables(place + "/c", {"params": {"other": np.ones(1)}}, into={"model": model})
    assert model.weight.tolist() == Linear(0).weight.tolist()  # new values are read first
    with pytest.raises(TreeMismatchError, match="'files' is stored as files"):
        ckptcore.load_checkpointables(place + "/c", {"files": {"a": 1}}, into={"model": model})
    assert model.weight.tolist() == Linear(0).weight.tolist()


def test_per_process_states_of_one_process_load_as_plain_trees(place: str) -> None:
    ckptcore.save(place + "/tree", ckptcore.PerProcess({"a": 1}))
    assert ckptcore.load(place + "/tree") == {"a": 1}
    ckptcore.save_checkpointables(place + "/c", {"seed": ckptcore.PerProcess({"a": 1})})
    assert ckptcore.load_checkpointables(place + "/c") == {"seed": {"a": 1}}
