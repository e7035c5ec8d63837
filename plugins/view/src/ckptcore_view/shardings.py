"""Shards: the boxes of an array on devices and processes, computed from the sharding recorded in a checkpoint."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ckptcore.model import ArrayRecord, Box

_MAX_AXES: Final = 64
"""Limit of the axes of a mesh, equal to that of NumPy arrays."""

_MAX_OWNERS: Final = 4096
"""Limit of owners. Larger shardings are shown without shards: a hostile checkpoint may have any mesh in its notes."""


_MAX_CHARACTERS: Final = 400

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sharding:
    """The shards of an array.

    Attributes:
        owner: the kind of owners: "device", "mesh position", or "" if only the boundaries between shards are known.
        shards: the owners of each box, in the order of the first owner.
    """

    owner: str
    shards: Mapping[Box, Sequence[str]]


def sharding_of(record: ArrayRecord) -> Sharding | None:
    """Return the shards of an array; None if it was not sharded, or its sharding is not known.

    The notes of a record are those of its leaf handler: a `NamedSharding` or `SingleDeviceSharding` of JAX, or a
    DTensor of PyTorch. They may be hostile.
    """
    shape = record.spec.shape
    for describe in (_named_sharding, _single_device, _dtensor):
        try:
            sharding = describe(record.notes, shape)
        except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            continue  # notes of an unknown handler
        if sharding is not None:
            return sharding
    return _between_cuts(record)


def framework_of(record: ArrayRecord) -> str | None:
    """Return the framework that saved an array; None if its notes do not name one, as for NumPy."""
    if record.notes.get("framework") == "torch" or "dtensor" in record.notes:
        return "PyTorch"
    return "JAX" if "sharding" in record.notes else None


def sharding_text(record: ArrayRecord) -> str | None:
    """Return the sharding of an array in words; None if its notes have none. The notes may be hostile."""
    for describe in (_jax_text, _dtensor_text):
        try:
            return describe(record.notes)[:_MAX_CHARACTERS]
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
    return None


def _jax_text(notes: Mapping[str, Any]) -> str:
    noted = notes["sharding"]
    if noted["type"] == "SingleDeviceSharding":
        return f"not sharded, on the device {noted['device']}"
    mesh = " × ".join([f"{name}={size}" for name, size in _few(noted["mesh"].items())])
    axes = [" and ".join(map(str, _few(_mesh_axes(axis)))) or "not divided" for axis in _few(noted["spec"])]
    return f"mesh {mesh}; axes: {', '.join(axes) or 'none'}"


def _dtensor_text(notes: Mapping[str, Any]) -> str:
    noted = notes["dtensor"]
    mesh = " × ".join(map(str, _few(noted["mesh"])))
    kinds = [
        f"{placement['kind']}({placement['dim']})" if "dim" in placement else str(placement["kind"])
        for placement in _few(noted["placements"])
    ]
    return f"mesh {mesh}; {', '.join(kinds)}"


def _few(items: Iterable[T]) -> Iterator[T]:
    return itertools.islice(items, _MAX_AXES)


def _named_sharding(notes: Mapping[str, Any], shape: tuple[int, ...]) -> Sharding | None:
    noted = notes["sharding"]
    if noted["type"] != "NamedSharding":
        return None
    mesh: Mapping[str, int] = noted["mesh"]
    axes_of = [_mesh_axes(axes) for axes in noted["spec"]]
    axes_of += [()] * (len(shape) - len(axes_of))
    count = _mesh_size(list(mesh.values()))
    named = [axis for axes in axes_of for axis in axes]
    if len(axes_of) != len(shape) or count is None or len(named) != len(set(named)):  # JAX refuses repeated axes
        return None
    parts_of = [math.prod([mesh[axis] for axis in axes]) for axes in axes_of]
    devices = noted.get("devices", range(count))
    shards: dict[Box, list[str]] = {}
    for device, position in zip(devices, itertools.product(*map(range, mesh.values())), strict=True):
        coordinate = dict(zip(mesh, position, strict=True))
        ranges = []
        for extent, axes, parts in zip(shape, axes_of, parts_of, strict=True):
            part = 0
            for axis in axes:
                part = part * mesh[axis] + coordinate[axis]
            ranges.append(_chunk(0, extent, parts, part))
        _add(shards, ranges, str(device))
    return Sharding("device", shards)


def _mesh_axes(axes: Any) -> Sequence[str]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _single_device(notes: Mapping[str, Any], shape: tuple[int, ...]) -> Sharding | None:
    noted = notes["sharding"]
    if noted["type"] != "SingleDeviceSharding":
        return None
    return Sharding("device", {Box.whole(shape): [str(noted["device"])]})


def _dtensor(notes: Mapping[str, Any], shape: tuple[int, ...]) -> Sharding | None:
    """Apply the placements one after another. Each divides the remaining range like `torch.chunk`."""
    noted = notes["dtensor"]
    mesh: Sequence[int] = noted["mesh"]
    placements: Sequence[Mapping[str, Any]] = noted["placements"]
    if _mesh_size(mesh) is None or {placement["kind"] for placement in placements} - {"Shard", "Replicate"}:
        return None  # a strided shard is not one box
    shards: dict[Box, list[str]] = {}
    for position in itertools.product(*map(range, mesh)):
        ranges = [(0, extent) for extent in shape]
        for size, part, placement in zip(mesh, position, placements, strict=True):
            if placement["kind"] == "Shard":
                axis = placement["dim"]
                start, stop = ranges[axis]
                ranges[axis] = _chunk(start, stop, size, part)
        _add(shards, ranges, ", ".join(map(str, position)))
    return Sharding("mesh position", shards)


def _mesh_size(mesh: Sequence[int]) -> int | None:
    """Return the number of positions of a mesh; None if it is not plausible."""
    if len(mesh) > _MAX_AXES or not all(type(size) is int and 0 < size <= _MAX_OWNERS for size in mesh):
        return None
    count = math.prod(mesh)
    return count if count <= _MAX_OWNERS else None


def _chunk(start: int, stop: int, parts: int, part: int) -> tuple[int, int]:
    """Return a part of a range. All parts have the same size, except that the last parts may be smaller or empty."""
    step = -(-(stop - start) // parts)
    return min(start + step * part, stop), min(start + step * (part + 1), stop)


def _add(shards: dict[Box, list[str]], ranges: Sequence[tuple[int, int]], owner: str) -> None:
    box = Box(tuple([start for start, _ in ranges]), tuple([stop for _, stop in ranges]))
    shards.setdefault(box, []).append(owner)


def _between_cuts(record: ArrayRecord) -> Sharding | None:
    """Return the boxes between the recorded boundaries, without owners."""
    if record.cuts is None or math.prod([len(cuts) + 1 for cuts in record.cuts]) > _MAX_OWNERS:
        return None
    axes = [
        list(itertools.pairwise((0, *cuts, extent)))
        for cuts, extent in zip(record.cuts, record.spec.shape, strict=True)
    ]
    shards: dict[Box, list[str]] = {}
    for ranges in itertools.product(*axes):
        box = Box(tuple([start for start, _ in ranges]), tuple([stop for _, stop in ranges]))
        shards[box] = []
    return Sharding("", shards)
