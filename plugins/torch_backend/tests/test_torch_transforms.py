"""Transformed arrays load as tensors and as shards of DTensors. Loads read only the required parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_transforms import Cast, Rename, Split, Stack, Transform, Transpose
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptcore
from ckptcore.results import LoadReport
from tests.jobs.torch_groups import process_group

RANK, RANKS = 2, 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of four ranks in which only this process exists."""
    with process_group("fake", rank=RANK, size=RANKS):
        yield init_device_mesh("cpu", (RANKS,))


def test_a_shard_of_a_stack_reads_its_rows(mesh: DeviceMesh, tmp_path: Path) -> None:
    state = {f"l.{layer}": np.arange(512 * 256, dtype=np.float32).reshape(512, 256) + layer for layer in range(3)}
    context = ckptcore.Context(
        io=ckptcore.context.IOOptions(checksums=False), job=ckptcore.context.JobOptions(coordinator=_Alone())
    )
    ckptcore.save(tmp_path / "c", state, context=context)
    whole = np.stack([state[f"l.{layer}"] for layer in range(3)])
    wanted = {"w": DTensor.from_local(torch.zeros(3, 128, 256), mesh, [Shard(1)], run_check=False)}
    report = LoadReport()
    loaded = ckptcore.load(tmp_path / "c", wanted, transforms=[Stack("l.{i}", "w")], report=report, context=context)
    assert np.array_equal(loaded["w"].to_local().numpy(), whole[:, 256:384])
    assert report.bytes_read <= 1.1 * whole.nbytes / RANKS
    ckptcore.load_into(tmp_path / "c", wanted, transforms=[Stack("l.{i}", "w")], context=context)
    assert np.array_equal(wanted["w"].to_local().numpy(), whole[:, 256:384])


def test_module_is_filled_from_other_stored_names(tmp_path: Path) -> None:
    fused = torch.arange(36, dtype=torch.float32).reshape(12, 3)
    ckptcore.save(tmp_path / "c", {"attention.qkv": fused, "head/kernel": torch.ones(3, 5, dtype=torch.bfloat16)})
    module = torch.nn.ModuleDict({name: torch.nn.Linear(3, 4, bias=False) for name in "qkv"})
    module["head"] = torch.nn.Linear(3, 5, bias=False)
    chain: list[Transform] = [
        Split("attention.qkv", ["q.weight", "k.weight", "v.weight"]),
        Rename("head/kernel", "head.weight"),
        Transpose("head.weight"),
        Cast("head.weight", "float32"),
    ]
    ckptcore.load_into(tmp_path / "c", module, transforms=chain)
    assert torch.equal(module["k"].weight, fused[4:8]) and torch.equal(module["head"].weight, torch.ones(5, 3))


class _Alone:
    """A coordinator of one process, because the other ranks do not exist."""

    rank, size = 0, 1

    def gather(self, key: str, payload: bytes) -> list[bytes]:
        return [payload]

    def broadcast(self, key: str, payload: bytes | None) -> Any:
        return payload
