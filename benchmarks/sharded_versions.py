"""Four processes publish versions, and three follow with another sharding: the bytes that they read.

The processes are threads, and the versions are in memory. What is counted does not depend on it.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from ckptcore_testing import run_ranks
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.faulty_storage import with_faults, with_storage
from ckptcore_testing.locations import objects_at
from ckptcore_versions import Publisher, follow

import ckptcore
from benchmarks.fine_tuned import Weights
from benchmarks.report import Row
from benchmarks.setting import Setting
from ckptcore.builtin.sharded_arrays import ArrayShard, ShardedArray
from ckptcore.model import Box
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageBackend, StorageOptions

_PUBLISHERS: Final = 4
_FOLLOWERS: Final = 3
_MOST: Final = 1.05
"""Target: the bytes read divided by the bytes needed."""

_LARGER: Final = 6
"""The matrices also have this number of times their rows. A row of matrices of 1 MB shows what their edges cost."""


def sharded_rows(setting: Setting, versions: Sequence[Weights]) -> Iterator[Row]:
    """Publish two versions, a full one and a delta, and yield a row for each; also with larger matrices.

    The matrices are divided along their first axis. Vectors are replicated in practice, and are left out.

    Raises:
        AssertionError: a follower has other elements.
    """
    for times in (1, _LARGER):
        first, second = (
            {
                name: np.tile(_as_numpy(tensor), (times, 1))
                for name, tensor in version.items()
                if tensor.ndim == 2 and len(tensor) >= _PUBLISHERS
            }
            for version in versions[:2]
        )
        yield from _rows_of(setting.directory / f"sharded-{times}", first, second)


def _rows_of(directory: Path, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of two versions. The followers have their caches in a directory."""
    location = f"memory://benchmark-{directory.parent.name}-{directory.name}/weights"

    def publish(rank: int, context: ckptcore.Context) -> None:
        with Publisher(location, context=context) as publisher:
            for number, weights in enumerate((first, second)):
                parts = {}
                for name, matrix in weights.items():
                    box = _rows(matrix.shape, rank, _PUBLISHERS)
                    parts[name] = ShardedArray.part(matrix[box.slices], box.start, matrix.shape)
                publisher.publish(number, parts)

    def serve(rank: int, context: ckptcore.Context) -> Sequence[int]:
        plan = FaultPlan()
        counted = with_storage(context, "memory", functools.partial(_counted, plan))
        boxes = {name: _rows(matrix.shape, rank, _FOLLOWERS) for name, matrix in first.items()}
        like = {
            name: ShardedArray(first[name].shape, first[name].dtype, [ArrayShard(box)]) for name, box in boxes.items()
        }
        nbytes = []
        cache = directory / f"cache-{rank}"
        with follow(location, cache=cache, like=like, start=0, timeout=0, context=counted) as follower:
            for version, weights in zip(follower, (first, second), strict=True):
                for name, box in boxes.items():
                    (shard,) = version.arrays[name].shards  # type: ignore[union-attr]  # they are sharded
                    assert np.array_equal(np.asarray(shard.elements), weights[name][box.slices]), f"{name} differs"
                nbytes.append(plan.bytes_read)
                plan.bytes_read = 0
        return nbytes

    run_ranks(_PUBLISHERS, publish)
    of_full, of_delta = map(sum, zip(*run_ranks(_FOLLOWERS, serve), strict=True))
    needed = sum([matrix.nbytes for matrix in first.values()])
    encoded = sum([len(data) for key, data in objects_at(f"{location}/v000001").items() if key.startswith("deltas.")])
    for case, read, least in (("full version", of_full, needed), ("delta", of_delta, encoded)):
        yield Row(
            f"versions: {_PUBLISHERS} publish, {_FOLLOWERS} follow, {case}, {needed / 1e6:.0f} MB",
            "bytes read / bytes needed",
            read / least,
            "",
            target=f"at most {_MOST}",
            reached=read <= _MOST * least,
            note=f"{read} of {least} bytes",
        )


def _rows(shape: Sequence[int], rank: int, size: int) -> Box:
    """Return the rows of a process."""
    start, stop = (shape[0] * each // size for each in (rank, rank + 1))
    return Box((start, 0), (stop, shape[1]))


def _as_numpy(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _counted(plan: FaultPlan, url: str, options: StorageOptions) -> StorageBackend:
    return with_faults(installed_plugins().storage("memory")(url, options), plan)
