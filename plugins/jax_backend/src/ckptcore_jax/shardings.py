"""Conversion of shardings to notes of an array and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import JSON

__all__ = ["concrete", "notes_of", "sharding_from_notes"]

_CACHED = 1 << 12
"""Cache size for notes of shardings. A model has far fewer."""


def concrete(sharding: Sharding | None) -> Sharding | None:
    """Return a sharding; one over an abstract mesh is moved to the mesh that `jax.set_mesh` set in this thread.

    Raises:
        UnsupportedLeafError: if no mesh is set, or one with other axes.
    """
    abstract_mesh: Any = getattr(jax.sharding, "AbstractMesh", None)  # versions before 0.5 have none
    if not isinstance(sharding, NamedSharding) or abstract_mesh is None or not isinstance(sharding.mesh, abstract_mesh):
        return sharding
    get_mesh: Any = getattr(jax.sharding, "get_mesh", None)  # versions before 0.7 lack it
    mesh = None if get_mesh is None else get_mesh()
    asked = dict(sharding.mesh.shape)
    if mesh is None or mesh.empty:
        raise UnsupportedLeafError(
            f"the sharding {sharding.spec} is over an abstract mesh with the axes {asked}, but "
            "no mesh is set in this thread; load within `with jax.set_mesh(mesh):`, or pass "
            "ckptcore.abstract(tree) made there"
        )
    if list(mesh.shape.items()) != list(asked.items()):
        raise UnsupportedLeafError(
            f"the sharding {sharding.spec} is over an abstract mesh with the axes {asked}, but "
            f"the current mesh has {dict(mesh.shape)}; set a mesh with the same axes, or make "
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
    fastest. It is omitted for 0, 1, 2 and so on. It can also have ``axis_types``: a list of
    ``Auto``, ``Explicit`` and ``Manual``. It is omitted if all are ``Auto``, or if JAX has none. A
    device has the name that JAX prints, as in Orbax.

    Unordered ids need about five bytes per device, once for each different sharding, because a
    checkpoint stores equal notes once. That is 0.3 kB for 64 devices, 20 kB for 4096, and 0.2 MB of
    the root for ten shardings over 4096. Random keys store their notes separately. `jax.make_mesh`
    reorders devices only on TPUs; `jax.sharding.Mesh` over `jax.devices()` in order costs nothing.

    All processes of a job return the same notes: an array on devices of one process gets the
    devices of process 0 at the same positions. Thread-safe; equal shardings get the same object.
    """
    notes: dict[str, JSON] = {"sharding": _sharding_to_json(sharding)}
    kind = sharding.memory_kind
    if kind is not None and kind != _default_memory_kind(sharding):
        notes["memory_kind"] = kind
    return notes


def sharding_from_notes(notes: Mapping[str, JSON], devices: Sequence[jax.Device] | None = None) -> Sharding | None:
    """Return the sharding in the notes of a record, on the present devices.

    A mesh gets the devices with the stored ids. If some are missing but there are enough devices,
    it gets the first of `devices`, in the order of the ids. An array on one device goes to the
    device of that name, or to the first one. Devices of one process become devices of this process.

    Args:
        notes: of an `ckptcore.model.ArrayRecord`, from any version and any plugin, and possibly
            hostile.
        devices: available devices; None for `jax.devices()`.

    Returns:
        None if there are too few devices, or if the notes are malformed or of another class. The
            memory kind is the default if the devices lack the stored one.
    """
    noted = notes.get("sharding")
    if not isinstance(noted, Mapping):
        return None
    found: Sequence[Any] = jax.devices() if devices is None else devices
    if noted.get("type") == "SingleDeviceSharding":
        return _single(noted.get("device"), notes.get("memory_kind"), found)
    if noted.get("type") == "NamedSharding":
        return _named(noted, notes.get("memory_kind"), found)
    return None


def _sharding_to_json(sharding: Sharding) -> JSON:
    kind = type(sharding).__name__
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = _same_everywhere(list(sharding.device_set))
        return {"type": kind, "device": _name(device)}
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
        names = [str(one.name) for one in types]
        if names != ["Auto"] * len(names):
            noted["axis_types"] = names
    return noted


def _axes_to_json(axes: object) -> JSON:
    if axes is None:
        return None
    if isinstance(axes, Iterable) and not isinstance(axes, str):
        return [str(axis) for axis in axes]
    return str(axes)


def _name(device: Any) -> str:
    # Examples: "cpu:3", "cuda:0", "TPU_2(process=0,(0,1,0,0))". JAX before 0.10 wrote TFRT_CPU_3
    # for a CPU; Orbax accepts both.
    return str(device).replace("TFRT_CPU_", "cpu:")


def _default_memory_kind(sharding: Sharding) -> str | None:
    # Some versions of JAX know this only for devices of this process, but all processes must return
    # the same notes.
    device: Any = next(iter(sharding.addressable_devices), None) or jax.local_devices()[0]
    try:
        return str(device.default_memory().kind)
    except (AttributeError, NotImplementedError, RuntimeError):  # a backend without memory kinds
        return None


def _same_everywhere(devices: Sequence[Any]) -> Sequence[Any]:
    """Replace devices of one process by those of process 0, because the notes of all processes must be equal."""
    return _in_process(devices, 0)


def _in_process(devices: Sequence[Any], process: int) -> Sequence[Any]:
    """Replace devices of one process by those of another at the same positions, if it has them."""
    owners = {device.process_index for device in devices}
    if owners == {process} or len(owners) != 1:
        return devices
    (owner,) = owners
    platform = devices[0].platform
    theirs = {device.id: place for place, device in enumerate(_local(owner, platform))}
    others = _local(process, platform)
    places = [theirs.get(device.id, len(others)) for device in devices]
    return [others[place] for place in places] if max(places) < len(others) else devices


def _local(process: int, platform: str) -> Sequence[Any]:
    return [device for device in jax.devices(platform) if device.process_index == process]


def _single(name: JSON, memory_kind: JSON, devices: Sequence[Any]) -> Sharding | None:
    if not isinstance(name, str) or not devices:
        return None
    wanted = name.replace("TFRT_CPU_", "cpu:")
    device = next((device for device in devices if _name(device) == wanted), devices[0])
    (own,) = _in_process([device], jax.process_index())
    return _in_memory(lambda **kind: SingleDeviceSharding(own, **kind), memory_kind)


def _named(noted: Mapping[str, JSON], memory_kind: JSON, devices: Sequence[Any]) -> Sharding | None:
    sizes = noted.get("mesh")
    if not isinstance(sizes, Mapping):
        return None
    count, shape = 1, list[int]()
    for size in sizes.values():
        if type(size) is not int or size < 1:
            return None
        shape.append(size)
        count *= size
        if count > len(devices):  # before allocating a size from a file
            return None
    chosen, spec = _chosen(noted.get("devices"), count, devices), _spec(noted.get("spec"), sizes)
    if chosen is None or spec is None:
        return None
    grid = np.empty(count, object)
    grid[:] = _in_process(chosen, jax.process_index())
    try:
        mesh = Mesh(grid.reshape(shape), tuple(sizes), **_axis_types(noted.get("axis_types")))
        return _in_memory(lambda **kind: NamedSharding(mesh, spec, **kind), memory_kind)
    except (
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
    ):  # more axes than a mesh can have, or unknown axis types
        return None


def _spec(noted: JSON, axes: Mapping[str, JSON]) -> PartitionSpec | None:
    """Return the partition of an array over a mesh, or None if it is not a list of mesh axes without repetitions."""
    if not isinstance(noted, list | tuple):
        return None
    parts = [tuple(part) if isinstance(part, list | tuple) else part for part in noted]
    named = [axis for part in parts if part is not None for axis in (part if isinstance(part, tuple) else (part,))]
    if not all(isinstance(axis, str) and axis in axes for axis in named) or len(set(named)) != len(named):
        return None
    partition: Any = PartitionSpec  # the constructor is untyped in JAX
    spec: PartitionSpec = partition(*parts)
    return spec


def _chosen(ids: JSON, count: int, devices: Sequence[Any]) -> Sequence[Any] | None:
    """Return the devices of a mesh in order, or None for invalid ids or too few devices."""
    if ids is None:
        ids = list(range(count))
    if not isinstance(ids, list | tuple) or len(ids) != count or any(type(one) is not int for one in ids):
        return None
    if len(set(ids)) != count:
        return None
    there = {device.id: device for device in devices}
    if all(one in there for one in ids):
        return [there[one] for one in ids]
    place = {one: number for number, one in enumerate(sorted(ids))}
    return [devices[place[one]] for one in ids]


def _axis_types(noted: JSON) -> Mapping[str, Any]:
    """Return the arguments of a mesh for its axis types.

    Raises:
        KeyError, TypeError: for unknown types.
    """
    kinds: Any = getattr(jax.sharding, "AxisType", None)
    if noted is None or kinds is None:  # versions before 0.6 have no axis types
        return {}
    if not isinstance(noted, list | tuple):
        raise TypeError(f"the types of axes must be a list, not {noted!r:.80}")
    return {"axis_types": tuple([kinds[name] for name in noted])}


def _in_memory(make: Any, kind: JSON) -> Sharding:
    made: Sharding
    try:
        made = make(memory_kind=kind if isinstance(kind, str) else None)
    except ValueError:
        made = make()  # these devices lack the memory kind
    return made
