"""Composites: metadata, verification, conversion, and the bytes that a load of one name reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.locations import InterruptedPlan, faulty_context, through
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import CheckpointExistsError
from tests.composites.objects import Counter, Files, Linear


def save_all(location: str, version: int = 3, **options: object) -> None:
    objects = {"model": Linear(version), "data": Counter(version), "files": Files({"a/b": b"%d" % version, "c": b""})}
    ckptcore.save_checkpointables(location, objects, **options)  # type: ignore[arg-type]  # the options are passed on


def test_metadata_can_be_read_by_name(place: str) -> None:
    save_all(place + "/c", metadata={"note": [1, None]})
    metadata = ckptcore.metadata(place + "/c")
    assert metadata.custom == {"note": [1, None]} and metadata.checkpointables.deleted == ()
    assert metadata.checkpointables.processes == {"data": 1, "files": 1}
    model = metadata.checkpointables["model"]
    assert model.abstract == {
        "weight": ckptcore.AbstractArray((3, 4), "float32"), "bias": ckptcore.AbstractArray((4,), "float64"),
    }  # fmt: skip
    assert model.save_id == metadata.save_id and model.layout == "safetensors" and model.nbytes == 80
    assert list(metadata.checkpointables["files"].objects) == ["a/b", "c"]
    assert metadata.nbytes == 81
    loaded = ckptcore.load_checkpointables(place + "/c", {"model": model.abstract})
    assert same_value(loaded["model"], Linear(3).get_state_tree())
    assert "write" in [event.phase for event in metadata.timeline]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_loading_one_name_does_not_read_the_others(scheme: str, tmp_path: Path) -> None:
    location = f"file://{tmp_path}/c" if scheme == "file" else f"memory://{tmp_path.name}/c"
    save_all(location)
    wanted: Sequence[dict[str, Any]] = (
        {"abstract": ["model"]},
        {"into": {"model": Linear(0)}},
        {"abstract": {"model": None, "data": ckptcore.PLACEHOLDER}},
    )
    for how in wanted:
        plan = FaultPlan()
        ckptcore.load_checkpointables(through(location), **how, context=faulty_context(location, plan))
        read = [operation for operation in plan.operations if operation.name != "list_names"]
        assert read and not [operation for operation in plan.operations if operation.changes]
        keys = {key.removeprefix("c/") for operation in read for key in operation.keys}
        assert keys - {"checkpoint.json"} == {"model/checkpoint.json", "model/model.safetensors"}


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_members_are_found_with_one_listing_for_any_number_of_processes(scheme: str, tmp_path: Path) -> None:
    location = f"file://{tmp_path}/c" if scheme == "file" else f"memory://{tmp_path.name}/c"
    ckptcore.save_checkpointables(location, {f"tree {number}": {"w": np.ones(1)} for number in range(20)})
    plan = FaultPlan()
    ckptcore.load_checkpointables(through(location), ["tree 7"], context=faulty_context(location, plan))
    assert [operation.name for operation in plan.operations].count("list_names") == 1


def test_verification_covers_every_object(tmp_path: Path) -> None:
    save_all(str(tmp_path / "c"))
    paths = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    report = ckptcore.verify(tmp_path / "c")
    assert report.ok and report.objects == len(paths)
    progress: list[tuple[int, int]] = []
    ckptcore.verify(tmp_path / "c", progress=lambda done, total: progress.append((done, total)))
    assert max(progress)[0] == progress[0][1] == report.nbytes
    for path in paths:
        content = path.read_bytes()
        if not content:
            continue
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        key = path.relative_to(tmp_path / "c").as_posix()
        problems = ckptcore.verify(tmp_path / "c").problems
        assert {problem.key for problem in problems} == {key}
        if key.startswith("model/model"):
            assert problems[0].arrays[0].startswith("model: ")
        path.write_bytes(content)
    assert ckptcore.verify(tmp_path / "c").ok


def test_all_members_convert_to_another_location_and_layout(tmp_path: Path) -> None:
    source, middle = str(tmp_path / "c"), f"memory://{tmp_path.name}/middle"
    save_all(source, metadata={"note": "kept"})
    ckptcore.copy(source, middle, layout="safetensors")
    done: list[tuple[int, int]] = []
    ckptcore.copy(
        middle,
        tmp_path / "back",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=50),
        progress=lambda written, total: done.append((written, total)),
    )
    assert done[-1][0] == done[-1][1]
    assert len(list((tmp_path / "back" / "model").glob("*.safetensors"))) == 2
    original, back = ckptcore.load_checkpointables(source), ckptcore.load_checkpointables(tmp_path / "back")
    assert same_value(back, original)
    metadata = ckptcore.metadata(tmp_path / "back")
    assert metadata.custom == {"note": "kept"} and metadata.save_id != ckptcore.metadata(source).save_id
    with pytest.raises(CheckpointExistsError):
        ckptcore.copy(source, tmp_path / "back", layout="safetensors")
    ckptcore.copy(source, tmp_path / "back", layout="safetensors", overwrite=True)
    assert ckptcore.verify(tmp_path / "back").ok


def test_all_roots_have_one_format_version(tmp_path: Path) -> None:
    save_all(str(tmp_path / "several"))
    ckptcore.save(tmp_path / "one", {"a": 1})
    versions = {
        path.relative_to(tmp_path).as_posix(): json.loads(path.read_bytes())["version"]
        for path in tmp_path.rglob("checkpoint.json")
    }
    assert versions.pop("one/checkpoint.json") == 1
    assert len(versions) == 4 and set(versions.values()) == {1}


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_load_during_an_overwrite_returns_one_save(scheme: str, tmp_path: Path) -> None:
    """The checkpoint is replaced before each operation of a load. The load returns either the old or the new save."""
    above = f"file://{tmp_path}" if scheme == "file" else f"memory://{tmp_path.name}"
    save_all(f"{above}/count")
    counting = FaultPlan()
    into = {"model": Linear(0), "files": Files()}
    ckptcore.load_checkpointables(
        through(f"{above}/count"), ["data"], into=into, context=faulty_context(above + "/count", counting)
    )
    overtaken = set()
    for number in range(len(counting.operations)):
        location = f"{above}/{number}"
        save_all(location, 1)
        plan = InterruptedPlan(number, lambda location=location: save_all(location, 2, overwrite="non-atomic"))  # type: ignore[misc]  # the default binds the value
        model, files = Linear(0), Files()
        loaded = ckptcore.load_checkpointables(
            through(location),
            {"data": None},
            into={"model": model, "files": files},
            context=faulty_context(location, plan),
        )
        assert plan.interrupted
        version = loaded["data"]["position"]
        assert model.bias.tolist() == Linear(version).bias.tolist(), f"a mix, after operation {number}"
        assert files.files == {"a/b": b"%d" % version, "c": b""}
        overtaken.add(version)
    assert overtaken == {1, 2} or overtaken == {2}
