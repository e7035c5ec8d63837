"""Memory that asynchronous saves still hold when they have ended, in particular after a failure."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.builtin.local import LocalStorage
from ckptcore.errors import StorageError, StorageFullError
from ckptcore.protocols import HostMemory, Snapshot, WriteStore
from ckptcore.results import SaveHandle
from ckptcore.runtime import runtime_of
from tests.composites.objects import Files
from tests.saving.test_save_async import Gate

_BOUNDS = [None, 1 << 30]


class _BrokenLayout(ckptcore.SafetensorsLayout):
    """A layout whose write fails while it holds the arrays. Its error has a cause."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> Any:
        arrays = snapshot.take(0)
        try:
            raise OSError(f"{len(arrays)} arrays do not fit")
        except OSError as error:
            raise StorageError("the disk is on fire") from error


def _fail_to_save(location: Path, context: ckptcore.Context) -> tuple[SaveHandle, weakref.ref[Any]]:
    array = np.ones(1 << 20)
    handle = ckptcore.save_async(location, {"w": array}, layout=_BrokenLayout(), context=context)
    return handle, weakref.ref(array)


@pytest.mark.parametrize("limit", _BOUNDS)
def test_the_arrays_of_a_failed_save_are_freed_before_its_result_is_read(limit: int | None, tmp_path: Path) -> None:
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=limit))
    handle, array = _fail_to_save(tmp_path / "c", context)
    runtime_of(context).saves.wait()
    gc.collect()
    assert array() is None
    with pytest.raises(StorageError, match="on fire"):
        handle.result()


def test_a_failed_save_is_freed_after_its_result_was_read(tmp_path: Path) -> None:
    context = ckptcore.Context()

    def train() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        """Hold an array in the frame in which the error is raised, because the error refers to this frame."""
        more = np.ones(1 << 20)
        handle, _ = _fail_to_save(tmp_path / "c", context)
        with pytest.raises(StorageError, match="on fire"):
            handle.result()
        return weakref.ref(handle), weakref.ref(more)

    handle, more = train()
    gc.collect()
    assert handle() is None and more() is None


def test_an_object_is_released_when_its_second_phase_fails(tmp_path: Path) -> None:
    context = ckptcore.Context()
    broken = Files({"a": b"1"})
    broken.late_error = RuntimeError("this object is broken")
    reference = weakref.ref(broken)
    handle = ckptcore.save_checkpointables_async(tmp_path / "c", {"files": broken}, context=context)
    with pytest.raises(RuntimeError, match="broken"):
        handle.result()
    del broken, handle
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_the_arrays_of_the_caller_are_released_before_the_commit(
    limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, go_on = threading.Event(), threading.Event()
    put = LocalStorage.put

    def wait_to_put(self: LocalStorage, key: str, data: bytes, **options: Any) -> str:
        commits.set()
        assert go_on.wait(60)
        return put(self, key, data, **options)

    monkeypatch.setattr(LocalStorage, "put", wait_to_put)
    context = ckptcore.Context(memory=ckptcore.context.MemoryOptions(save_bytes=limit))
    array = np.ones(1 << 20)
    reference = weakref.ref(array)
    handle = ckptcore.save_async(tmp_path / "c", {"w": array}, context=context)
    del array
    try:
        assert commits.wait(60)
        gc.collect()
        assert reference() is None and not handle.done()
    finally:
        go_on.set()
    handle.result()


class _CopiesAfterwards(ckptcore.builtin.host_leaves.HostArrayHandler):
    """A handler that begins to copy, and continues only after the save has ended."""

    def __init__(self, context: list[ckptcore.Context]) -> None:
        self._context = context
        self.began = threading.Event()

    def copy_to_host(self, leaf: Any, boxes: Any, memory: HostMemory) -> Any:
        self.began.set()
        runtime_of(self._context[0]).saves.wait()
        return super().copy_to_host(leaf, boxes, memory)


def test_a_bounded_save_raises_the_error_of_its_layout(gate: Gate) -> None:
    contexts: list[ckptcore.Context] = []
    handler = _CopiesAfterwards(contexts)
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=[gate], handlers={np.ndarray: handler}),
        memory=ckptcore.context.MemoryOptions(save_bytes=1 << 30),
    )
    contexts.append(context)

    class Full(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Snapshot, store: WriteStore) -> Any:
            assert handler.began.wait(60)
            raise StorageFullError(28, "No space left on device")

    handle = ckptcore.save_async("gate://a/b", {"w": np.ones(1 << 20)}, layout=Full(), context=context)
    with pytest.raises(StorageFullError, match="No space left"):
        handle.result()
    with pytest.raises(StorageFullError, match="No space left"):  # the error of this save; the earlier error was read
        ckptcore.save("gate://a/b", {"w": 1}, layout=Full(), context=context)


@pytest.fixture
def gate() -> Gate:
    gate = Gate()
    gate.open.set()
    return gate


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no fork")
def test_a_context_registers_no_fork_hook_and_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **given: hooks.append(given))
    references = [weakref.ref(runtime_of(ckptcore.Context()).saves) for _ in range(3)]
    gc.collect()
    assert hooks == [] and [reference() for reference in references] == [None] * 3
