"""Shards of arrays, from the notes of JAX and PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from ckptcore_jax.shardings import notes_of
from ckptcore_torch.placements import sharding_notes
from ckptcore_view.shardings import Sharding, sharding_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ckptcore.model import ArrayRecord, ArraySpec, Box


def record(shape: tuple[int, ...], notes: Any = None, cuts: Any = None) -> ArrayRecord:
    return ArrayRecord(ArraySpec(shape, "float32"), cuts=cuts, notes=notes or {})


@pytest.mark.parametrize(
    "spec", [("data", "model"), ("data",), (None, ("data", "model")), (("model", "data"),), (), (None, "model")]
)
def test_the_shards_of_a_named_sharding_equal_those_of_jax(spec: tuple[Any, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    described = sharding_of(record((16, 24), notes_of(sharding)))
    expected: dict[tuple[Any, ...], set[str]] = {}
    for device, index in sharding.devices_indices_map((16, 24)).items():
        ranges = tuple([part.indices(extent)[:2] for part, extent in zip(index, (16, 24), strict=True)])
        expected.setdefault(ranges, set()).add(str(device.id))
    assert described is not None
    assert described.owner == "device"
    assert {
        tuple(zip(box.start, box.stop, strict=True)): set(owners) for box, owners in described.shards.items()
    } == expected


def test_devices_in_another_order() -> None:
    mesh = Mesh(np.array(jax.devices()[:4])[::-1], ("x",))
    described = sharding_of(record((4,), notes_of(NamedSharding(mesh, PartitionSpec("x")))))
    assert described is not None
    assert list(described.shards.values()) == [["3"], ["2"], ["1"], ["0"]]


def test_a_single_device() -> None:
    described = sharding_of(record((4,), notes_of(jax.sharding.SingleDeviceSharding(jax.devices()[2]))))
    assert described is not None
    ((box, owners),) = described.shards.items()
    assert box == Box((0,), (4,))
    assert "2" in owners[0]


class FakeMesh(DeviceMesh):
    """A mesh without processes. The notes need only its shape and the names of its axes."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.__dict__.update(_mesh=np.arange(int(np.prod(shape))).reshape(shape), _mesh_dim_names=None)
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def mesh_dim_names(self) -> None:
        return None


def test_a_dtensor() -> None:
    notes = {"dtensor": sharding_notes(FakeMesh((2, 2)), [Shard(0), Replicate()])}
    assert sharding_of(record((5, 3), notes)) == Sharding(
        "mesh position",
        {Box((0, 0), (3, 3)): ["0, 0", "0, 1"], Box((3, 0), (5, 3)): ["1, 0", "1, 1"]},
    )


def test_a_dtensor_that_is_sharded_twice_along_one_axis() -> None:
    described = sharding_of(record((10,), {"dtensor": sharding_notes(FakeMesh((2, 2)), [Shard(0), Shard(0)])}))
    assert described is not None
    assert [(box.start[0], box.stop[0]) for box in described.shards] == [(0, 3), (3, 5), (5, 8), (8, 10)]


def test_boundaries_without_owners() -> None:
    described = sharding_of(record((4, 6), cuts=((2,), (3,))))
    assert described is not None
    assert described.owner == ""
    assert list(described.shards) == [
        Box((0, 0), (2, 3)),
        Box((0, 3), (2, 6)),
        Box((2, 0), (4, 3)),
        Box((2, 3), (4, 6)),
    ]


HOSTILE: list[Any] = [
    {"sharding": None},
    {"sharding": {"type": "NamedSharding"}},
    {"sharding": {"type": "NamedSharding", "mesh": {"x": 10**9}, "spec": ["x"]}},
    {"sharding": {"type": "NamedSharding", "mesh": {"x": -1}, "spec": ["x"]}},
    {"sharding": {"type": "NamedSharding", "mesh": {"x": 2}, "spec": ["y"]}},
    {"sharding": {"type": "NamedSharding", "mesh": {"x": 2}, "spec": ["x", "x", "x"]}},
    {"sharding": {"type": "NamedSharding", "mesh": {"x": 2}, "spec": ["x"], "devices": [1]}},
    {"sharding": {"type": "NamedSharding", "mesh": [2], "spec": 3}},
    {"sharding": {"type": "SingleDeviceSharding"}},
    {"dtensor": {"mesh": [2], "placements": [{"kind": "Shard", "dim": 9}]}},
    {"dtensor": {"mesh": [10**6, 10**6], "placements": []}},
    {"dtensor": {"mesh": [2], "placements": [{"kind": "_StridedShard", "dim": 0, "split_factor": 2}]}},
    {"dtensor": "x"},
    {"other": 1},
]


@pytest.mark.parametrize("notes", HOSTILE, ids=str)
def test_invalid_notes_are_ignored(notes: Any) -> None:
    assert sharding_of(record((4,), notes)) is None
