"""Conversion of checkpoints of other software into Hugging Face directories: all bytes once, in bounded pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_testing import FaultPlan, with_faults
from safetensors.numpy import load_file

import ckptcore
from ckptcore.context import MemoryOptions, PluginOptions
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from plugins.formats.tests.test_rank_files import part_of
from plugins.formats.tests.zero_files import Shape, array, write_zero

SHAPES: list[dict[str, Shape]] = [
    {"a": (501, 307), "b": (3, 5, 7001), "c": (99991,)},
    {f"n{number}": (37, 3) for number in range(20)},
]
ARRAYS = {name: array(name, shape) for group in SHAPES for name, shape in group.items()}
NBYTES = sum(one.nbytes for one in ARRAYS.values())
PIECE = 400_000
"""Memory for a conversion, which is less than two of the arrays."""


class Files:
    """Local directories as ``counted://`` URLs, with a plan that records each operation."""

    def __init__(self) -> None:
        self.plan = FaultPlan()

    @ckptcore.hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"counted": self.open}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(installed_plugins().storage("file")(url.replace("counted", "file", 1), options), self.plan)


def zero(stage: int) -> Callable[[Path], str]:
    def write(directory: Path) -> str:
        write_zero(directory, stage, 3, SHAPES)
        return "module"

    return write


def ranks(directory: Path) -> str:
    """Rows of each array, which the processes hold as DTensors."""
    directory.mkdir()
    for rank in range(4):
        state = {}
        for name, whole in ARRAYS.items():
            rows = -(-len(whole) // 4)
            local = torch.from_numpy(whole[rank * rows : (rank + 1) * rows].copy())
            state[name] = part_of(rank, shape=whole.shape, local=local)
        torch.save({"module": state}, directory / f"model_world_size_4_rank_{rank}.pt")
    return "module"


@pytest.mark.parametrize("write", [zero(2), zero(3), ranks], ids=["ZeRO 2", "ZeRO 3", "ranks"])
def test_a_conversion_reads_each_byte_once_in_pieces(write: Callable[[Path], str], tmp_path: Path) -> None:
    subtree = write(tmp_path / "c")
    files = Files()
    context = ckptcore.Context(
        plugins=PluginOptions(extra=[files]), durability="none", memory=MemoryOptions(load_bytes=PIECE)
    )
    ckptcore.copy(
        f"counted://{tmp_path}/c", f"counted://{tmp_path}/hf",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=700_000), subtree=subtree, context=context,
    )  # fmt: skip
    elements = [operation.nbytes for operation in files.plan.operations if operation.name == "get_into"]
    assert NBYTES <= sum(elements) < 1.01 * NBYTES and max(elements) <= PIECE
    sources = sum(1 for path in (tmp_path / "c").rglob("*.pt"))
    assert files.plan.bytes_read - sum(elements) < sources * 64_000  # directories of zips, and pickles
    found: dict[str, np.ndarray[Any, Any]] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        found.update(load_file(path))
    assert {name: one.shape for name, one in found.items() if name in ARRAYS} == {
        name: one.shape for name, one in ARRAYS.items()
    }
    assert all(found[name].tobytes() == one.tobytes() for name, one in ARRAYS.items())


def test_a_box_is_read_from_the_files_that_have_it(tmp_path: Path) -> None:
    write_zero(tmp_path / "c", 3, 3, SHAPES)
    files = Files()
    context = ckptcore.Context(plugins=PluginOptions(extra=[files]), durability="none")
    with ckptcore.open(f"counted://{tmp_path}/c", context=context) as opened:
        before = files.plan.bytes_read
        row = opened["module"]["a"][100:101]
        assert np.array_equal(row, ARRAYS["a"][100:101])
        assert files.plan.bytes_read - before <= 1.05 * math.prod(row.shape) * 4
