"""Checkpoints of several objects that are replaced during a read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.locations import InterruptedPlan, faulty_context, through

import ckptcore
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError


def _save(location: str, version: int) -> None:
    objects = {name: {"version": version, "w": np.full(3, version)} for name in ("a", "b")}
    ckptcore.save_checkpointables(location, objects, overwrite="non-atomic", metadata={"version": version})


def _load_member(location: str, context: ckptcore.Context) -> set[Any]:
    loaded = ckptcore.load(location + "/a", context=context)
    return {loaded["version"], *loaded["w"].tolist()}


def _member_metadata(location: str, context: ckptcore.Context) -> set[Any]:
    return {ckptcore.metadata(location + "/a", context=context).abstract["version"]}


def _metadata(location: str, context: ckptcore.Context) -> set[Any]:
    metadata = ckptcore.metadata(location, context=context)
    assert not metadata.checkpointables.deleted
    assert {told.save_id for told in metadata.checkpointables.values()} == {metadata.save_id}
    return {metadata.custom["version"], *(told.abstract["version"] for told in metadata.checkpointables.values())}


def _verify(location: str, context: ckptcore.Context) -> set[Any]:
    report = ckptcore.verify(location, context=context)
    assert report.ok, report
    return {1}


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("read", [_load_member, _member_metadata, _metadata, _verify])
def test_a_load_returns_the_state_of_one_save(
    read: Callable[[str, ckptcore.Context], set[Any]], scheme: str, tmp_path: Path
) -> None:
    """The checkpoint is replaced before each operation of a read. The result is of the old or of the new save."""
    above = f"file://{tmp_path}" if scheme == "file" else f"memory://{tmp_path.name}"
    _save(f"{above}/count", 1)
    counting = FaultPlan()
    read(through(f"{above}/count"), faulty_context(f"{above}/count", counting))
    for number in range(len(counting.operations)):
        location = f"{above}/{number}"
        _save(location, 1)
        plan = InterruptedPlan(number, lambda location=location: _save(location, 2))  # type: ignore[misc]  # the default binds the value
        versions = read(through(location), faulty_context(location, plan))
        assert plan.interrupted and len(versions) == 1, f"a mix of {versions}, after operation {number}"


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("composite", [False, True])
def test_a_source_replaced_during_the_conversion_is_detected(composite: bool, scheme: str, tmp_path: Path) -> None:
    above = f"file://{tmp_path}" if scheme == "file" else f"memory://{tmp_path.name}"
    source, destination = f"{tmp_path}/source", f"{above}/destination"

    def save(version: int) -> None:
        tree = {"w": np.full(3, version)}
        if composite:
            ckptcore.save_checkpointables(source, {"a": tree}, overwrite=True)
        else:
            ckptcore.save(source, tree, overwrite=True)

    save(1)
    calls: list[int] = []

    def replace(*_: int) -> None:
        calls.append(1)
        if len(calls) == 1:
            save(2)

    ckptcore.copy(source, destination, layout="safetensors", progress=replace)
    assert ckptcore.load(destination + ("/a" if composite else ""))["w"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_conversion_does_not_replace_a_concurrent_save(scheme: str, tmp_path: Path) -> None:
    above = f"file://{tmp_path}" if scheme == "file" else f"memory://{tmp_path.name}"
    source, destination = f"{above}/source", f"{above}/destination"
    ckptcore.save(source, {"w": np.full(3, 1)})
    other = {"w": np.full(3, 7)}

    class Meanwhile(FaultPlan):
        """Replaces the source and the destination once the converted checkpoint exists."""

        done = False

        def begin(self, name: str, keys: Any, offset: int = 0, nbytes: int = 0) -> Any:
            if not self.done:
                try:
                    there = ckptcore.load(destination)["w"].tolist()
                except CheckpointNotFoundError:
                    there = None
                if there == [1, 1, 1]:
                    self.done = True
                    ckptcore.save(source, {"w": np.full(3, 2)}, overwrite="non-atomic")
                    ckptcore.save(destination, other, overwrite="non-atomic")
            return super().begin(name, keys, offset, nbytes)

    plan = Meanwhile()
    with pytest.raises(CheckpointExistsError):
        ckptcore.copy(through(source), through(destination), layout="safetensors", context=faulty_context(source, plan))
    assert plan.done
    assert ckptcore.load(destination)["w"].tolist() == [7, 7, 7]
