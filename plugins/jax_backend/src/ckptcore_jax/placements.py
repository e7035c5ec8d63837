"""Placement of an array with a sharding: its boxes, and the processes that hold them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import Sharding

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import JSON, Box, Shard
from ckptcore.planning import cuts_of
from ckptcore_jax.shardings import notes_of

_CACHED = 1 << 14
"""Cache size for boxes of a sharding and a shape. A model has far fewer."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Boxes of an array with a sharding.

    Attributes:
        boxes: each box in this process, with the position of its first device among the array's
            devices in this process.
        holders: each box, with the JAX indices of the processes that have it, in the order of the
            devices.
        replicas: number of processes that have each box, or 1 if it varies. None for an array in a
            single process, this or another one, because each process may have such an array.
        cuts: boundaries between boxes along each axis; None if there is only one box.
        devices: number of devices with the array in all processes.
        local: True if all devices are in this process.
        on_cpu: True if the devices belong to the CPU backend, so that NumPy can view the elements.
            False for arrays that an accelerator offloads to host memory.
        notes: the sharding as JSON, see `ckptcore_jax.shardings.notes_of`.
    """

    boxes: Mapping[Box, int]
    holders: Mapping[Box, tuple[int, ...]]
    replicas: int | None
    cuts: tuple[tuple[int, ...], ...] | None
    devices: int
    local: bool
    on_cpu: bool
    notes: Mapping[str, JSON]


@functools.lru_cache(maxsize=_CACHED)
def placement_of(sharding: Sharding, shape: tuple[int, ...]) -> Placement:
    """Return the placement of an array of this shape.

    Raises:
        UnsupportedLeafError: for partial sums, for a sharding over an abstract mesh, or for a
            sharding that does not divide the shape.
    """
    try:
        indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    except NotImplementedError as error:
        raise UnsupportedLeafError(
            f"cannot save an array of shape {shape} with {sharding}: it is not reduced over "
            "all axes of its mesh, so its devices hold partial sums; reshard it with "
            "jax.sharding.reshard first"
        ) from error
    except ValueError as error:
        raise UnsupportedLeafError(
            f"an array of shape {shape} cannot have the sharding {sharding}: {error}; use a sharding whose mesh axes "
            "divide the shape"
        ) from error
    addressable = sharding.addressable_devices
    boxes: dict[Box, int] = {}
    holders: dict[Box, dict[int, None]] = {}
    position = 0
    for device, index in indices.items():
        box = box_of(index, shape)
        holders.setdefault(box, {})[device.process_index] = None
        if device in addressable:
            # This is the order of `jax.Array.addressable_data`.
            boxes.setdefault(box, position)
            position += 1
    some_device: Any = next(iter(indices))
    counts = {len(processes) for processes in holders.values()}
    alone = len({device.process_index for device in indices}) == 1
    return Placement(
        boxes=boxes,
        holders={box: tuple(processes) for box, processes in holders.items()},
        replicas=None if alone else counts.pop() if len(counts) == 1 else 1,
        cuts=cuts_of(shape, holders) if len(holders) > 1 else None,
        devices=len(indices),
        local=position == len(indices),
        on_cpu=some_device.platform == "cpu",
        notes=notes_of(sharding),
    )


@functools.lru_cache(maxsize=_CACHED)
def shards_of(sharding: Sharding, shape: tuple[int, ...], rank: int, size: int) -> tuple[Shard, ...] | None:
    """Return each box in this process once, or None if the process has no device of the array.

    Replicas of a box are counted by process, not by device. An array on devices of this process
    only is assumed equal on all processes.

    Args:
        sharding, shape: sharding and shape of the array.
        rank, size: rank of this process and number of processes. A size of 1 means that this
            process saves alone.

    Raises:
        UnsupportedLeafError: if this process saves alone but does not hold the whole array.
    """
    placement = placement_of(sharding, shape)
    if placement.local:
        return tuple([Shard(box, rank, size) for box in placement.boxes])
    if size == 1:
        if len(placement.boxes) < len(placement.holders):
            raise UnsupportedLeafError(
                f"this process saves alone but has only {len(placement.boxes)} of "
                f"{len(placement.holders)} boxes of an array of shape {shape} with {sharding}; "
                "call jax.distributed.initialize() in every process, or use "
                "Context(job=JobOptions(coordinator=...)); in PerProcess(...) use arrays on "
                "devices of one process"
            )
        return tuple([Shard(box) for box in placement.boxes])
    if not placement.boxes:
        return None
    some_device: Any = next(iter(sharding.addressable_devices))
    this_process = some_device.process_index
    return tuple(
        [Shard(box, placement.holders[box].index(this_process), len(placement.holders[box])) for box in placement.boxes]
    )


def shards_in_process(
    sharding: Sharding, shape: tuple[int, ...], process: int, rank: int, size: int
) -> tuple[Shard, ...] | None:
    """Return each box in the given JAX process once, or None if that process has no device of the array.

    Args:
        sharding, shape, rank, size: see `shards_of`.
        process: JAX index of the process.
    """
    placement = placement_of(sharding, shape)
    if placement.local:
        return shards_of(sharding, shape, rank, size)
    shards = [
        Shard(box, holders.index(process), len(holders))
        for box, holders in placement.holders.items()
        if process in holders
    ]
    return tuple(shards) or None


def box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    """Return the box selected by slices without steps."""
    if index is None:
        return Box.whole(shape)
    ranges = [part.indices(extent) for part, extent in zip(index, shape, strict=True)]
    return Box(tuple([start for start, _, _ in ranges]), tuple([stop for _, stop, _ in ranges]))
