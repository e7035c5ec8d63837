"""Composite checkpoints of other software: loading, metadata, verification and conversion."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.layout_stores import WatchedIndex
from ckptcore_testing.locations import InterruptedPlan, faulty_context, through
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    NameCollisionError,
    TargetUndefinedError,
    TreeMismatchError,
    UncommittedCheckpointError,
    UnknownCheckpointableError,
)
from ckptcore.hookspecs import hookimpl
from ckptcore.inspection.completeness import has_expected_sizes
from ckptcore.model import JSON, HostArray, ReadItem, TreeMetadata
from ckptcore.protocols import ChunkIndex, LayoutFactory, ReadStore
from tests.composites.foreign_format import MARK, ShelfLayout, ShelfPlugin, put_on_shelf
from tests.composites.objects import Files, Linear

CREATED = "2026-01-02T03:04:05+00:00"
PARAMS: dict[str, HostArray] = {"weight": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.arange(4.0)}
FILES = {"data": {"position": b"17", "deep/words": b"a b"}}


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Create a shelf with two trees, files, and an internal directory of the software."""
    directory = tmp_path / "step_7"
    moments = {name: array * 2 for name, array in PARAMS.items()}
    put_on_shelf(
        directory,
        {"params": PARAMS, "moments": moments},
        FILES,
        created=CREATED,
        custom={"run": 1},
        metrics={"loss": 0.5},
    )
    (directory / "_own").mkdir()
    return directory


def strange(shelf: Path) -> Path:
    """Add an item that claims to be a tree of an unknown format."""
    (shelf / "ema").mkdir()
    (shelf / "ema" / "strange").write_bytes(b"?")
    return shelf


# --- loading


def test_everything_is_loaded_by_name(shelf: Path, context: ckptcore.Context) -> None:
    loaded = ckptcore.load_checkpointables(shelf, context=context)
    assert list(loaded) == ["data", "moments", "params"]
    assert same_value(loaded["params"], PARAMS) and loaded["moments"]["bias"].tolist() == [0, 2, 4, 6]
    assert loaded["data"] == FILES["data"]


def test_only_requested_members_are_read(shelf: Path, context: ckptcore.Context) -> None:
    shutil.rmtree(shelf / "moments")
    (shelf / "data" / "position").unlink()
    assert same_value(ckptcore.load_checkpointables(shelf, ["params"], context=context)["params"], PARAMS)
    wanted: dict[str, Any] = {
        "data": ckptcore.PLACEHOLDER,
        "params": {"bias": np.empty(4), "weight": ckptcore.PLACEHOLDER},
    }
    assert ckptcore.load_checkpointables(shelf, wanted, context=context)["params"]["bias"].tolist() == [0, 1, 2, 3]


def test_objects_are_restored_in_place(shelf: Path, context: ckptcore.Context) -> None:
    model, files = Linear(9), Files()
    weight = model.weight
    loaded = ckptcore.load_checkpointables(shelf, into={"params": model, "data": files}, context=context)
    assert loaded["params"] is model and loaded["data"] is files
    assert model.weight is weight and weight.tolist() == PARAMS["weight"].tolist()
    assert files.files == FILES["data"]


def test_a_mismatch_changes_no_object(shelf: Path, context: ckptcore.Context) -> None:
    model = Linear(9)
    with pytest.raises(TreeMismatchError):
        ckptcore.load_checkpointables(shelf, into={"params": model, "data": Linear(1)}, context=context)
    with pytest.raises(TreeMismatchError):
        ckptcore.load_checkpointables(
            shelf, {"moments": {"other": np.ones(2)}}, into={"params": model}, context=context
        )
    with pytest.raises(UnknownCheckpointableError, match="did you mean 'params'"):
        ckptcore.load_checkpointables(shelf, {"param": None}, into={"params": model}, context=context)
    assert model.bias.tolist() == Linear(9).bias.tolist()


def test_an_error_of_an_object_names_it(shelf: Path, context: ckptcore.Context) -> None:
    files = Files()
    files.load_error = RuntimeError("no")
    with pytest.raises(TargetUndefinedError, match="step_7/data"):
        ckptcore.load_checkpointables(shelf, into={"data": files}, context=context)


def test_each_member_opens_by_its_own_location(shelf: Path, context: ckptcore.Context) -> None:
    assert same_value(ckptcore.load(shelf / "params", context=context), PARAMS)
    assert ckptcore.metadata(shelf / "params", context=context).layout == "shelf"


def test_members_can_have_different_layouts(shelf: Path, context: ckptcore.Context) -> None:
    """The layout is determined for each tree."""
    ckptcore.save(shelf.parent / "ours", PARAMS, layout=ckptcore.SafetensorsLayout(standalone=True))
    (shelf / "head").mkdir()
    shutil.copy(shelf.parent / "ours" / "model.safetensors", shelf / "head")
    (shelf / "head" / "strange").touch()
    head = ckptcore.load_checkpointables(shelf, ["head"], context=context)["head"]
    assert same_value(dict(sorted(head.items(), reverse=True)), PARAMS)
    assert ckptcore.metadata(shelf, context=context).checkpointables["head"].layout == "safetensors"
    assert ckptcore.verify(shelf, context=context).ok


def test_a_single_tree_has_the_name_given_by_its_software(tmp_path: Path, context: ckptcore.Context) -> None:
    put_on_shelf(tmp_path / "one", {"tree": PARAMS}, metrics={"loss": 2}, created=CREATED)
    assert same_value(ckptcore.load(tmp_path / "one", context=context), PARAMS)
    loaded = ckptcore.load_checkpointables(tmp_path / "one", context=context)
    assert list(loaded) == ["tree"] and same_value(loaded["tree"], PARAMS)
    # All other functions treat the checkpoint as one tree.
    metadata = ckptcore.metadata(tmp_path / "one", context=context)
    assert (metadata.metrics, metadata.created, metadata.save_id) == ({"loss": 2}, CREATED, None)
    assert ckptcore.verify(tmp_path / "one", context=context).unverified == ("tree/0.bin", "tree/1.bin")
    ckptcore.copy(tmp_path / "one", tmp_path / "ours", layout="safetensors", context=context)
    assert same_value(ckptcore.load(tmp_path / "ours"), PARAMS)
    assert ckptcore.metadata(tmp_path / "ours").metrics == {"loss": 2}


def test_a_plain_load_can_select_one_of_several_members(tmp_path: Path, context: ckptcore.Context) -> None:
    """The other software loads in this way, too. All functions but loads apply to the whole checkpoint."""
    put_on_shelf(tmp_path / "c", {"tree": PARAMS, "ema": PARAMS})
    assert same_value(ckptcore.load(tmp_path / "c", context=context), PARAMS)
    assert ckptcore.verify(tmp_path / "c", context=context).objects == 4
    metadata = ckptcore.metadata(tmp_path / "c", context=context)
    assert list(metadata.checkpointables) == ["ema", "tree"] and metadata.tree == metadata.checkpointables["tree"].tree
    ckptcore.copy(tmp_path / "c", tmp_path / "ours", layout="safetensors", context=context)
    assert list(ckptcore.load_checkpointables(tmp_path / "ours")) == ["ema", "tree"]


def test_a_plain_load_of_several_members_is_refused(shelf: Path, context: ckptcore.Context) -> None:
    for function in (ckptcore.load, ckptcore.open):
        with pytest.raises(CompositeCheckpointError, match="params") as caught:
            function(shelf, context=context)
        assert caught.value.names == ("data", "moments", "params")
    with pytest.raises(CompositeCheckpointError, match="params") as caught:
        _ = ckptcore.metadata(shelf, context=context).tree
    assert caught.value.names == ("data", "moments", "params")


def test_a_plain_load_is_refused_if_the_layout_selects_no_member(
    shelf: Path, context: ckptcore.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.composites.foreign_format.ShelfLayout.inspect", lambda *_: None)
    with pytest.raises(CompositeCheckpointError, match="use load_checkpointables, or load one by its own location"):
        ckptcore.load(shelf, context=context)
    assert ckptcore.load_checkpointables(shelf, ["data"], context=context) == FILES


def test_other_checkpoints_have_no_member_names(tmp_path: Path, context: ckptcore.Context) -> None:
    put_on_shelf(tmp_path / "c", {"params": PARAMS})
    with pytest.raises(CompositeCheckpointError, match="one tree and has no names"):
        ckptcore.load_checkpointables(tmp_path / "c" / "params", context=context)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(tmp_path / "nothing", context=context)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(tmp_path / "c", context=ckptcore.Context())


# --- unreadable and missing members


def test_unsupported_members_are_named_and_the_others_load(shelf: Path, context: ckptcore.Context) -> None:
    strange(shelf)
    with pytest.raises(CheckpointNotFoundError, match=r"'ema' .* load_checkpointables: data, moments, params"):
        ckptcore.load_checkpointables(shelf, context=context)
    model = Linear(9)
    with pytest.raises(CheckpointNotFoundError, match="'ema'"):
        ckptcore.load_checkpointables(shelf, {"ema": None}, into={"params": model}, context=context)
    assert model.bias.tolist() == Linear(9).bias.tolist()
    assert same_value(ckptcore.load_checkpointables(shelf, ["params", "data"], context=context)["params"], PARAMS)


def test_unsupported_members_are_described(shelf: Path, context: ckptcore.Context) -> None:
    metadata = ckptcore.metadata(strange(shelf), context=context)
    assert list(metadata.checkpointables) == ["data", "moments", "params"] and metadata.checkpointables.deleted == ()
    assert (
        list(metadata.checkpointables.unreadable) == ["ema"]
        and "not a checkpoint that an installed layout reads" in metadata.checkpointables.unreadable["ema"]
    )


def test_unsupported_members_are_reported_by_verify(shelf: Path, context: ckptcore.Context) -> None:
    (problem,) = ckptcore.verify(strange(shelf), context=context).problems
    assert problem.key == "ema" and "ema" in problem.message


def test_unsupported_members_stop_a_conversion(shelf: Path, context: ckptcore.Context, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="'ema'") as caught:
        ckptcore.copy(strange(shelf), tmp_path / "ours", layout="safetensors", context=context)
    assert "by location" in "".join(caught.value.__notes__)
    assert not (tmp_path / "ours").exists()


def test_listed_members_without_files_count_as_deleted(shelf: Path, context: ckptcore.Context) -> None:
    (shelf / MARK).write_text(json.dumps({"also": ["gone"]}))
    assert list(ckptcore.load_checkpointables(shelf, context=context)) == ["data", "moments", "params"]
    with pytest.raises(CheckpointNotFoundError, match="'gone' was saved and deleted later"):
        ckptcore.load_checkpointables(shelf, ["gone"], context=context)
    assert ckptcore.metadata(shelf, context=context).checkpointables.deleted == ("gone",)
    report = ckptcore.verify(shelf, context=context)
    assert report.deleted == ("gone",) and [problem.key for problem in report.problems] == ["gone"]
    assert not has_expected_sizes(shelf, context)


def test_sizes_of_existing_members_are_reported(shelf: Path, context: ckptcore.Context) -> None:
    assert has_expected_sizes(shelf, context)


@pytest.mark.parametrize("name", ["../outside", "/etc", "", ".", "..", "params/deep", "a\0b", "\ud800"])
def test_names_outside_of_the_checkpoint_are_refused(name: str, shelf: Path, context: ckptcore.Context) -> None:
    put_on_shelf(shelf.parent / "outside", {"w": PARAMS})
    (shelf / MARK).write_text(json.dumps({"also": [name]}))
    for function in (ckptcore.load_checkpointables, ckptcore.metadata, ckptcore.load):
        with pytest.raises((CorruptCheckpointError, CompositeCheckpointError)):
            function(shelf, context=context)
    assert not ckptcore.verify(shelf, context=context).ok


def test_an_unfinished_checkpoint_is_refused(shelf: Path, context: ckptcore.Context) -> None:
    (shelf / MARK).write_text('{"unfinished": true}')
    for function in (ckptcore.load_checkpointables, ckptcore.metadata, ckptcore.verify):
        with pytest.raises(UncommittedCheckpointError):
            function(shelf, context=context)


@pytest.mark.parametrize("content", [b"", b"[", b"[1]", b"3", b"\xff", b'{"metrics": {"a": "b"}}'])
def test_damaged_metadata_files_are_refused(content: bytes, shelf: Path, context: ckptcore.Context) -> None:
    (shelf / MARK).write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load_checkpointables(shelf, context=context)


def test_damaged_arrays_are_refused(shelf: Path, context: ckptcore.Context) -> None:
    (shelf / "params" / "0.bin").write_bytes(b"short")
    with pytest.raises(CorruptCheckpointError, match="weight"):
        ckptcore.load_checkpointables(shelf, context=context)
    (problem,) = ckptcore.verify(shelf, context=context).problems
    assert problem.key == "params/0.bin" and problem.arrays == ("params: weight",)
    model = Linear(9)
    with pytest.raises(TargetUndefinedError):
        ckptcore.load_checkpointables(shelf, into={"params": model}, context=context)


def test_our_composite_without_its_root_is_not_a_foreign_one(tmp_path: Path, context: ckptcore.Context) -> None:
    """It looks like a foreign checkpoint. But without its root, deleted and replaced members would go unnoticed."""
    ckptcore.save_checkpointables(
        tmp_path / "c", {"params": PARAMS, "moments": PARAMS}, layout="shelf", context=context
    )
    (tmp_path / "c" / "checkpoint.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"its checkpoint\.json is missing"):
        ckptcore.load_checkpointables(tmp_path / "c", context=context)
    with pytest.raises(CheckpointError):
        ckptcore.load(tmp_path / "c", context=context)
    assert same_value(ckptcore.load(tmp_path / "c" / "params", context=context), PARAMS)


# --- metadata and verification


def test_metadata_describes_the_members(shelf: Path, context: ckptcore.Context) -> None:
    metadata = ckptcore.metadata(shelf, context=context)
    assert (metadata.created, metadata.writer, metadata.custom, metadata.metrics) == (
        CREATED,
        "shelfware 3",
        {"run": 1},
        {"loss": 0.5},
    )
    assert (
        metadata.save_id is None
        and metadata.timeline == ()
        and metadata.checkpointables.processes == {}
        and metadata.checkpointables.unreadable == {}
    )
    assert {name: member.layout for name, member in metadata.checkpointables.items()} == {
        "data": "files",
        "moments": "shelf",
        "params": "shelf",
    }
    assert metadata.nbytes == 2 * (48 + 32) + 5
    assert same_value(
        ckptcore.load(shelf / "params", metadata.checkpointables["params"].abstract, context=context), PARAMS
    )


def test_verification_reads_all_members(shelf: Path, context: ckptcore.Context) -> None:
    told: list[tuple[int, int]] = []
    report = ckptcore.verify(shelf, progress=lambda *moved: told.append(moved), context=context)
    assert report.ok and report.nbytes == 165 and max(told) == (165, 165)
    expected = {"data/deep/words", "data/position"} | {
        f"{name}/{key}.bin" for name in ("moments", "params") for key in "01"
    }
    assert set(report.unverified) == expected and report.objects == 6


class Caching(ShelfLayout):
    """A layout that caches facts about a checkpoint as long as its store exists."""

    def __init__(self) -> None:
        self.known: weakref.WeakKeyDictionary[ReadStore, int] = weakref.WeakKeyDictionary()
        self.reads: list[int] = []

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return an index that counts the reads of each store."""
        return WatchedIndex(super().index(tree, state), self._read)

    def _read(
        self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore
    ) -> Iterator[int]:
        self.known[store] = self.known.get(store, 0) + 1
        self.reads.append(self.known[store])
        yield from store.read_boxes(index, items, buffers)


class CachingPlugin:
    """A plugin with the layout object ``shelf``."""

    def __init__(self) -> None:
        self.layout = Caching()

    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        """Return the layout under the same name."""
        return {"shelf": lambda: self.layout}


@pytest.mark.parametrize("ours", [False, True])
def test_a_tree_is_read_through_one_store(ours: bool, shelf: Path, tmp_path: Path) -> None:
    """All reads of a tree use one store, so that a layout can cache facts. The store is freed with the tree."""
    plugin = CachingPlugin()
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=(plugin,)), memory=ckptcore.context.MemoryOptions(load_bytes=1)
    )
    source = shelf / "params"
    if ours:
        source = tmp_path / "ours"
        ckptcore.save(source, PARAMS, layout="shelf", context=context)
    for read in (
        lambda: ckptcore.copy(source, tmp_path / "converted", layout="safetensors", context=context),
        lambda: ckptcore.load(source, context=context),
        lambda: ckptcore.load_into(
            source, {name: np.zeros_like(array) for name, array in PARAMS.items()}, context=context
        ),
    ):
        plugin.layout.reads.clear()
        read()
        assert plugin.layout.reads == [1, 2]
        gc.collect()
        assert not plugin.layout.known


# --- converting


@pytest.mark.parametrize("layout", ["safetensors", "shelf"])
def test_members_are_converted(layout: str, shelf: Path, context: ckptcore.Context, tmp_path: Path) -> None:
    ckptcore.copy(shelf, tmp_path / "ours", layout=layout, context=context)
    assert ckptcore.verify(tmp_path / "ours", context=context).ok
    loaded = ckptcore.load_checkpointables(tmp_path / "ours", context=context)
    assert list(loaded) == ["data", "moments", "params"]
    assert same_value(loaded["params"], PARAMS) and loaded["data"] == FILES["data"]
    metadata = ckptcore.metadata(tmp_path / "ours", context=context)
    assert (metadata.custom, metadata.metrics) == ({"run": 1}, {"loss": 0.5})
    assert (tmp_path / "ours" / MARK).exists() == (layout == "shelf")


def test_reserved_names_are_not_converted(shelf: Path, context: ckptcore.Context, tmp_path: Path) -> None:
    (shelf / "data").rename(shelf / "checkpoint.data")
    assert ckptcore.load_checkpointables(shelf, ["checkpoint.data"], context=context) == {
        "checkpoint.data": FILES["data"]
    }
    with pytest.raises(InvalidLocationError, match=r"checkpoint\.data"):
        ckptcore.copy(shelf, tmp_path / "ours", layout="safetensors", context=context)
    (shelf / "checkpoint.data").rename(shelf / "data")
    (shelf / "data" / "position").rename(shelf / "data" / "checkpoint.position")
    with pytest.raises(NameCollisionError, match=r"checkpoint\.position.*Rename the file"):
        ckptcore.copy(shelf, tmp_path / "ours", layout="safetensors", context=context)
    assert not (tmp_path / "ours").exists()
    (shelf / "data" / "checkpoint.position").rename(shelf / "data" / "position")
    ckptcore.copy(shelf, tmp_path / "ours", layout="safetensors", context=context)
    assert ckptcore.load_checkpointables(tmp_path / "ours", ["data"], context=context) == {"data": FILES["data"]}


def test_a_save_replaces_a_foreign_composite_only_on_request(shelf: Path, context: ckptcore.Context) -> None:
    with pytest.raises(ckptcore.errors.CheckpointExistsError):
        ckptcore.save(shelf, PARAMS, context=context)
    with pytest.raises(ckptcore.errors.CheckpointExistsError):
        ckptcore.delete(shelf, context=context)


# --- concurrent replacement


def test_a_concurrent_reader_gets_the_foreign_checkpoint_or_ours(tmp_path: Path) -> None:
    """Our checkpoint replaces the foreign one before each operation of a load. The load returns one of the two."""
    counting = FaultPlan()
    location = f"file://{tmp_path}/count"
    put_on_shelf(tmp_path / "count", {"a": PARAMS, "b": PARAMS})
    load_all(location, counting)
    versions = set()
    for number in range(len(counting.operations)):
        put_on_shelf(tmp_path / str(number), {"a": PARAMS, "b": PARAMS})
        location = f"file://{tmp_path}/{number}"

        def replace(number: int = number, location: str = location) -> None:
            shutil.rmtree(tmp_path / str(number))
            tree = {"bias": np.ones(4), "weight": np.ones(1)}
            ckptcore.save_checkpointables(location, {"a": tree, "b": tree})

        plan = InterruptedPlan(number, replace)
        values = load_all(location, plan)
        assert plan.interrupted and len(values) == 1, f"a mix of {values}, after operation {number}"
        versions |= values
    assert versions == {0.0, 1.0} or versions == {1.0}


def load_all(location: str, plan: FaultPlan) -> set[float]:
    context = faulty_context(location, plan)
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=(*context.plugins.extra, ShelfPlugin())),
        io=ckptcore.context.IOOptions(threads=1),
        durability="none",
    )
    loaded = ckptcore.load_checkpointables(through(location), context=context)
    return {float(tree["bias"][0]) for tree in loaded.values()}
