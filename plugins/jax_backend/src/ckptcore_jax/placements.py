"""Where the elements of an array with a sharding are: its boxes, and who holds them."""

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

__all__ = ["Placement", "box_of", "placement_of", "shards_in_process", "shards_of"]

_CACHED = 1 << 14
"""Pairs of a sharding and a shape for which the boxes are kept; a model has far fewer."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The boxes of an array with a sharding.

    Attributes:
        boxes: each box held in this process, once, and the position among this process's devices of the first
            device that holds it.
        holders: each box of the array, and the processes that hold it, in the order of the devices.
        replicas: how many processes hold each box, and 1 where that differs; None of an array in one process alone, be it another: it
            cannot be told from one that every process has for itself.
        cuts: per axis the inner boundaries of all boxes; None where nothing is cut.
        devices: how many devices hold the array, over all processes.
        local: whether all of them are in this process.
        on_cpu: whether the elements are in host memory, where NumPy can see them.
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
    """Where the elements of an array of this shape are.

    Raises:
        UnsupportedLeafError: if devices hold partial sums, or the sharding is over an abstract mesh.
    """
    try:
        indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    except NotImplementedError as error:
        raise UnsupportedLeafError(
            f"an array of shape {shape} with {sharding} is not reduced over all axes of its mesh: its devices hold "
            "partial sums; reshard it with jax.sharding.reshard before saving it"
        ) from error
    except ValueError as error:
        raise UnsupportedLeafError(
            f"an array of shape {shape} cannot be laid out with {sharding}: {error}; "
            "give a sharding over concrete devices whose mesh axes divide the shape"
        ) from error
    addressable = sharding.addressable_devices
    boxes: dict[Box, int] = {}
    holders: dict[Box, dict[int, None]] = {}
    position = 0
    for device, index in indices.items():
        box = box_of(index, shape)
        holders.setdefault(box, {})[device.process_index] = None
        if device in addressable:
            # `jax.Array.addressable_data` counts the addressable devices in this order.
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
    """The boxes held in this process, each once; None where all devices of the array are in other processes.

    The replicas of a box are processes: of several devices of one process that hold a box, only one counts. An array
    that is on devices of this process only is taken to be held by every process alike.

    Args:
        sharding, shape: of the array.
        rank, size: which process of how many this is; of one, it saves alone.

    Raises:
        UnsupportedLeafError: if this process saves alone and does not hold all of the array.
    """
    placement = placement_of(sharding, shape)
    if placement.local:
        return tuple([Shard(box, rank, size) for box in placement.boxes])
    if size == 1:
        if len(placement.boxes) < len(placement.holders):
            raise UnsupportedLeafError(
                f"of an array of shape {shape} with {sharding} this process has {len(placement.boxes)} of {len(placement.holders)} "
                "boxes and saves alone: expected to save together with the processes that have the others; call "
                "jax.distributed.initialize() in each, or give Context(job=JobOptions(coordinator=...)); in PerProcess(...) have arrays on "
                "devices of one process only"
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
    """The boxes that a process of JAX holds, each once, also where that is not this one; None where it has none of the devices.

    Args:
        sharding, shape, rank, size: as for `shards_of`.
        process: which process.
    """
    placement = placement_of(sharding, shape)
    if placement.local:
        return shards_of(sharding, shape, rank, size)
    held = [
        Shard(box, held_by.index(process), len(held_by))
        for box, held_by in placement.holders.items()
        if process in held_by
    ]
    return tuple(held) or None


def box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    """The box that a tuple of slices without steps selects."""
    if index is None:
        return Box.whole(shape)
    ranges = [part.indices(extent) for part, extent in zip(index, shape, strict=True)]
    return Box(tuple([start for start, _, _ in ranges]), tuple([stop for _, stop, _ in ranges]))
