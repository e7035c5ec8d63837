"""The file `_sharding`: shardings of JAX arrays, converted to and from notes of records."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from ckptcore.model import JSON
from ckptcore_orbax.orbax.json_files import (
    encode_json,
    expect_object,
    expect_shape,
    expect_text,
    expect_type,
    parse_json,
    unexpected,
)

SHARDING_FILE: Final = "_sharding"

_MAX_LISTED: Final = 256
"""Maximum size of a mesh without known device ids for which the ids 0, 1, ... are written.

Without ids, Orbax uses all devices that it finds.
"""

_TYPE_PREFIX: Final = "AxisType."
"""Prefix of axis types in Orbax files, as Python prints them."""

_AUTO: Final = "Auto"
"""Default type of an axis."""


def parse_shardings(data: bytes, key: str) -> dict[str, Mapping[str, JSON]]:
    """Return the sharding of each array as a note of ckptcore-jax. The file may be hostile.

    The file is a JSON object: keys are array names in URL-safe base64 of UTF-8, values are strings
    of JSON. The notes:

    - ``{"type": "NamedSharding", "mesh": {axis: size}, "spec": [None | axis | [axes]], "devices":
      [ids], "axis_types": ["Auto" | "Explicit" | "Manual"]}``. The last two are present if the file
      states them: the ids in mesh order, and the types if some are not ``Auto``, the default.
    - ``{"type": "SingleDeviceSharding", "device": "cpu:0"}``, the device as JAX prints it.
    - ``{"type": the name of any other class}``.

    Raises:
        CorruptCheckpointError: the file is invalid.
    """
    shardings: dict[str, Mapping[str, JSON]] = {}
    seen: dict[str, Mapping[str, JSON]] = {}  # many arrays share one sharding, and a mesh can be large
    for encoded, content in expect_object(parse_json(data, key), key, "the file").items():
        try:
            name = base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
        except (binascii.Error, ValueError) as error:
            raise unexpected(key, "a name in base64", encoded) from error
        text = expect_type(content, str, key, "a sharding")
        if text not in seen:
            seen[text] = _decode_sharding(
                expect_object(parse_json(text.encode("utf-8", "replace"), key), key, "a sharding"), key
            )
        shardings[name] = seen[text]
    return shardings


def encode_shardings(shardings: Mapping[str, JSON]) -> bytes:
    """Return the file `_sharding` from notes by array name. Omits shardings that Orbax cannot represent."""
    encoded: dict[str, JSON] = {}
    for name, note in shardings.items():
        document = _encode_sharding(note)
        if document is not None:
            key = base64.urlsafe_b64encode(name.encode("utf-8", "replace")).decode("ascii")
            encoded[key] = json.dumps(document)
    return encode_json(encoded)


def _decode_sharding(members: Mapping[str, JSON], key: str) -> Mapping[str, JSON]:
    kind = expect_text(members.get("sharding_type"), key, "sharding_type")
    if kind == "SingleDeviceSharding":
        # JAX called its CPUs TFRT_CPU_0 before 0.10.
        device = expect_text(members.get("device_str"), key, "device_str").replace("TFRT_CPU_", "cpu:")
        return {"type": kind, "device": device}
    if kind != "NamedSharding":
        return {"type": kind}
    sizes = expect_shape(members.get("shape"), key, "the shape of a mesh")
    axes = [
        expect_text(axis, key, "an axis of a mesh")
        for axis in expect_type(members.get("axis_names"), list, key, "axis_names")
    ]
    if len(set(axes)) != len(sizes) or len(axes) != len(sizes):
        raise unexpected(key, f"{len(sizes)} names of the axes of a mesh", axes)
    known = set(axes)
    spec: list[JSON] = []
    for part in expect_type(members.get("partition_spec"), list, key, "partition_spec"):
        for axis in part if isinstance(part, list) else [] if part is None else [part]:
            if not isinstance(axis, str) or axis not in known:
                raise unexpected(key, "an axis of the mesh in partition_spec", axis)
        spec.append(part)
    note: dict[str, JSON] = {"type": kind, "mesh": dict(zip(axes, sizes, strict=True)), "spec": spec}
    if (mesh := members.get("device_mesh")) is not None:
        devices = _devices(expect_object(mesh, key, "device_mesh").get("mesh"), key)
        if len(devices) != math.prod(sizes):
            raise unexpected(key, f"{math.prod(sizes)} devices in a mesh", len(devices))
        note["devices"] = devices
    if types := members.get("axis_types"):
        names = [expect_text(name, key, "the type of an axis") for name in expect_type(types, list, key, "axis_types")]
        if len(names) != len(axes):
            raise unexpected(key, f"{len(axes)} types of axes", names)
        kinds: list[JSON] = [name.removeprefix(_TYPE_PREFIX) for name in names]
        if any(kind != _AUTO for kind in kinds):
            note["axis_types"] = kinds
    return note


def _devices(mesh: JSON, key: str) -> list[int]:
    """Return the ids of devices in nested lists, in order."""
    devices: list[int] = []
    pending = [mesh]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(reversed(part))
        else:
            devices.append(expect_type(expect_object(part, key, "a device").get("id"), int, key, "the id of a device"))
    return devices


def _encode_sharding(note: JSON) -> JSON:
    """Return Orbax's description of the sharding in a note; None if the note or Orbax cannot describe it."""
    if not isinstance(note, Mapping):
        return None
    if note.get("type") == "SingleDeviceSharding" and isinstance(note.get("device"), str):
        return {"sharding_type": "SingleDeviceSharding", "device_str": note["device"]}
    mesh, spec, types = note.get("mesh"), note.get("spec"), note.get("axis_types")
    if note.get("type") != "NamedSharding" or not isinstance(mesh, Mapping) or not isinstance(spec, Sequence):
        return None
    sizes = [size for size in mesh.values() if isinstance(size, int)]
    count = math.prod(sizes)
    document: dict[str, JSON] = {"sharding_type": "NamedSharding", "shape": sizes, "axis_names": list(mesh)}
    if not isinstance(types, Sequence) or len(types) != len(sizes):
        types = [_AUTO] * len(sizes)  # Orbax writes the default too
    document["axis_types"] = [f"{_TYPE_PREFIX}{name}" for name in types]
    document["partition_spec"] = spec
    devices = note.get("devices")
    if not isinstance(devices, Sequence):
        devices = range(count) if count <= _MAX_LISTED else None
    if devices is not None and len(devices) == count and len(sizes) == len(mesh):
        document["device_mesh"] = {"mesh": _nest_devices([{"id": device} for device in devices], sizes)}
    return document


def _nest_devices(devices: Sequence[JSON], sizes: Sequence[int]) -> JSON:
    for size in reversed(sizes[1:]):
        devices = [devices[start : start + size] for start in range(0, len(devices), size)] if size else []
    return devices
