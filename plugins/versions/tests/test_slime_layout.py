"""Versions that the layout `slime` writes, read by ckptcore and by a reader that follows the format's page."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from ckptcore_testing import run_ranks
from ckptcore_testing.arrays import assert_same_bits
from ckptcore_testing.cases import refused
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.locations import faulty_context, new_place, through
from ckptcore_versions.slime import frames as slime_frames
from ckptcore_versions.slime import layout as slime
from ckptcore_versions.slime.layout import SlimeLayout

import ckptcore
from ckptcore import ArrayShard, ShardedArray
from ckptcore.errors import (
    CheckpointReferredError,
    CorruptCheckpointError,
    InvalidLocationError,
    MissingDistributionError,
    UnsupportedLeafError,
)
from ckptcore.model import Box, HostArray
from ckptcore.protocols import Layout
from plugins.versions.tests.held import HeldState, version_at
from plugins.versions.tests.slime_files import INDEX, listed_files, pull, write_delta

CONTEXT = ckptcore.Context(durability="none")


def weights(number: int) -> dict[str, Any]:
    """Return weights of which a few elements change from number to number."""
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((70, 90)).astype(ml_dtypes.bfloat16)
    scale = np.array(2, np.float32)
    tied = rng.standard_normal(20)
    for step in range(2, number + 1):
        wide[step::11] *= ml_dtypes.bfloat16(1.5)
        tied[step % 20] += 1
        scale = scale + np.float32(step % 3 == 0)
    state = {"model": {"layers": [{"w": wide}, {"w": np.arange(40, dtype=np.int8).reshape(4, 10)}], "tied": tied}}
    return {**state, "head": tied, "scale": np.asarray(scale), "empty": np.zeros((0, 3), np.float32), "step": number}


NAMES: Mapping[str, Callable[[Any], Any]] = {
    "model.layers.0.w": lambda state: state["model"]["layers"][0]["w"],
    "model.layers.1.w": lambda state: state["model"]["layers"][1]["w"],
    "model.tied": lambda state: state["model"]["tied"],
    "scale": lambda state: state["scale"],
    "empty": lambda state: state["empty"],
}


def publish(directory: str, number: int, layout: SlimeLayout, *, full: bool = False, state: Any = None) -> str:
    """Publish a version relative to the one before. Return its location."""
    held = None
    if not full:
        held = HeldState(version_at(f"{directory}/weight_v{number - 1:06d}", number - 1), weights(number - 1))
    location = f"{directory}/weight_v{number:06d}"
    saved = weights(number) if state is None else state
    ckptcore.save(location, saved, layout=layout.numbered(number).against(held), context=CONTEXT)
    return location


def publish_all(directory: str, count: int, layout: SlimeLayout, full: tuple[int, ...] = (1,)) -> None:
    for number in range(1, count + 1):
        publish(directory, number, layout, full=number in full)


def assert_loads(location: str, number: int) -> None:
    loaded, expected = ckptcore.load(location, context=CONTEXT), weights(number)
    assert loaded["step"] == number and loaded["head"] is loaded["model"]["tied"]
    for name, find in NAMES.items():
        assert_same_bits(np.asarray(find(loaded)), find(expected), f"{name} of {location}")


def bytes_of(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(find(state)).tobytes() for name, find in NAMES.items()}


@pytest.mark.parametrize(("encoding", "checksum"), [("xor", "xxh3-128"), ("overwrite", "adler32"), ("xor", "adler32")])
def test_other_software_and_ckptcore_follow_every_version(encoding: Any, checksum: Any, tmp_path: Path) -> None:
    publish_all(str(tmp_path), 7, SlimeLayout(encoding, checksum), full=(1, 5))
    for number in range(1, 8):
        location = f"{tmp_path}/weight_v{number:06d}"
        assert pull(tmp_path, number) == bytes_of(weights(number))
        assert_loads(location, number)
        assert ckptcore.verify(location).state == "sound"
    assert ckptcore.metadata(tmp_path / "weight_v000004").bases == ("weight_v000003",)
    with pytest.raises(CheckpointReferredError):
        ckptcore.delete(tmp_path / "weight_v000003", context=CONTEXT)


def test_versions_without_roots_are_those_of_other_software(tmp_path: Path) -> None:
    """As in a copy that a tool makes from the index."""
    publish_all(str(tmp_path), 4, SlimeLayout())
    for number in range(1, 5):
        (tmp_path / f"weight_v{number:06d}" / "checkpoint.json").unlink()
    loaded = ckptcore.load(tmp_path / "weight_v000004")
    assert {name: loaded[name].tobytes() for name in NAMES} == bytes_of(weights(4))
    assert loaded["head"] is loaded["model.tied"]


def test_other_software_goes_on_after_ckptcore(tmp_path: Path) -> None:
    """A delta of other software on versions of ckptcore has the tree of the newest of these."""
    publish_all(str(tmp_path), 2, SlimeLayout())
    old, new = bytes_of(weights(2)), bytes_of(weights(3))
    write_delta(tmp_path, 3, old, new)
    loaded = ckptcore.load(tmp_path / "weight_v000003")
    assert_same_bits(loaded["model"]["layers"][0]["w"], NAMES["model.layers.0.w"](weights(3)), "w")
    assert loaded["step"] == 2


def test_a_full_version_is_a_hugging_face_checkpoint(tmp_path: Path) -> None:
    assets = tmp_path / "model"
    (assets / "original").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", INDEX, "pytorch_model.bin", ".hidden"):
        (assets / name).write_text("{}")
    layout = SlimeLayout(assets=assets)
    publish(str(tmp_path), 1, layout, full=True)
    publish(str(tmp_path), 2, layout)
    version = tmp_path / "weight_v000001"
    (file,) = version.glob("*.safetensors")
    assert {path.name for path in version.iterdir()} == {
        "checkpoint.json", "config.json", "tokenizer.json", INDEX, file.name
    }  # fmt: skip
    metadata, files = listed_files(version)
    assert metadata["version"] == "000001" and "delta_encoding" not in metadata
    assert files[file.name][0]["__metadata__"] == {"head": "model.tied", "format": "pt"}
    assert (
        safetensors.numpy.load_file(file)["model.layers.1.w"].tolist() == weights(1)["model"]["layers"][1]["w"].tolist()
    )
    assert sorted(path.name for path in (tmp_path / "weight_v000002").iterdir()) == [
        "checkpoint.json", "model-00001-00001.safetensors", INDEX
    ]  # fmt: skip


def test_a_version_without_changes_has_an_index_alone(tmp_path: Path) -> None:
    publish(str(tmp_path), 1, SlimeLayout(), full=True)
    publish(str(tmp_path), 2, SlimeLayout(), state={**weights(1), "step": 2})
    assert sorted(path.name for path in (tmp_path / "weight_v000002").iterdir()) == ["checkpoint.json", INDEX]
    assert json.loads((tmp_path / "weight_v000002" / INDEX).read_text())["weight_map"] == {}
    assert pull(tmp_path, 2) == bytes_of(weights(1))
    assert ckptcore.load(tmp_path / "weight_v000002")["step"] == 2


def test_frames_are_divided_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime, "_FILE_BYTES", 100)
    monkeypatch.setattr(slime, "_MAX_FULL_BYTES", 5000)
    publish_all(str(tmp_path), 3, SlimeLayout())
    assert len(list((tmp_path / "weight_v000001").glob("*.safetensors"))) == 3
    assert len(list((tmp_path / "weight_v000003").glob("*.safetensors"))) == 2
    assert pull(tmp_path, 3) == bytes_of(weights(3))
    assert_loads(f"{tmp_path}/weight_v000003", 3)


def test_arrays_of_any_strides_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_frames, "_PIECE_BYTES", 64)
    before = np.arange(600, dtype=">f8").reshape(20, 30)
    after = before.copy()
    after[3, 4:9] = -1
    location = f"{tmp_path}/weight_v000001"
    ckptcore.save(location, {"w": before.T}, layout=SlimeLayout(), context=CONTEXT)
    held = HeldState(version_at(location, 1), {"w": before.astype("<f8").T})
    ckptcore.save(f"{tmp_path}/weight_v000002", {"w": after.T}, layout=SlimeLayout().against(held), context=CONTEXT)
    assert np.array_equal(ckptcore.load(f"{tmp_path}/weight_v000002")["w"], after.T)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_versions_are_in_any_storage(scheme: str, tmp_path: Path) -> None:
    directory = new_place(scheme, tmp_path).removesuffix("/step")
    publish_all(directory, 3, SlimeLayout())
    assert_loads(f"{directory}/weight_v000003", 3)
    assert ckptcore.verify(f"{directory}/weight_v000003").state == "sound"
    assert tuple(ckptcore.CheckpointReader(directory).steps) == (1, 2, 3)


def test_the_index_is_written_last(tmp_path: Path) -> None:
    """On object stores, other software sees files as they arrive."""
    written: list[str] = []

    class Watched(SlimeLayout):
        def finish(self, tree: Any, receipts: Any, store: Any) -> Any:
            class Store:
                def put(self, key: str, data: bytes) -> None:
                    written.append(key)
                    store.put(key, data)

            written.extend(record.key for receipt in receipts for record in receipt.objects)
            return super().finish(tree, receipts, Store())  # type: ignore[arg-type]

    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    layout = Watched(assets=tmp_path / "assets")
    ckptcore.save(tmp_path / "weight_v000001", weights(1), layout=layout, context=CONTEXT)
    assert written == ["model-00001-00001.safetensors", "config.json", INDEX]


# --- jobs


def test_each_process_writes_the_arrays_that_it_holds(tmp_path: Path) -> None:
    """Stages of a pipeline hold different layers, and data-parallel replicas hold the same."""
    layers = [np.arange(30.0) + rank for rank in range(3)]

    def state(rank: int, number: int) -> Any:
        tree = {}
        for layer, array in enumerate(layers):
            whole = array + 100 * number * (layer != 1)
            held, none = ShardedArray.part(whole, (0,), whole.shape), ShardedArray(whole.shape, whole.dtype, [])
            tree[f"layer{layer}"] = held if layer == rank else none
        return {**tree, "shared": np.full(5, number)}

    def save(rank: int, context: ckptcore.Context) -> None:
        for number in (1, 2):
            held = None
            if number > 1:
                held = HeldState(version_at(f"{tmp_path}/weight_v000001", 1), arrays(1))
            layout = SlimeLayout().numbered(number).against(held)
            ckptcore.save(tmp_path / f"weight_v{number:06d}", state(rank, number), layout=layout, context=context)

    def arrays(number: int) -> dict[str, HostArray]:
        whole = {f"layer{layer}": array + 100 * number * (layer != 1) for layer, array in enumerate(layers)}
        return {**whole, "shared": np.full(5, number)}

    run_ranks(3, save)
    for number in (1, 2):
        loaded = ckptcore.load(tmp_path / f"weight_v{number:06d}")
        assert all(np.array_equal(loaded[name], array) for name, array in arrays(number).items())
        assert pull(tmp_path, number) == {name: array.tobytes() for name, array in arrays(number).items()}
    _, files = listed_files(tmp_path / "weight_v000002")
    assert sorted(files) == ["model-00001-00001.safetensors", "model-00003-00001.safetensors"]


def test_a_job_loads_parts(tmp_path: Path) -> None:
    publish_all(str(tmp_path), 4, SlimeLayout())
    whole = NAMES["model.layers.0.w"](weights(4))

    def load(rank: int, context: ckptcore.Context) -> HostArray:
        abstract = ckptcore.metadata(tmp_path / "weight_v000004").abstract
        start, stop = (0, 31) if rank == 0 else (31, 70)
        part = ShardedArray(whole.shape, whole.dtype, [ArrayShard(Box((start, 0), (stop, 90)))])
        abstract["model"]["layers"][0]["w"] = part
        loaded = ckptcore.load(tmp_path / "weight_v000004", abstract, context=context)
        (shard,) = loaded["model"]["layers"][0]["w"].shards
        elements: HostArray = shard.elements
        return elements

    parts = run_ranks(2, load)
    assert_same_bits(np.concatenate(parts), whole, "w")


def test_an_array_that_is_divided_is_named(tmp_path: Path) -> None:
    def save(rank: int, context: ckptcore.Context) -> None:
        part = ShardedArray.part(np.full((2, 3), rank), (2 * rank, 0), (4, 3))
        state = {"layers": {"w": part}, "b": np.ones(3)}
        ckptcore.save(tmp_path / "weight_v000001", state, layout=SlimeLayout(), context=context)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(2, save)
    text = str(caught.value.exceptions[0])
    assert "layers/w" in text or "layers.w" in text
    assert "divided among processes" in text and "layout 'deltas'" in text
    assert not (tmp_path / "weight_v000001").exists()


# --- refusals


@pytest.mark.parametrize("value", [np.ones(3), np.ones((4, 10), np.int16), np.ones((10, 4), np.int8)], ids=str)
def test_an_array_that_the_base_lacks_is_named(value: HostArray, tmp_path: Path) -> None:
    publish(str(tmp_path), 1, SlimeLayout(), full=True)
    state = weights(2)
    if value.shape == (3,):
        state["new"] = value
    else:
        state["model"]["layers"][1]["w"] = value
    refused(
        lambda: publish(str(tmp_path), 2, SlimeLayout(), state=state),
        "is not in weight_v000001", "publish a full version",
        error=UnsupportedLeafError,
    )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["weight_v000001"]
    publish(str(tmp_path), 2, SlimeLayout(), full=True, state=state)


@pytest.mark.parametrize("tied", [0, 1])
def test_an_array_that_was_tied_meanwhile_is_refused(tied: int, tmp_path: Path) -> None:
    """The files of that version do not have it. A `Publisher` writes a full version instead."""
    first, second = np.arange(50.0), np.arange(50.0) * 2
    states = [{"a": first, "b": second}] * 3
    states[tied] = {"a": first, "b": first}
    for number, state in enumerate(states, start=1):
        layout: Layout = SlimeLayout().numbered(number)
        if number > 1:
            held = HeldState(version_at(f"{tmp_path}/weight_v{number - 1:06d}", number - 1), states[number - 2])
            layout = SlimeLayout().numbered(number).against(held)
        ckptcore.save(f"{tmp_path}/weight_v{number:06d}", state, layout=layout, context=CONTEXT)
    refused(
        lambda: ckptcore.load(tmp_path / "weight_v000003"),
        "weight_v000003: b is tied to another array in an earlier version", "publish a full version",
        error=CorruptCheckpointError,
    )  # fmt: skip


def test_a_version_is_relative_to_the_version_before(tmp_path: Path) -> None:
    location = publish(str(tmp_path), 1, SlimeLayout(), full=True)
    held = HeldState(version_at(location, 1), weights(1))
    refused(lambda: SlimeLayout().numbered(3).against(held), "version 3", "version 1", "full version", error=ValueError)
    assert SlimeLayout().numbered(2).against(held).name == "slime"


def test_paths_that_would_have_equal_names_are_kept_apart(tmp_path: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        return {"a": {"b": np.full(2, number)}, "a.b": np.full(2, -number), "__metadata__": np.full(3, number)}

    location = f"{tmp_path}/weight_v000001"
    ckptcore.save(location, state(1), layout=SlimeLayout().numbered(1), context=CONTEXT)
    held = HeldState(version_at(location, 1), state(1))
    ckptcore.save(f"{tmp_path}/weight_v000002", state(2), layout=SlimeLayout().against(held), context=CONTEXT)
    loaded = ckptcore.load(f"{tmp_path}/weight_v000002")
    assert (loaded["a"]["b"].tolist(), loaded["a.b"].tolist()) == ([2, 2], [-2, -2])
    assert loaded["__metadata__"].tolist() == [2, 2, 2]
    assert len(pull(tmp_path, 2)) == 3


def test_positions_of_32_bits_are_not_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime, "MAX_OVERWRITE_BYTES", 1000)
    publish(str(tmp_path), 1, SlimeLayout(), full=True)
    refused(
        lambda: publish(str(tmp_path), 2, SlimeLayout("overwrite")),
        "layers", "positions of 32 bits", "encoding='xor'",
        error=UnsupportedLeafError,
    )  # fmt: skip
    publish(str(tmp_path), 2, SlimeLayout())


def test_a_layout_can_be_pickled() -> None:
    layout = SlimeLayout("overwrite", "adler32", "/models/m").numbered(3)
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    refused(lambda: SlimeLayout("plus"), "encoding='plus'", "'xor'", error=ValueError)  # type: ignore[arg-type]
    refused(lambda: SlimeLayout("xor", "md5"), "'md5'", "'xxh3-128'", error=ValueError)  # type: ignore[arg-type]
    layout = SlimeLayout(assets=tmp_path / "missing")
    refused(lambda: publish(str(tmp_path), 1, layout, full=True), "missing", error=InvalidLocationError)
    assert not list(tmp_path.iterdir())
    place, plan = new_place("memory", tmp_path), FaultPlan()
    with pytest.raises(InvalidLocationError, match="missing"):
        ckptcore.save(through(place), {"w": np.ones(3)}, layout=layout, context=faulty_context(place, plan))
    assert not [key for operation in plan.operations for key in operation.keys if key.endswith(".safetensors")]


def test_assets_that_were_deleted_during_a_save_are_refused_by_name(tmp_path: Path) -> None:
    class Deleting(SlimeLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            state = super().write(snapshot, store)
            (tmp_path / "assets").rmdir()
            return state

    (tmp_path / "assets").mkdir()
    layout = Deleting(assets=tmp_path / "assets")
    refused(
        lambda: ckptcore.save(tmp_path / "v1", weights(1), layout=layout, context=CONTEXT),
        "assets'): there is no such directory", "not committed", error=InvalidLocationError,
    )  # fmt: skip
    assert not (tmp_path / "v1").exists()


def test_blake3_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    refused(
        lambda: publish(str(tmp_path), 1, SlimeLayout("xor", "blake3"), full=True),
        "pip install 'ckptcore-versions[blake3]'",
        error=MissingDistributionError,
    )
    assert not list(tmp_path.iterdir())


def test_processes_with_different_bases_do_not_publish(tmp_path: Path) -> None:
    publish_all(str(tmp_path), 2, SlimeLayout(), full=(1, 2))

    def save(rank: int, context: ckptcore.Context) -> None:
        base = version_at(f"{tmp_path}/weight_v{rank + 1:06d}", 2)
        layout = SlimeLayout().against(HeldState(base, weights(2)))
        ckptcore.save(tmp_path / "weight_v000003", weights(3), layout=layout, context=context)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(2, save)
    assert "every process must hold the same version" in str(caught.value.exceptions[0])
    assert not (tmp_path / "weight_v000003").exists()
