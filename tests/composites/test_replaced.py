"""Checkpoints of several objects that are replaced while somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.testing.faults import FaultPlan
from tests.crashes.places import InterruptedPlan, faulty_context, through


def _save(location: str, version: int) -> None:
    objects = {name: {"version": version, "w": np.full(3, version)} for name in ("a", "b")}
    ckptcore.save_checkpointables(location, objects, overwrite="non-atomic", metadata={"version": version})


def _load_member(location: str, context: ckptcore.Context) -> set[Any]:
    loaded = ckptcore.load(location + "/a", context=context)
    return {loaded["version"], *loaded["w"].tolist()}


def _member_metadata(location: str, context: ckptcore.Context) -> set[Any]:
    return {ckptcore.metadata(location + "/a", context=context).abstract["version"]}


def _metadata(location: str, context: ckptcore.Context) -> set[Any]:
    found = ckptcore.checkpointables_metadata(location, context=context)
    assert not found.deleted
    assert {told.save_id for told in found.checkpointables.values()} == {found.save_id}
    return {found.custom["version"], *(told.abstract["version"] for told in found.checkpointables.values())}


def _verify(location: str, context: ckptcore.Context) -> set[Any]:
    report = ckptcore.verify(location, context=context)
    assert report.ok, report
    return {1}


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("read", [_load_member, _member_metadata, _metadata, _verify])
def test_what_is_read_is_of_one_save(
    read: Callable[[str, ckptcore.Context], set[Any]], scheme: str, tmp_path: Path
) -> None:
    """It is replaced before each operation of a read: nothing fails, and all is of the old one or of the new one."""
    above = f"file://{tmp_path}" if scheme == "file" else f"memory://{tmp_path.name}"
    _save(f"{above}/count", 1)
    counting = FaultPlan()
    read(through(f"{above}/count"), faulty_context(f"{above}/count", counting))
    for number in range(len(counting.operations)):
        location = f"{above}/{number}"
        _save(location, 1)
        plan = InterruptedPlan(number, lambda location=location: _save(location, 2))  # type: ignore[misc]  # bound now
        versions = read(through(location), faulty_context(location, plan))
        assert plan.interrupted and len(versions) == 1, f"a mix of {versions}, after operation {number}"
