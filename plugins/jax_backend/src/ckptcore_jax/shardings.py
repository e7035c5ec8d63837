"""Shardings: boxes and processes of an array, and conversion to and from the notes of an array record."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import JSON, Box, Shard
from ckptcore.planning import cuts_of

_CACHED = 1 << 12
"""Cache size for notes of shardings. A model has far fewer shardings."""


def concrete_sharding(sharding: Sharding | None) -> Sharding | None:
    """Replace an abstract mesh in a sharding by the mesh that `jax.set_mesh` set in this thread.

    Raises:
        UnsupportedLeafError: if no mesh is set, or if the mesh has other axes.
    """
    abstract_mesh: Any = getattr(jax.sharding, "AbstractMesh", None)  # versions before 0.5 have none
    if not isinstance(sharding, NamedSharding) or abstract_mesh is None or not isinstance(sharding.mesh, abstract_mesh):
        return sharding
    get_mesh: Any = getattr(jax.sharding, "get_mesh", None)  # versions before 0.7 lack it
    mesh = None if get_mesh is None else get_mesh()
    axes = dict(sharding.mesh.shape)
    if mesh is None or mesh.empty:
        raise UnsupportedLeafError(
            f"the sharding {sharding.spec} is over an abstract mesh with the axes {axes}, but "
            "no mesh is set in this thread; load within `with jax.set_mesh(mesh):`, or call "
            "ckptcore.abstract(tree) there and pass its result"
        )
    if list(mesh.shape.items()) != list(axes.items()):
        raise UnsupportedLeafError(
            f"the sharding {sharding.spec} is over an abstract mesh with the axes {axes}, but "
            f"the current mesh has {dict(mesh.shape)}; set a mesh with the same axes, or create "
            "the abstract tree with the current mesh"
        )
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


@functools.lru_cache(maxsize=_CACHED)
def notes_of(sharding: Sharding) -> Mapping[str, JSON]:
    """Return the notes for a sharding: ``sharding``, and ``memory_kind`` if it is not the default.

    ``sharding`` is one of::

        {"type": "NamedSharding", "mesh": {axis: size, ...}, "spec": [None | axis | [axis, ...], ...]}
        {"type": "SingleDeviceSharding", "device": "cpu:0"}
        {"type": name of the class, "devices": number of devices}

    The first form can have ``devices``: the ids of the devices in the order of the mesh, last axis
    fastest. It is omitted if the ids are 0, 1, 2 and so on. The first form can also have
    ``axis_types``: a list of ``Auto``, ``Explicit`` and ``Manual``. It is omitted if all are
    ``Auto``, or if JAX has no axis types. ``device`` is the device as JAX prints it, as in Orbax.

    A list of ids needs about five bytes per device: 0.3 kB for 64 devices, 20 kB for 4096. A
    checkpoint stores equal notes once, so ten different shardings over 4096 devices take 0.2 MB.
    Random keys have additional notes, so their notes, with the list, are stored separately.
    `jax.make_mesh` reorders devices only on TPUs. A `jax.sharding.Mesh` over `jax.devices()` in
    order needs no list.

    All processes of a job return the same notes. If all devices of a sharding belong to one
    process, the notes name the devices of process 0 at the same positions instead. Thread-safe. The
    result is the same object for equal shardings.
    """
    notes: dict[str, JSON] = {"sharding": _sharding_to_json(sharding)}
    kind = sharding.memory_kind
    if kind is not None and kind != _default_memory_kind(sharding):
        notes["memory_kind"] = kind
    return notes


def sharding_from_notes(notes: Mapping[str, JSON], devices: Sequence[jax.Device] | None = None) -> Sharding | None:
    """Return the sharding in the notes of a record, on the available devices.

    A mesh consists of the devices with the stored ids. If some id is missing among `devices`, the
    mesh uses the first devices instead: the first device for the smallest id, and so on. A
    single-device sharding uses the device with the stored name, or the first device if that name is
    missing. If all chosen devices belong to one process, the calling process uses its own devices
    at the same positions, if they exist.

    Args:
        notes: notes of a `ckptcore.model.ArrayRecord`, from any version and any plugin. They can be
            hostile.
        devices: available devices; None for `jax.devices()`.

    Returns:
        The sharding, with the default memory kind if the devices lack the stored one. None if there
            are too few devices, or if the notes are malformed or describe another class of
            sharding.
    """
    noted = notes.get("sharding")
    if not isinstance(noted, Mapping):
        return None
    all_devices: Sequence[Any] = jax.devices() if devices is None else devices
    if noted.get("type") == "SingleDeviceSharding":
        return _single_device_sharding(noted.get("device"), notes.get("memory_kind"), all_devices)
    if noted.get("type") == "NamedSharding":
        return _named_sharding(noted, notes.get("memory_kind"), all_devices)
    return None


def _sharding_to_json(sharding: Sharding) -> JSON:
    kind = type(sharding).__name__
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = _same_everywhere(list(sharding.device_set))
        return {"type": kind, "device": _device_name(device)}
    if not isinstance(sharding, NamedSharding):
        return {"type": kind, "devices": len(sharding.device_set)}
    mesh = sharding.mesh
    noted: dict[str, JSON] = {
        "type": kind,
        "mesh": {str(name): size for name, size in mesh.shape.items()},
        "spec": [_axes_to_json(axes) for axes in sharding.spec],
    }
    ids = [int(device.id) for device in _same_everywhere(list(mesh.devices.flat))]
    if ids != list(range(len(ids))):
        noted["devices"] = ids
    types = getattr(mesh, "axis_types", None)  # versions before 0.6 have none, or a dict with only Auto
    if isinstance(types, tuple):
        names = [str(axis.name) for axis in types]
        if names != ["Auto"] * len(names):
            noted["axis_types"] = names
    return noted


def _axes_to_json(axes: object) -> JSON:
    if axes is None:
        return None
    if isinstance(axes, Iterable) and not isinstance(axes, str):
        return [str(axis) for axis in axes]
    return str(axes)


def _device_name(device: Any) -> str:
    # Examples: "cpu:3", "cuda:0", "TPU_2(process=0,(0,1,0,0))". JAX before 0.10 wrote TFRT_CPU_3
    # for a CPU; Orbax accepts both.
    return str(device).replace("TFRT_CPU_", "cpu:")


def _default_memory_kind(sharding: Sharding) -> str | None:
    # Use a device of this process: some versions of JAX do not know the memory kinds of other
    # processes' devices, and the notes would then differ between processes.
    device: Any = next(iter(sharding.addressable_devices), None) or jax.local_devices()[0]
    try:
        return str(device.default_memory().kind)
    except (AttributeError, NotImplementedError, RuntimeError):  # a backend without memory kinds
        return None


def _same_everywhere(devices: Sequence[Any]) -> Sequence[Any]:
    """Replace the devices of one process by the devices of process 0, so that all processes write equal notes."""
    return _in_process(devices, 0)


def _in_process(devices: Sequence[Any], process: int) -> Sequence[Any]:
    """If all devices belong to one process, replace them by the devices of `process` at the same positions.

    Return the devices unchanged if `process` has no such devices.
    """
    owners = {device.process_index for device in devices}
    if owners == {process} or len(owners) != 1:
        return devices
    (owner,) = owners
    platform = devices[0].platform
    position_of = {device.id: position for position, device in enumerate(_devices_of_process(owner, platform))}
    others = _devices_of_process(process, platform)
    positions = [position_of.get(device.id, len(others)) for device in devices]
    return [others[position] for position in positions] if max(positions) < len(others) else devices


def _devices_of_process(process: int, platform: str) -> Sequence[Any]:
    return [device for device in jax.devices(platform) if device.process_index == process]


def _single_device_sharding(name: JSON, memory_kind: JSON, devices: Sequence[Any]) -> Sharding | None:
    if not isinstance(name, str) or not devices:
        return None
    wanted = name.replace("TFRT_CPU_", "cpu:")
    device = next((device for device in devices if _device_name(device) == wanted), devices[0])
    (own,) = _in_process([device], jax.process_index())
    return _with_memory_kind(lambda **kind: SingleDeviceSharding(own, **kind), memory_kind)


def _named_sharding(noted: Mapping[str, JSON], memory_kind: JSON, devices: Sequence[Any]) -> Sharding | None:
    sizes = noted.get("mesh")
    if not isinstance(sizes, Mapping):
        return None
    count, shape = 1, list[int]()
    for size in sizes.values():
        if type(size) is not int or size < 1:
            return None
        shape.append(size)
        count *= size
        if count > len(devices):  # check first: the size of the grid comes from a file
            return None
    chosen, spec = _mesh_devices(noted.get("devices"), count, devices), _partition_spec(noted.get("spec"), sizes)
    if chosen is None or spec is None:
        return None
    grid = np.empty(count, object)
    grid[:] = _in_process(chosen, jax.process_index())
    try:
        mesh = Mesh(grid.reshape(shape), tuple(sizes), **_axis_types(noted.get("axis_types")))
        return _with_memory_kind(lambda **kind: NamedSharding(mesh, spec, **kind), memory_kind)
    except (
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
    ):  # too many axes for a mesh, or unknown axis types
        return None


def _partition_spec(noted: JSON, axes: Mapping[str, JSON]) -> PartitionSpec | None:
    """Return the PartitionSpec in notes, or None if it is not a list of distinct mesh axes."""
    if not isinstance(noted, list | tuple):
        return None
    parts = [tuple(part) if isinstance(part, list | tuple) else part for part in noted]
    named = [axis for part in parts if part is not None for axis in (part if isinstance(part, tuple) else (part,))]
    if not all(isinstance(axis, str) and axis in axes for axis in named) or len(set(named)) != len(named):
        return None
    partition: Any = PartitionSpec  # the constructor is untyped in JAX
    spec: PartitionSpec = partition(*parts)
    return spec


def _mesh_devices(ids: JSON, count: int, devices: Sequence[Any]) -> Sequence[Any] | None:
    """Return the devices of a mesh in order, or None for invalid ids. Expects at least `count` devices."""
    if ids is None:
        ids = list(range(count))
    if not isinstance(ids, list | tuple) or len(ids) != count or any(type(device_id) is not int for device_id in ids):
        return None
    if len(set(ids)) != count:
        return None
    by_id = {device.id: device for device in devices}
    if all(device_id in by_id for device_id in ids):
        return [by_id[device_id] for device_id in ids]
    position = {device_id: number for number, device_id in enumerate(sorted(ids))}
    return [devices[position[device_id]] for device_id in ids]


def _axis_types(noted: JSON) -> Mapping[str, Any]:
    """Return the keyword arguments of `Mesh` for its axis types.

    Raises:
        KeyError, TypeError: for unknown types.
    """
    kinds: Any = getattr(jax.sharding, "AxisType", None)
    if noted is None or kinds is None:  # versions before 0.6 have no axis types
        return {}
    if not isinstance(noted, list | tuple):
        raise TypeError(f"the types of axes must be a list, not {noted!r:.80}")
    return {"axis_types": tuple([kinds[name] for name in noted])}


def _with_memory_kind(make: Any, kind: JSON) -> Sharding:
    sharding: Sharding
    try:
        sharding = make(memory_kind=kind if isinstance(kind, str) else None)
    except ValueError:
        sharding = make()  # these devices lack the memory kind
    return sharding


_CACHED_PLACEMENTS = 1 << 14
"""Cache size for the boxes of a sharding and a shape. A model has far fewer such pairs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Boxes of an array with a sharding.

    Attributes:
        boxes: each box in this process, with the position of its first device among the array's
            devices in this process.
        holders: each box in the job, with the JAX indices of the processes that have it, in the
            order of the devices.
        replicas: number of processes that have each box, or 1 if this number varies. None if all
            devices of the array are in one process, because each process may have such an array.
        cuts: boundaries between boxes along each axis; None if there is only one box.
        devices: number of devices with the array in all processes.
        local: True if all devices are in this process.
        on_cpu: True if the devices belong to the CPU backend. NumPy can then view the elements.
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


@functools.lru_cache(maxsize=_CACHED_PLACEMENTS)
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


@functools.lru_cache(maxsize=_CACHED_PLACEMENTS)
def shards_of(sharding: Sharding, shape: tuple[int, ...], rank: int, size: int) -> tuple[Shard, ...] | None:
    """Return each box in this process once, or None if the process has no device of the array.

    Replicas of a box are counted by process, not by device. An array whose devices are all in this
    process is assumed to be equal on all processes.

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
