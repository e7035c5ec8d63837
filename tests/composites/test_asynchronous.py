"""Asynchronous saves of several objects: captured state, and limits of memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.io.memory import StagingMemory
from tests.composites.objects import Counter, Files, Linear


@pytest.mark.parametrize("save_bytes", [None, 1, 1000])
def test_changes_after_the_call_are_not_saved(save_bytes: int | None, place: str) -> None:
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=save_bytes))
    model, data, files = Linear(3), Counter(4), Files({"a": b"then"})
    params: dict[str, Any] = {"layers": [np.arange(500.0), [1, 2]], "name": "then"}
    written = threading.Event()
    files.then = lambda directory: None if written.wait(60) else pytest.fail("the main thread did not continue")
    objects: dict[str, object] = {"files": files, "model": model, "data": data, "params": params}
    handle = (
        ckptcore.save_checkpointables_async(place + "/c", objects, metadata={"at": 1}, context=context)
        if (save_bytes is None)
        else _bounded(place + "/c", objects, context, written)
    )
    model.weight[...] = -1
    model.bias += 7
    next(data)
    data.seen.clear()
    files.files["a"] = b"now"
    params["layers"][0][...] = -1
    params["layers"][1].append(3)
    params["name"] = "now"
    objects.clear()
    written.set()
    handle.result()
    loaded = ckptcore.load_checkpointables(place + "/c")
    assert same_value(loaded["model"], Linear(3).get_state_tree())
    assert loaded["data"] == {"position": 4, "seen": [0, 1, 2, 3]}
    assert loaded["files"] == {"a": b"then"}
    assert same_value(loaded["params"], {"layers": [np.arange(500.0), [1, 2]], "name": "then"})


def _bounded(location: str, objects: dict[str, object], context: ckptcore.Context, written: threading.Event) -> Any:
    """Save with a memory limit. Let the writer continue, because the call returns only after all copies are made."""
    written.set()
    return ckptcore.save_checkpointables_async(location, objects, metadata={"at": 1}, context=context)


def test_the_caller_can_change_the_state_before_the_files_are_written(tmp_path: Path) -> None:
    """The writer pauses after the save returned."""
    go_on = threading.Event()
    files = Files({"a": b"1"})
    files.then = lambda directory: None if go_on.wait(60) else pytest.fail("the main thread did not continue")
    handle = ckptcore.save_checkpointables_async(tmp_path / "c", {"files": files, "model": Linear(1)})
    assert not handle.done() and not (tmp_path / "c").exists()
    go_on.set()
    handle.result()
    assert ckptcore.verify(tmp_path / "c").ok


@pytest.mark.parametrize("limit", [50_000, 400_000])
def test_a_memory_limit_applies_to_all_members(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = most = 0
    lock = threading.Lock()
    copy, release = StagingMemory.copy, StagingMemory.release

    def counted_copy(self: StagingMemory, source: Any) -> Any:
        nonlocal held, most
        with lock:
            held += source.nbytes
            most = max(most, held)
        return copy(self, source)

    def counted_release(self: StagingMemory, array: Any) -> None:
        nonlocal held
        with lock:
            held -= array.nbytes
        release(self, array)

    monkeypatch.setattr(StagingMemory, "copy", counted_copy)
    monkeypatch.setattr(StagingMemory, "release", counted_release)
    trees = {f"member {m}": {f"{n}": np.full(5000, 10 * m + n, "f8") for n in range(9)} for m in range(4)}
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=limit))
    handle = ckptcore.save_checkpointables_async(
        tmp_path / "c", {**trees, "files": Files({"a": b"1"})}, context=context
    )
    for tree in trees.values():
        for array in tree.values():
            array[...] = -1
    handle.result()
    assert held == 0
    # A small member is copied whole even if it exceeds the limit, but two members are never copied at a time.
    assert 0 < most <= max(limit, 9 * 40_000)
    for m in range(4):
        loaded = ckptcore.load(tmp_path / "c" / f"member {m}")
        assert all((loaded[f"{n}"] == 10 * m + n).all() for n in range(9))


def test_progress_counts_every_member(tmp_path: Path) -> None:
    handle = ckptcore.save_checkpointables_async(
        tmp_path / "c", {"one": {"w": np.ones(1000)}, "two": {"w": np.ones(2000)}, "files": Files({"a": b"x" * 5000})}
    )
    handle.result()
    assert handle.progress.total == 24_000
    assert handle.progress.done == 24_000
