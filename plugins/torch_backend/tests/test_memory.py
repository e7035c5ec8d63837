"""Saves and loads keep no references to tensors after their end. Saves reuse staging memory, and
programs can free it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_torch.tensors import TensorHandler
from ckptcore_torch.transfers import Transfers

import ckptcore
from ckptcore.model import ArraySpec, Box, HostArray, Pending
from ckptcore.protocols import HostMemory
from ckptcore.runtime import runtime_of
from plugins.torch_backend.tests.held_memory import OPERATIONS, State, without_collector
from plugins.torch_backend.tests.test_transfers import LateDevice


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_reference_to_a_tensor_remains(tmp_path: Path, name: str) -> None:
    state = State()
    watched = state.held
    with without_collector():
        kept = OPERATIONS[name](tmp_path, state, "safetensors")
        assert kept is not None and state.held == watched
        state.forget()
        assert state.held == 0


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def test_second_save_allocates_no_memory_and_all_can_be_freed(tmp_path: Path) -> None:
    context = ckptcore.Context(durability="none")
    state = {f"{number}": torch.ones(8 << 20) for number in range(2)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    ckptcore.save_async(tmp_path / "0", state, context=context).result()
    held = runtime_of(context).staging.held_bytes
    assert nbytes <= held <= 1.1 * nbytes
    resident = resident_bytes()
    for number in range(1, 4):
        ckptcore.save_async(tmp_path / str(number), state, context=context).result()
        assert runtime_of(context).staging.held_bytes == held
    assert resident_bytes() - resident < nbytes // 4
    resident = resident_bytes()
    runtime_of(context).staging.release_unused()
    assert runtime_of(context).staging.held_bytes == 0
    assert resident - resident_bytes() > 0.9 * nbytes


@pytest.mark.parametrize("name", OPERATIONS)
def test_staging_memory_can_be_released(tmp_path: Path, name: str) -> None:
    """Memory can be released after each operation, including failed saves."""
    kept = OPERATIONS[name](tmp_path, State(), "safetensors")
    results = kept if isinstance(kept, tuple) else [kept]
    contexts = [result for result in results if isinstance(result, ckptcore.Context)]
    for context in contexts:
        runtime_of(context).staging.release_unused()
        assert runtime_of(context).staging.held_bytes == 0


def test_staging_memory_is_freed_without_keep_staging(tmp_path: Path) -> None:
    context = ckptcore.Context(durability="none", memory=ckptcore.context.MemoryOptions(keep_staging=False))
    ckptcore.save_async(tmp_path / "c", {"w": torch.ones(1 << 20)}, context=context).result()
    assert runtime_of(context).staging.held_bytes == 0


class _OnDevice(TensorHandler):
    """A handler that treats CPU tensors as tensors of a device that copies as late as possible."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        targets = [memory.empty(ArraySpec(box.shape, "float32")) for box in boxes]
        moment = self._transfers.now()
        return [
            self._transfers.submit(leaf[box.slices], target, moment) for box, target in zip(boxes, targets, strict=True)
        ]


@pytest.mark.parametrize("limit", [None, 1 << 16])
def test_staging_buffers_of_a_device_are_reused_and_hold_no_tensor(tmp_path: Path, limit: int | None) -> None:
    device = LateDevice()
    transfers = Transfers(device, size=1 << 14, count=3)
    context = ckptcore.Context(
        durability="none",
        plugins=ckptcore.context.PluginOptions(handlers={torch.Tensor: _OnDevice(transfers)}),
        memory=ckptcore.context.MemoryOptions(save_bytes=limit),
    )
    with without_collector():
        for number in range(4):
            state = State(float(number))
            state.tree = {"large": state.tree["large"], "small": state.tree["small"]}
            ckptcore.save_async(tmp_path / str(number), state.tree, context=context).result()
            state.forget()
            device.queue.clear()  # a real device does not keep finished copies
            assert state.held == 0
    assert device.buffers == 3
    for number in range(4):
        assert ckptcore.load(tmp_path / str(number))["large"].tolist() == [float(number)] * (1 << 18)
    runtime_of(context).staging.release_unused()
    assert runtime_of(context).staging.held_bytes == 0
