"""Early uploads: a save to a far storage uploads its first parts before the last array has left its device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import FarStorage

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import StorageError
from ckptcore.model import Box, HostArray, Pending
from ckptcore.protocols import HostMemory, StorageBackend, StorageOptions
from ckptcore.runtime import runtime_of

MIB = 1 << 20
LAST = 7


class Far:
    """A plugin with a far storage. It sets `part_came` when the first part arrives."""

    def __init__(self) -> None:
        self.part_came = threading.Event()
        came = self.part_came

        class Noticing(FarStorage):
            def request(self, kind: Any, key: str, start: int = 0, stop: int = 0) -> Any:
                if kind == "part":
                    came.set()
                return super().request(kind, key, start, stop)

        self.storage = Noticing(part_bytes=MIB)

    @ckptcore.hookimpl
    def ckpt_storages(self) -> dict[str, Any]:
        return {"far": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        return subdirectory(self.storage, url.partition("://")[2])


class Device(HostArrayHandler):
    """A handler of arrays on a device. The copy of the last array waits for the upload of a part, and then may fail."""

    def __init__(self, part_came: threading.Event, error: Exception | None = None) -> None:
        super().__init__()
        self.part_came = part_came
        self.error = error

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        return [Coming(self, array) for array in super().copy_to_host(leaf, boxes, memory)]

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        return [Coming(self, array) for array in super().view_on_host(leaf, boxes)]


class Coming:
    """An array that is being copied from its device."""

    def __init__(self, device: Device, pending: Pending[HostArray]) -> None:
        self._device = device
        self._pending = pending

    def result(self) -> HostArray:
        array = self._pending.result()
        if array.flat[0] == LAST:
            assert self._device.part_came.wait(60), "no part came before the last array"
            if self._device.error is not None:
                raise self._device.error
        return array


def state() -> dict[str, HostArray]:
    return {f"w{number}": np.full(3 * MIB + 5, number, np.uint8) for number in range(LAST + 1)}


def save_async(*arguments: Any, **options: Any) -> None:
    ckptcore.save_async(*arguments, **options).result(60)


@pytest.mark.parametrize(
    ("save", "save_bytes"), [(ckptcore.save, None), (save_async, None), (save_async, 8 * MIB), (save_async, 1)]
)
def test_the_upload_begins_before_the_last_copy_is_complete(save: Any, save_bytes: int | None) -> None:
    far = Far()
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=[far], handlers={np.ndarray: Device(far.part_came)}),
        memory=ckptcore.context.MemoryOptions(save_bytes=save_bytes),
    )
    save("far://bucket/run", state(), context=context)
    loaded = ckptcore.load("far://bucket/run", context=context)
    assert all(np.array_equal(loaded[name], array) for name, array in state().items())


def test_the_caller_can_change_the_state_when_save_async_returns() -> None:
    far = Far()
    far.storage.latency = 0.01
    context = ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[far]))
    given, expected = state(), state()
    handle = ckptcore.save_async("far://bucket/run", given, context=context)
    for array in given.values():
        array[:] = 99
    handle.result(60)
    loaded = ckptcore.load("far://bucket/run", context=context)
    assert all(np.array_equal(loaded[name], array) for name, array in expected.items())


def test_an_error_of_a_copy_is_raised_and_nothing_is_committed() -> None:
    far = Far()
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(
            extra=[far], handlers={np.ndarray: Device(far.part_came, RuntimeError("the device is gone"))}
        )
    )
    with pytest.raises(RuntimeError, match="device is gone"):
        ckptcore.save_async("far://bucket/run", state(), context=context)
    assert list(far.storage.list()) == []
    runtime_of(context).saves.wait()  # does not raise the error again
    ckptcore.save(
        "far://bucket/run",
        {"w": np.ones(3)},
        context=ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[far])),
    )


def test_the_handle_raises_an_error_of_the_storage_while_copies_continue() -> None:
    far = Far()
    put = far.storage.put

    def full(key: str, data: bytes, **options: Any) -> str:
        raise StorageError("no room because the test said so")

    far.storage.put = full  # type: ignore[method-assign]
    handle = ckptcore.save_async(
        "far://bucket/run", state(), context=ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[far]))
    )
    with pytest.raises(StorageError, match="no room"):
        handle.result(60)
    far.storage.put = partial(put)  # type: ignore[method-assign]
    save_async(
        "far://bucket/run", state(), context=ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=[far]))
    )
