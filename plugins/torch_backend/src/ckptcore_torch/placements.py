"""Boxes and replicas of a DTensor in each process.

A placement describes one axis of the mesh. Placements apply from the first mesh axis to the last,
each to the result of the previous one (`torch.distributed.tensor.placement_types`). With
``Shard(dim)``, process `i` of `n` has the `i`-th chunk of `torch.chunk`. With ``_StridedShard(dim,
split_factor=f)`` the tensor is first divided into `f` chunks, and process `i` has the `i`-th part
of each chunk. These parts can be several boxes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import JSON, Box

_CACHED: Final = 1 << 14

IndexRange = tuple[int, int]
"""A half-open range of indices along one axis of the whole tensor."""


@dataclass(frozen=True, slots=True)
class DTensorPlacement:
    """Placement of a DTensor on its mesh, which determines the boxes of every process. Hashable, for caches.

    Attributes:
        shape: shape of the whole tensor.
        mesh_shape: number of processes along each axis of the mesh.
        placements: one for each axis of the mesh.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class LocalPart:
    """Part of a DTensor on one process.

    Attributes:
        shape: shape of the local tensor.
        boxes: nonempty boxes of the whole tensor, each with its slices of the local tensor.
        replica, replicas: number of this replica, and number of processes with the same part.
    """

    shape: tuple[int, ...]
    boxes: Mapping[Box, tuple[slice, ...]]
    replica: int
    replicas: int


@functools.lru_cache(maxsize=_CACHED)
def local_part(placed: DTensorPlacement, coordinate: tuple[int, ...]) -> LocalPart:
    """Return the part of the process at a coordinate of the mesh.

    Raises:
        UnsupportedLeafError: for partial sums and unknown placements.
    """
    axes = [_ranges_at(placed, axis, coordinate) for axis in range(len(placed.shape))]
    boxes: dict[Box, tuple[slice, ...]] = {}
    for ranges in itertools.product(*[_with_offsets(axis) for axis in axes]):
        box = Box(tuple([start for start, _, _ in ranges]), tuple([stop for _, stop, _ in ranges]))
        boxes[box] = tuple([slice(local, local + stop - start) for start, stop, local in ranges])
    replica, replicas = 0, 1
    for position, extent, placement in zip(coordinate, placed.mesh_shape, placed.placements, strict=True):
        if isinstance(placement, Replicate):
            replica, replicas = replica * extent + position, replicas * extent
    local_shape = tuple([sum(stop - start for start, stop in axis) for axis in axes])
    return LocalPart(local_shape, boxes if 0 not in local_shape else {}, replica, replicas)


@functools.lru_cache(maxsize=_CACHED)
def sharding_cuts(placed: DTensorPlacement) -> tuple[tuple[int, ...], ...] | None:
    """Return the sorted boundaries between boxes along each axis, or None if there is only one box."""
    cuts: list[tuple[int, ...]] = []
    for axis, extent in enumerate(placed.shape):
        bounds: set[int] = set()
        # The cuts of a tensor axis depend only on the mesh axes that shard it.
        along = [_axis_of(placement, len(placed.shape)) == axis for placement in placed.placements]
        ranges = [range(size if cut else 1) for size, cut in zip(placed.mesh_shape, along, strict=True)]
        if any(along):
            for coordinate in itertools.product(*ranges):
                for start, stop in _ranges_at(placed, axis, coordinate):
                    bounds.update(bound for bound in (start, stop) if 0 < bound < extent)
        cuts.append(tuple(sorted(bounds)))
    return tuple(cuts) if any(cuts) else None


def sharding_notes(mesh: Any, placements: Sequence[Placement]) -> dict[str, JSON]:
    """Return the mesh and placements as JSON."""
    described: list[JSON] = []
    for placement in placements:
        value: dict[str, JSON] = {"kind": type(placement).__name__}
        for name in ("dim", "split_factor"):
            if hasattr(placement, name):
                value[name] = int(getattr(placement, name))
        described.append(value)
    names = mesh.mesh_dim_names
    return {"mesh": list(mesh.shape), "names": None if names is None else list(names), "placements": described}


def _axis_of(placement: Placement, axes: int) -> int | None:
    """Return the tensor axis that a placement shards, or None.

    Raises:
        UnsupportedLeafError: for partial sums and unknown placements.
    """
    if isinstance(placement, Replicate):
        return None
    if placement.is_shard() or hasattr(placement, "split_factor"):
        return int(placement.dim) % axes  # type: ignore[attr-defined]  # both kinds of shards have it
    raise UnsupportedLeafError(
        f"cannot save a DTensor with the placement {placement}, as of partial sums; call .redistribute() with "
        "Replicate() or Shard() before you save it"
    )


def _ranges_at(placed: DTensorPlacement, axis: int, coordinate: Sequence[int]) -> Sequence[IndexRange]:
    """Return the indices along one axis for the process at a coordinate, in the order of its local tensor."""
    ranges: Sequence[IndexRange] = [(0, placed.shape[axis])]
    for position, extent, placement in zip(coordinate, placed.mesh_shape, placed.placements, strict=True):
        if _axis_of(placement, len(placed.shape)) != axis:
            continue
        size = sum(stop - start for start, stop in ranges)
        factor = int(getattr(placement, "split_factor", 1))
        if factor > 1 and size % (factor * extent) and not divides_chunks():
            raise UnsupportedLeafError(
                f"cannot save or load a DTensor whose axis {axis} of {placed.shape[axis]} is cut unevenly by "
                f"{placement}: this version of PyTorch does not cut it as later ones do. Upgrade torch, or call "
                ".redistribute() with Replicate() or Shard() before you save it"
            )
        taken: list[IndexRange] = []
        for first, last in _chunks(0, size, factor):
            start, stop = _chunks(first, last, extent)[position]
            taken.extend(_sub_ranges(ranges, start, stop))
        ranges = _merge_adjacent(taken)
    return ranges


@functools.cache
def divides_chunks() -> bool:
    """Return True if PyTorch divides each chunk of a strided shard separately. PyTorch 2.9 and older do not."""
    parts, _ = _StridedShard(0, split_factor=2)._split_tensor(torch.arange(5), 2, with_padding=False)
    return bool(parts[0].tolist() == [0, 1, 3])


def _chunks(start: int, stop: int, count: int) -> Sequence[IndexRange]:
    """Divide a range as `torch.chunk` does. The last chunks can be empty."""
    step = math.ceil((stop - start) / count)
    return [(min(start + step * number, stop), min(start + step * (number + 1), stop)) for number in range(count)]


def _sub_ranges(ranges: Sequence[IndexRange], start: int, stop: int) -> list[IndexRange]:
    """Return elements `start` to `stop` of the concatenated ranges."""
    parts = []
    position = 0
    for first, last in ranges:
        low, high = max(start - position, 0), min(stop - position, last - first)
        if low < high:
            parts.append((first + low, first + high))
        position += last - first
    return parts


def _merge_adjacent(ranges: Sequence[IndexRange]) -> Sequence[IndexRange]:
    merged: list[IndexRange] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _with_offsets(ranges: Sequence[IndexRange]) -> Sequence[tuple[int, int, int]]:
    """Return the ranges with their offsets in the local tensor."""
    offsets = []
    position = 0
    for start, stop in ranges:
        offsets.append((start, stop, position))
        position += stop - start
    return offsets
