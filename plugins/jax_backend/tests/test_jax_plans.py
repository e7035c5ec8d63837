"""Planning a save of JAX states needs only shardings of existing devices: no transfers, and no elements."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_jax.leaves import JaxLeafHandler
from ckptcore_jax.shardings import Placement, placement_of, shards_in_process
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptcore
from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import Box, Shard
from ckptcore.protocols import LeafHandler


def _mesh() -> Mesh:
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(len(devices)), ("x",))


def test_deleted_and_abstract_arrays_are_planned_as_live_ones() -> None:
    sharding = NamedSharding(_mesh(), PartitionSpec("x"))
    rows = 8 * len(jax.devices())
    live = {"w": jax.device_put(jnp.ones((rows, 16)), sharding), "key": jax.random.key(0)}
    deleted = {"w": jax.device_put(jnp.ones((rows, 16)), sharding), "key": jax.random.key(0)}
    deleted["w"].delete()
    deleted["key"].delete()
    abstract = {
        "w": jax.ShapeDtypeStruct((rows, 16), jnp.float32, sharding=sharding),
        "key": jax.ShapeDtypeStruct((), live["key"].dtype, sharding=live["key"].sharding),
    }
    plan = ckptcore.plan(live, layout="dcp")
    assert plan.array_bytes == rows * 16 * 4 + 8
    assert (plan.memory[0].copied, plan.memory[0].viewed) == (rows * 16 * 4 + 8, 0)  # arrays in host memory are viewed
    assert ckptcore.plan(deleted, layout="dcp") == plan
    assert ckptcore.plan(abstract, layout="dcp") == plan


def test_plan_counts_the_memory_of_copies() -> None:
    state = {"w": jax.ShapeDtypeStruct((10, 16), jnp.bfloat16)}
    memory = ckptcore.plan(state).memory[0]
    assert memory.copied == memory.viewed == 320
    packed = ckptcore.plan({"w": jnp.ones(8, jnp.int4)}).memory[0]
    assert packed.viewed == packed.copied == 8
    viewing = ckptcore.Context(plugins=ckptcore.context.PluginOptions(handlers={jax.Array: JaxLeafHandler(copy=False)}))
    assert ckptcore.plan({"w": jnp.ones(8)}, context=viewing).memory[0].copied == 0
    assert ckptcore.plan({"w": jnp.ones(8)}).memory[0].copied == 32


def test_the_handler_overrides_estimates_of_leaves() -> None:
    assert JaxLeafHandler.shards_of is not LeafHandler.shards_of
    assert JaxLeafHandler.host_bytes is not LeafHandler.host_bytes


def test_plan_with_an_abstract_mesh_is_refused() -> None:
    mesh = jax.make_mesh((4,), ("x",)).abstract_mesh
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    with pytest.raises(UnsupportedLeafError):
        ckptcore.plan({"w": leaf}, processes=4)


def test_boxes_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    top, bottom = Box((0, 0), (4, 8)), Box((4, 0), (8, 8))
    placement = Placement({top: 0}, {top: (0, 1), bottom: (2, 3)}, 2, ((4,), ()), 4, False, True, {})
    monkeypatch.setattr("ckptcore_jax.shardings.placement_of", lambda sharding, shape: placement)
    sharding = NamedSharding(_mesh(), PartitionSpec("x"))
    shards = [shards_in_process(sharding, (8, 8), process, process, 5) for process in range(5)]
    assert shards == [(Shard(top, 0, 2),), (Shard(top, 1, 2),), (Shard(bottom, 0, 2),), (Shard(bottom, 1, 2),), None]
    assert placement_of(sharding, (8, 8)) is not placement
