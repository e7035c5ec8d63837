"""Details of arrays in the tree of `inspect`."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore_tools.cli.inspect import tree_rows

from ckptcore.model import JSON, ArrayRecord, ArraySpec, TreeMetadata
from ckptcore.model.tree import LEAF, Node


def details(*notes: Mapping[str, JSON]) -> list[str]:
    """Return the details of arrays with these notes."""
    records = tuple([ArrayRecord(ArraySpec((4,), "int8"), notes=note) for note in notes])
    tree = TreeMetadata(Node("list", tuple(range(len(records))), (LEAF,) * len(records)), records)
    return [row.detail for row in list(tree_rows(tree, None))[1:]]


def on(device: str) -> dict[str, JSON]:
    return {"sharding": {"type": "SingleDeviceSharding", "device": device}}


MESH: dict[str, JSON] = {"sharding": {"type": "NamedSharding", "mesh": {"data": 2}, "spec": ["data", None]}}
MESH_TEXT = "sharding: NamedSharding mesh=(data=2) spec=(data, -)"


def test_one_device_is_not_said_of_every_array() -> None:
    assert details(on("cpu:0"), MESH, {**on("cpu:0"), "weak_type": True}) == ["", MESH_TEXT, "weak_type: true"]


def test_devices_are_said_where_there_are_several() -> None:
    assert details(on("cpu:0"), on("cpu:1")) == [
        "sharding: SingleDeviceSharding device=cpu:0",
        "sharding: SingleDeviceSharding device=cpu:1",
    ]


def test_long_lists_are_cut() -> None:
    def devices(count: int) -> Mapping[str, JSON]:
        return {"sharding": {"type": "NamedSharding", "devices": list(range(count, 0, -1))}}

    assert details(devices(6), devices(4096)) == [
        "sharding: NamedSharding devices=(6, 5, 4, 3, 2, 1)",
        "sharding: NamedSharding devices=(4096, 4095, 4094, 4093, … 4,096 in all)",
    ]


def test_a_long_note_is_cut() -> None:
    (text,) = details({"remark": "x" * 10_000})
    assert len(text) == 160 and text.startswith("remark: xxx") and text.endswith("x…")


def test_what_is_like_a_device_and_is_none_is_shown() -> None:
    assert details({"at": {"device": "cpu:0"}}, {"at": {"type": "a", "device": 3}}) == [
        "at: device=cpu:0",
        "at: a device=3",
    ]
