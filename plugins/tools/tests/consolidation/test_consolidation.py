"""Consolidation: one process converts checkpoints of any layout to one directory of safetensors."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing.locations import InterruptedPlan, faulty_context, new_place, through
from safetensors import safe_open
from safetensors.numpy import load_file

import ckptcore
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    NameCollisionError,
    TreeMismatchError,
)

FAST = ckptcore.Context(durability="none", memory=ckptcore.context.MemoryOptions(load_bytes=24 << 10))
"""A Context with memory for pieces of 8 KiB."""


def sample() -> dict[str, Any]:
    """Return a state whose model has every kind of array."""
    shared = np.arange(6000, dtype=np.float32).reshape(60, 100)
    model = {
        "embed.weight": shared,
        "layers": [{"w": np.arange(4096, dtype=np.int64).reshape(2, 2, 1024)}, {"w": np.ones((3, 5), np.float16)}],
        "head": shared,
        "scale": np.array(0.5),
        "none": np.zeros((0, 4), np.float32),
        "half": np.arange(20000).astype(ml_dtypes.bfloat16),
        "complex": np.arange(3000) * 1j,
        "transposed": np.arange(6000, dtype=np.int32).reshape(60, 100).T,
        "version": 3,
    }
    return {"model": model, "optimizer": {"moment": np.ones(10)}, "step": 7}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    ckptcore.save(tmp_path / "source", sample(), layout="zarr3", metadata={"run": "a"}, context=FAST)
    return tmp_path / "source"


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory, except the checkpoint's own metadata, which contains the save id."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith("checkpoint.")}


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3", "ocdbt"])
def test_consolidation_writes_the_same_files_as_a_save(layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "source", sample(), layout=layout, context=FAST)
    ckptcore.copy(
        tmp_path / "source",
        tmp_path / "hf",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=40_000),
        subtree="model",
        tied="once",
        context=FAST,
    )
    expected = ckptcore.SafetensorsLayout(max_file_bytes=40_000, standalone=True)
    ckptcore.save(tmp_path / "saved", sample()["model"], layout=expected, context=FAST)
    assert files_of(tmp_path / "hf") == files_of(tmp_path / "saved")
    assert ckptcore.verify(tmp_path / "hf").ok
    loaded = ckptcore.load(tmp_path / "hf")
    assert loaded["version"] == 3 and loaded["head"] is loaded["embed.weight"]
    assert np.array_equal(loaded["complex"], sample()["model"]["complex"])


def test_hugging_face_reads_the_index(source: Path, tmp_path: Path) -> None:
    ckptcore.copy(
        source,
        tmp_path / "hf",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=40_000),
        subtree=("model",),
        context=FAST,
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 2
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    loaded = {name: array for file in files for name, array in load_file(tmp_path / "hf" / file).items()}
    assert set(loaded) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in loaded.values())
    assert np.array_equal(loaded["layers.0.w"], sample()["model"]["layers"][0]["w"])
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "np") as reader:
            assert name in reader.keys()  # noqa: SIM118  # not a mapping


def test_a_tree_can_be_written_as_one_file(source: Path, tmp_path: Path) -> None:
    ckptcore.copy(source, tmp_path / "hf", subtree=(), context=FAST)
    assert {"model.embed.weight", "optimizer.moment"} <= set(load_file(tmp_path / "hf" / "model.safetensors"))
    assert ckptcore.load(tmp_path / "hf")["step"] == 7
    assert ckptcore.metadata(tmp_path / "hf").custom == {"run": "a"}


def test_a_part_can_contain_arrays_tied_to_others(tmp_path: Path) -> None:
    shared = np.arange(10.0)
    ckptcore.save(tmp_path / "source", {"a": shared, "b": {"c": shared, "d": shared}}, context=FAST)
    ckptcore.copy(tmp_path / "source", tmp_path / "hf", subtree="b", context=FAST)
    arrays = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: array.tolist() for name, array in arrays.items()} == {"c": shared.tolist(), "d": shared.tolist()}
    loaded = ckptcore.load(tmp_path / "hf")
    assert loaded["d"].tolist() == shared.tolist() and loaded["d"] is loaded["c"]


def test_a_tree_without_arrays_is_consolidated(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "source", {"step": 1}, context=FAST)
    ckptcore.copy(tmp_path / "source", tmp_path / "hf", subtree=(), context=FAST)
    assert load_file(tmp_path / "hf" / "model.safetensors") == {}
    assert ckptcore.load(tmp_path / "hf") == {"step": 1}


def test_one_of_several_checkpointables(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "several", {"model": {"net": {"w": np.ones(3)}}, "rng": {"x": np.ones(1)}})
    with pytest.raises(CompositeCheckpointError, match="model, rng"):
        ckptcore.copy(tmp_path / "several", tmp_path / "hf", subtree=(), context=FAST)
    ckptcore.copy(tmp_path / "several", tmp_path / "hf", subtree="model/net", context=FAST)
    assert list(load_file(tmp_path / "hf" / "model.safetensors")) == ["w"]


def test_extra_files_are_copied_and_verified(source: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "empty.txt").touch()
    ckptcore.copy(
        source,
        tmp_path / "hf",
        layout=ckptcore.SafetensorsLayout(stem="adapter_model"),
        subtree=(),
        files=[tmp_path / "config.json", str(tmp_path / "empty.txt")],
        context=FAST,
    )
    names = {"config.json", "empty.txt", "adapter_model.safetensors", "checkpoint.json"}
    assert names <= {path.name for path in (tmp_path / "hf").iterdir()}
    assert (tmp_path / "hf" / "config.json").read_text() == '{"model_type": "bert"}'
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt2"}')
    assert [problem.key for problem in ckptcore.verify(tmp_path / "hf").problems] == ["config.json"]


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["nothing.json"], InvalidLocationError),
        (["below"], InvalidLocationError),
        (["a/config.json", "config.json"], NameCollisionError),
        (["model.safetensors"], NameCollisionError),
        (["model.safetensors.index.json"], NameCollisionError),
        (["checkpoint.json"], NameCollisionError),
    ],
)
def test_bad_extra_files_are_refused(names: list[str], error: type[Exception], source: Path, tmp_path: Path) -> None:
    (tmp_path / "files" / "a").mkdir(parents=True)
    (tmp_path / "files" / "below").mkdir()
    for name in (
        "a/config.json",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "checkpoint.json",
    ):
        (tmp_path / "files" / name).touch()
    with pytest.raises(error, match="is not a file|cannot be added"):
        ckptcore.copy(
            source, tmp_path / "hf", subtree=(), files=[tmp_path / "files" / name for name in names], context=FAST
        )
    assert not (tmp_path / "hf").exists()


def test_invalid_arguments_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(TreeMismatchError, match="modle"):
        ckptcore.copy(source, tmp_path / "hf", subtree="modle", context=FAST)
    with pytest.raises(InvalidLocationError, match="both source and destination"):
        ckptcore.copy(source, source, subtree=(), overwrite=True, context=FAST)
    with pytest.raises(ValueError, match="max_file_bytes"):
        ckptcore.copy(
            source, tmp_path / "hf", layout=ckptcore.SafetensorsLayout(max_file_bytes=0), subtree=(), context=FAST
        )
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").touch()
    with pytest.raises(CheckpointExistsError):
        ckptcore.copy(source, tmp_path / "hf", subtree=(), context=FAST)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine"]


@pytest.mark.parametrize("options", [{"subtree": ()}, {"layout": "safetensors"}], ids=["part", "whole"])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_replaced_checkpoint_cannot_contain_the_source(options: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    """The destination may be neither a parent directory of the source nor one of the source's checkpointables."""
    steps = str(tmp_path) if scheme == "file" else f"memory://consolidation/{next(iter(options))}"
    ckptcore.save_checkpointables(f"{steps}/c", {"model": {"w": np.ones(3)}, "rest": {"m": np.zeros(3)}}, context=FAST)
    make: Any = functools.partial(ckptcore.copy, **options, overwrite="non-atomic", context=FAST)
    for source, destination in (("c/model", "c"), ("c/model", ""), ("c", "c/rest"), ("c/rest", "c/rest")):
        with pytest.raises(
            InvalidLocationError, match=r"contains the source|one of the checkpointables|both source and destination"
        ):
            make(f"{steps}/{source}", f"{steps}/{destination}".rstrip("/"))
    for _ in range(2):
        make(f"{steps}/c/model", f"{steps}/c/plain")
        make(f"{steps}/c/model", f"{steps}/c/model/plain")
    loaded = ckptcore.load_checkpointables(f"{steps}/c")
    assert loaded["model"]["w"].tolist() == [1, 1, 1] and loaded["rest"]["m"].tolist() == [0, 0, 0]
    assert ckptcore.verify(f"{steps}/c").ok and ckptcore.load(f"{steps}/c/plain")["w"].tolist() == [1, 1, 1]


def test_a_checkpointable_cannot_replace_its_own_checkpoint(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(
        tmp_path / "c", {"model": {"w": np.ones(3)}, "rest": {"m": np.zeros(3)}}, context=FAST
    )
    with pytest.raises(InvalidLocationError, match="both source and destination"):
        ckptcore.copy(tmp_path / "c", tmp_path / "c", subtree="model", overwrite=True, context=FAST)
    assert set(ckptcore.load_checkpointables(tmp_path / "c")) == {"model", "rest"}


def test_damage_is_reported_and_not_copied(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "source", sample(), context=FAST)
    data = bytearray((tmp_path / "source" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "source" / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="this is in model/half"):
        ckptcore.copy(tmp_path / "source", tmp_path / "hf", subtree="model", context=FAST)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("late", [False, True])
def test_a_source_that_is_replaced_during_the_copy_is_read_again(late: bool, source: Path, tmp_path: Path) -> None:
    """An early replacement removes objects before they are read. After a late one, all objects were read, perhaps from
    two saves.
    """

    def replace(done: int, total: int) -> None:
        if not replaced and (done >= total - 1 or not late):  # `total` is reported after the commit
            replaced.append(done)
            ckptcore.save(source, {"model": {"w": np.zeros(4)}}, layout="zarr3", overwrite=True, context=FAST)

    replaced: list[int] = []
    ckptcore.copy(
        source,
        tmp_path / "hf",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=40_000),
        subtree=(),
        progress=replace,
        context=FAST,
    )
    assert replaced and list(ckptcore.load(tmp_path / "hf")["model"]) == ["w"]


@pytest.mark.parametrize("task", ["save", "delete", "delete and save"])
def test_a_source_may_change_before_each_operation(task: str, tmp_path: Path) -> None:
    def save(place: str, value: int) -> None:
        ckptcore.save(place, {"model": {"w": np.full(9, value)}, "n": 1}, overwrite="non-atomic", context=FAST)

    def change(place: str) -> None:
        if task != "save":
            ckptcore.delete(place, context=FAST)
        if task != "delete":
            save(place, 2)

    values = set()
    for scheme in ("file", "memory"):
        for number in itertools.count():
            place, copied = new_place(scheme, tmp_path), new_place("memory", tmp_path)
            save(place, 1)
            plan = InterruptedPlan(number, functools.partial(change, place))
            try:
                ckptcore.copy(through(place), copied, subtree="model", context=faulty_context(place, plan))
            except CheckpointNotFoundError:
                assert task == "delete"
            else:
                values.add(int(ckptcore.load(copied)["w"][0]))
            if not plan.interrupted:
                break
    assert values <= {1, 2} and (2 in values) == (task != "delete")


def test_progress_ends_at_the_total(source: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    ckptcore.copy(source, tmp_path / "hf", subtree=(), progress=lambda *amounts: reports.append(amounts), context=FAST)
    nbytes = sum(array.nbytes for array in load_file(tmp_path / "hf" / "model.safetensors").values())
    assert reports[-1] == (nbytes, nbytes)
