"""Jobs: processes write deltas of their shards, and others read shards of another mesh, with counted bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import ThreadJob, run_ranks
from ckptcore_testing.arrays import assert_same_bits
from ckptcore_versions.deltas.layout import DeltaLayout
from ckptcore_versions.held_version import BaseVersion

import ckptcore
from ckptcore.builtin.sharded_arrays import ArrayShard, ShardedArray
from ckptcore.context import JobOptions
from ckptcore.matching.options import LoadReport
from ckptcore.model import ArraySpec, Box, HostArray, TreePath
from ckptcore.protocols import Coordinator
from plugins.versions.tests.held import version_at

CONTEXT = ckptcore.Context(durability="none")

SHAPES = {"embedding": (36_000, 384), **{f"layer {number}": (1536, 384) for number in range(4)}, "norm": (384,)}


@functools.cache
def versions() -> tuple[dict[str, HostArray], dict[str, HostArray]]:
    """Return bfloat16 weights before and after a step of training."""
    random_numbers = np.random.default_rng(0)
    before, after = dict[str, HostArray](), dict[str, HostArray]()
    for name, shape in SHAPES.items():
        weights = random_numbers.standard_normal(shape, np.float32) * np.float32(0.04)
        before[name] = weights.astype(ml_dtypes.bfloat16)
        weights += random_numbers.standard_normal(shape, np.float32) * np.float32(1e-5)
        after[name] = weights.astype(ml_dtypes.bfloat16)
    return before, after


def shard(shape: Sequence[int], rank: int, size: int, axis: int) -> Box:
    """Return the box of a rank. Arrays of one axis are divided along it."""
    axis = min(axis, len(shape) - 1)
    step = -(-shape[axis] // size)
    return Box.whole(tuple(shape)).band(axis, min(rank * step, shape[axis]), min((rank + 1) * step, shape[axis]))


def sharded(state: dict[str, HostArray], rank: int, size: int, axis: int, *, filled: bool = True) -> dict[str, object]:
    """Return the shards of a rank, or requests of them."""
    parts: dict[str, object] = {}
    for name, array in state.items():
        box = shard(array.shape, rank, size, axis)
        elements = array[box.slices].copy() if filled else None
        parts[name] = ShardedArray(array.shape, array.dtype, [ArrayShard(box, elements)])
    return parts


@dataclass(frozen=True)
class HeldShards:
    """The shards of a rank. Requests of other elements fail."""

    version: BaseVersion
    state: dict[str, HostArray]
    rank: int
    size: int
    axis: int

    def elements(self, path: TreePath, spec: ArraySpec, box: Box) -> HostArray | None:
        (name,) = path
        assert shard(spec.shape, self.rank, self.size, self.axis).contains(box)
        return self.state[str(name)][box.slices]


def save_versions(directory: str, size: int, axis: int) -> None:
    """Save a full version and a delta with a job."""
    before, after = versions()

    def save_full(rank: int, context: ckptcore.Context) -> None:
        ckptcore.save(f"{directory}/v0", sharded(before, rank, size, axis), context=context)

    run_ranks(size, save_full)
    held = version_at(f"{directory}/v0")

    def save(rank: int, context: ckptcore.Context) -> None:
        layout = DeltaLayout().against(HeldShards(held, before, rank, size, axis))
        ckptcore.save(f"{directory}/v1", sharded(after, rank, size, axis), layout=layout, context=context)

    run_ranks(size, save)


def delta_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("deltas.*"))


def load_shards(location: Path, size: int, axis: int, expected: dict[str, HostArray]) -> int:
    """Load the shards of each rank and compare them. Return the bytes read."""
    read = 0
    for rank in range(size):
        report = LoadReport()
        parts = ckptcore.load(
            location, sharded(expected, rank, size, axis, filled=False), context=CONTEXT, report=report
        )
        for name, array in expected.items():
            (part,) = parts[name].shards
            assert_same_bits(part.elements, array[part.box.slices], f"{name} of rank {rank}")
        read += report.bytes_read
    return read


@pytest.mark.parametrize(("written", "loaded"), [((4, 0), (3, 0)), ((4, 1), (3, 1)), ((2, 1), (3, 1))])
def test_a_job_loads_other_shards(written: tuple[int, int], loaded: tuple[int, int], tmp_path: Path) -> None:
    """It reads what it would read of the base, and the chunks of its shards."""
    save_versions(str(tmp_path), *written)
    before, after = versions()
    of_base = load_shards(tmp_path / "v0", *loaded, before)
    read = load_shards(tmp_path / "v1", *loaded, after)
    assert read - of_base <= 1.05 * delta_bytes(tmp_path / "v1")


def test_ranks_that_read_for_each_other_load_a_delta(tmp_path: Path) -> None:
    save_versions(str(tmp_path), 2, 0)
    _, after = versions()
    job = ThreadJob(3)

    def load(coordinator: Coordinator) -> None:
        rank = coordinator.rank
        context = ckptcore.Context(job=JobOptions(coordinator=coordinator, reads="broadcast"), durability="none")
        parts = ckptcore.load(tmp_path / "v1", sharded(after, rank, 3, 0, filled=False), context=context)
        for name, array in after.items():
            (part,) = parts[name].shards
            assert_same_bits(part.elements, array[part.box.slices], f"{name} of rank {rank}")

    job.run(load)
