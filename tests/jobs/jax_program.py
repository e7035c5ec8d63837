"""What processes of jax.distributed do in the tests of jobs: arrays on parts of the devices, and in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from ckptcore_jax import abstract_arrays
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import ckptcore
from ckptcore import Context
from tests.jobs.processes import Place

__all__ = ["TASKS", "run"]

P: Final[Any] = PartitionSpec
ROWS: Final = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)
LAYOUTS: Final = ("safetensors", "zarr3", "ocdbt", "dcp")
QUICK: Final = Context(durability="none")


def run(task: Callable[[Place], Any], place: Place) -> Any:
    """Do a task in a job of jax.distributed."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={place.devices}"
    update: Any = jax.config.update
    update("jax_cpu_collectives_implementation", "gloo")
    update("jax_platforms", "cpu")
    address = f"127.0.0.1:{place.port}"
    jax.distributed.initialize(address, place.size, place.rank, cluster_detection_method="deactivate")
    answer = task(place)
    shutdown: Any = jax.distributed.shutdown
    shutdown()
    return answer


def over_all(*shape: int) -> Mesh:
    """A mesh with the axes x and y over every device of the job."""
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def of_process(owner: int) -> Mesh:
    """A mesh with the axis x over the devices of one process."""
    return Mesh(np.array([device for device in jax.devices() if device.process_index == owner]), ("x",))


def parts_of(elements: Any, sharding: Sharding) -> list[jax.Array]:
    """What the devices of this process hold of an array."""
    places = sharding.addressable_devices_indices_map(elements.shape)
    return [
        jax.device_put(elements[index], SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device, index in places.items()
    ]


def sharded(elements: Any, sharding: Sharding) -> jax.Array:
    """An array; also where no device of this process holds any of it."""
    elements = np.asarray(elements)
    parts = parts_of(elements, sharding)
    return jax.make_array_from_single_device_arrays(elements.shape, sharding, parts, dtype=elements.dtype)


def blank(like: Any) -> Any:
    """The same tree with abstract arrays."""
    make: Any = jax.ShapeDtypeStruct

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return type(leaf)()
        return make(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=_is_weak(leaf))

    return jax.tree.map(one, like)


def same(found: Any, expected: Any) -> None:
    """Assert that two trees have the same arrays, where this process has them."""
    structure: Any = jax.tree.structure
    assert structure(found) == structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        if not isinstance(other, jax.Array):
            assert type(one) is type(other) and one == other, path
            continue
        assert (one.shape, one.dtype, _is_weak(one)) == (other.shape, other.dtype, _is_weak(other)), path
        assert one.sharding == other.sharding, (path, one.sharding, other.sharding)
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        for mine, its in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert mine.index == its.index and np.asarray(mine.data).tobytes() == np.asarray(its.data).tobytes(), path
            assert mine.data.sharding.memory_kind == other.sharding.memory_kind, path


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))  # keys have none


def submeshes(place: Place) -> Any:
    """Arrays on the devices of one process, which the others know of too."""
    mesh = over_all(2, 2)
    state: dict[str, Any] = {"both": sharded(ROWS, NamedSharding(mesh, P("x"))), "own": jnp.arange(5), "step": 3}
    for owner in range(place.size):
        over_one = NamedSharding(of_process(owner), P("x"))
        state[f"of {owner}"] = sharded(ROWS + owner, over_one)
        state[f"one of {owner}"] = sharded(
            np.arange(3, dtype=np.int32) + owner, SingleDeviceSharding(of_process(owner).devices[1])
        )
        data = jax.random.key_data(jax.random.split(jax.random.key(owner), 4))
        state[f"keys of {owner}"] = jax.random.wrap_key_data(sharded(data, over_one))
    parts = parts_of(ROWS * 2, NamedSharding(of_process(1), P("x")))
    for name in ("tied", "to it"):  # by their memory, which process 0 does not see
        state[name] = jax.make_array_from_single_device_arrays(
            ROWS.shape, NamedSharding(of_process(1), P("x")), parts, dtype=ROWS.dtype
        )
    for layout in LAYOUTS:
        for save in (ckptcore.save, lambda *given, **named: ckptcore.save_async(*given, **named).result()):
            save(place.directory / layout, state, layout=layout, overwrite=True, context=QUICK)
            same(ckptcore.load(place.directory / layout, blank(state), context=QUICK), state)
        same(ckptcore.load(place.directory / layout, state, context=QUICK), state)
        noted = ckptcore.load(place.directory / layout, abstract_arrays(ckptcore.metadata(place.directory / layout)))
        assert all(noted[f"of {owner}"].is_fully_addressable for owner in range(place.size)), "each has one of its own"
        assert np.array_equal(noted["of 1"], ROWS + 1)
    return "done"


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {"submeshes": submeshes}
