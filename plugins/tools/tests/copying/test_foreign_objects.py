"""Objects of another save at the destination of a copy, with the names and sizes of the copy's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.faults import CrashAt, FaultPlan, SimulatedCrash
from ckptcore_testing.locations import faulty_context, new_place, objects_at, store_at, through

import ckptcore
from ckptcore.builtin.memory import MemoryStorage
from ckptcore.errors import StorageError

_FAST = ckptcore.Context(io=ckptcore.context.IOOptions(threads=1))


def _state(version: int) -> dict[str, object]:
    return {"w": np.full(300_000, version, np.float64)}


def _leave_dead_save(location: str) -> None:
    """Leave objects of a save with the same shapes that crashed right before its commit."""
    plan = FaultPlan()
    spare = location + "-spare"
    ckptcore.save(through(spare), _state(1), context=faulty_context(spare, plan))
    commit = [
        operation
        for operation in plan.operations
        if operation.name == "put" and operation.keys[0].endswith("checkpoint.json")
    ][-1]
    with pytest.raises(SimulatedCrash):
        ckptcore.save(through(location), _state(1), context=faulty_context(location, FaultPlan(CrashAt(commit.number))))


def _hide_all_but_the_claim(patch: pytest.MonkeyPatch, location: str) -> None:
    """Make the first listing of the destination stale, so that it contains only the claim of the failed save."""
    real, bucket = MemoryStorage.list, location.split("/")[2]
    is_old = True

    def list_keys(storage: MemoryStorage, prefix: str = "") -> Iterator[str]:
        nonlocal is_old
        if not is_old or bucket not in repr(storage):
            return real(storage, prefix)
        is_old = False
        return iter([key for key in real(storage, prefix) if key.endswith("checkpoint.json")])

    patch.setattr(MemoryStorage, "list", list_keys)


def test_objects_hidden_by_a_stale_list_are_not_part_of_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, there = (new_place("memory", tmp_path) for _ in range(2))
    ckptcore.save(source, _state(2), context=_FAST)
    _leave_dead_save(there)
    name = next(key for key in store_at(there).list() if "safetensors" in key)
    assert store_at(there).size(name) == store_at(source).size(name)
    _hide_all_but_the_claim(monkeypatch, there)
    ckptcore.copy(source, there, context=_FAST)
    np.testing.assert_array_equal(ckptcore.load(there)["w"], _state(2)["w"])


def test_late_objects_are_not_part_of_a_resumed_copy(tmp_path: Path) -> None:
    """A save that lost its claim puts an object after the copy began, before another copy resumes it."""
    source, there, other = (new_place("memory", tmp_path) for _ in range(3))
    ckptcore.save(source, _state(2), context=_FAST)
    ckptcore.save(other, _state(1), context=_FAST)
    with pytest.raises(StorageError):
        _copy_without_objects(source, there)
    name = next(key for key in store_at(other).list() if "safetensors" in key)
    store_at(there).put(name, store_at(other).get(name))
    ckptcore.copy(source, there, context=_FAST)
    np.testing.assert_array_equal(ckptcore.load(there)["w"], _state(2)["w"])


def test_longer_objects_are_replaced(tmp_path: Path) -> None:
    """The object begins with all the expected bytes. Only its size shows that it belongs to another save."""
    source, there = (new_place("memory", tmp_path) for _ in range(2))
    ckptcore.save(source, _state(2), context=_FAST)
    with pytest.raises(StorageError):
        _copy_without_objects(source, there)
    name = next(key for key in store_at(source).list() if "safetensors" in key)
    store_at(there).put(name, store_at(source).get(name) + b"and more")
    report = ckptcore.copy(source, there, context=_FAST)
    assert report.kept_bytes == 0
    assert objects_at(there) == objects_at(source)


def _copy_without_objects(source: str, there: str) -> None:
    """Start a copy that claims the destination, and fails before it writes an object."""
    with pytest.MonkeyPatch.context() as patch:

        def fail(*arguments: object) -> None:
            raise StorageError("the test lets no object be begun")

        patch.setattr(MemoryStorage, "open_new", fail)
        ckptcore.copy(source, there, context=_FAST)
