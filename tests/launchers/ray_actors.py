"""Three Ray actors on one node with unevenly sharded NumPy arrays. One of the actors is asynchronous."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # the actors import this file

import numpy as np
import ray
from ckptcore_ray.jobs import RayJob, make_job

import ckptcore
from ckptcore.model import Box

# This file runs as a program, so the root of the repository is not in the path.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.launchers.states import ARRAYS, STEP, assert_box, run_job

SIZE = 3
BOUNDS = {"w": (0, 1, 12, 16), "e": (0, 3, 5, 8), "b": (0, 5, 5, 7)}
"""By name, the row boundaries between ranks. Rank 1 holds nothing of ``b``; all ranks hold the other arrays."""


def _box(name: str, rank: int) -> tuple[Box, list[list[int]]]:
    """Return the box of an array on a rank, and the cuts of all ranks."""
    shape = ARRAYS[name].shape
    start, stop = BOUNDS[name][rank : rank + 2]
    cuts = sorted({bound for bound in BOUNDS[name] if 0 < bound < shape[0]})
    return Box((start, *(0,) * (len(shape) - 1)), (stop, *shape[1:])), [cuts, *([] for _ in shape[1:])]


def _sharded(name: str, rank: int, *, filled: bool) -> ckptcore.ShardedArray:
    box, cuts = _box(name, rank)
    shards = [ckptcore.ArrayShard(box, ARRAYS[name][box.slices] if filled else None)] if box.size else []
    return ckptcore.ShardedArray(ARRAYS[name].shape, ARRAYS[name].dtype.name, shards, cuts=cuts)


def _state(rank: int, *, filled: bool) -> dict[str, Any]:
    whole = ARRAYS["i"].copy() if filled else np.zeros_like(ARRAYS["i"])
    return {
        "params": {name: _sharded(name, rank, filled=filled) for name in "web"},
        "i": whole,
        "step": STEP if filled else 0,
    }


def _save(rank: int, location: Path, layout: str) -> None:
    ckptcore.save(location, _state(rank, filled=True), layout=layout)


def _load(rank: int, location: Path) -> None:
    # Load the part of another rank, so that this rank reads bytes that it did not write.
    loaded = ckptcore.load(location, _state((rank + 1) % SIZE, filled=False))
    assert loaded["step"] == STEP
    assert_box("i", loaded["i"], (slice(None),))
    for name, array in loaded["params"].items():
        box, _ = _box(name, (rank + 1) % SIZE)
        assert [shard.box for shard in array.shards] == ([box] if box.size else [])
        for shard in array.shards:
            assert_box(name, shard.elements, box.slices)


class Worker:
    """A rank whose methods block."""

    def __init__(self, job: str, rank: int) -> None:
        from ckptcore_ray.membership import join_job

        join_job(job, rank, SIZE, timeout_seconds=120)
        self.rank = rank

    def save(self, location: Path, layout: str) -> None:
        """Save the part of this rank."""
        _save(self.rank, location, layout)

    def load(self, location: Path) -> None:
        """Load the part of another rank."""
        _load(self.rank, location)


class AsyncWorker:
    """A rank whose methods run on an event loop."""

    def __init__(self, job: str, rank: int) -> None:
        from ckptcore_ray.membership import join_job

        join_job(job, rank, SIZE, timeout_seconds=120)
        self.rank = rank

    async def save(self, location: Path, layout: str) -> None:
        """Save the part of this rank, on a thread."""
        await asyncio.to_thread(_save, self.rank, location, layout)

    async def load(self, location: Path) -> None:
        """Load the part of another rank, on a thread."""
        await asyncio.to_thread(_load, self.rank, location)


def _workers(job: RayJob) -> list[Any]:
    classes = [Worker, Worker, AsyncWorker]
    return [ray.remote(num_cpus=0)(kind).remote(job.name, rank) for rank, kind in enumerate(classes)]


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    with make_job("matrix", SIZE) as job:
        workers = _workers(job)

        def save(location: Path, layout: str) -> None:
            """Save from the actors."""
            ray.get([worker.save.remote(location, layout) for worker in workers])

        def load(location: Path) -> None:
            """Load in the actors."""
            ray.get([worker.load.remote(location) for worker in workers])

        run_job("ray_actors", True, save, load, lambda: None)
    ray.shutdown()
