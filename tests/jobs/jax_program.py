"""Programs of jax.distributed for the tests of jobs: arrays on parts of the devices, and in host memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
from ckptcore_jax import abstract_arrays
from jax._src.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import ckptcore
from ckptcore import Context
from tests.jobs.counting import Counting
from tests.jobs.processes import Place
from tests.jobs.topologies import WHOLE, assert_part
from tests.jobs.unequal_ranks import refusals, wait_for_late_rank

P: Final[Any] = PartitionSpec
ROWS: Final = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)
QUICK: Final = Context(durability="none")


def run(task: Callable[[Place], Any], place: Place) -> Any:
    """Run a task in a job of jax.distributed."""
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
    """Return a mesh with the axes x and y over all devices of the job."""
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def of_process(owner: int) -> Mesh:
    """Return a mesh with the axis x over the devices of one process."""
    return Mesh(np.array([device for device in jax.devices() if device.process_index == owner]), ("x",))


def parts_of(elements: Any, sharding: Sharding) -> list[jax.Array]:
    """Return the parts of an array on the devices of this process."""
    places = sharding.addressable_devices_indices_map(elements.shape)
    return [
        jax.device_put(elements[index], SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device, index in places.items()
    ]


def sharded(elements: Any, sharding: Sharding) -> jax.Array:
    """Return a sharded array, even if no device of this process has a shard."""
    elements = np.asarray(elements)
    parts = parts_of(elements, sharding)
    return jax.make_array_from_single_device_arrays(elements.shape, sharding, parts, dtype=elements.dtype)


def blank(like: Any) -> Any:
    """Return the tree with abstract arrays, and with default values in place of other leaves."""
    make: Any = jax.ShapeDtypeStruct

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return type(leaf)()
        return make(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=_is_weak(leaf))

    return jax.tree.map(one, like)


def same(tree: Any, expected: Any) -> None:
    """Assert that two trees are equal. Arrays are compared on the devices of this process."""
    structure: Any = jax.tree.structure
    assert structure(tree) == structure(expected)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(expected), strict=True):
        if not isinstance(other, jax.Array):
            assert type(leaf) is type(other) and leaf == other, path
            continue
        assert (leaf.shape, leaf.dtype, _is_weak(leaf)) == (other.shape, other.dtype, _is_weak(other)), path
        assert leaf.sharding == other.sharding, (path, leaf.sharding, other.sharding)
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        for mine, its in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            assert mine.index == its.index and np.asarray(mine.data).tobytes() == np.asarray(its.data).tobytes(), path
            assert mine.data.sharding.memory_kind == other.sharding.memory_kind, path


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))  # PRNG keys have no `weak_type`


def submeshes(place: Place) -> Any:
    """Save and load arrays that all processes have in their trees, but that are on the devices of one process."""
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
    for name in ("tied", "to it"):  # tied by their memory, which is in process 1
        state[name] = jax.make_array_from_single_device_arrays(
            ROWS.shape, NamedSharding(of_process(1), P("x")), parts, dtype=ROWS.dtype
        )
    for layout in place.layouts:
        location = place.directory / f"submeshes-{layout}"
        for save in (ckptcore.save, lambda *given, **named: ckptcore.save_async(*given, **named).result()):
            save(location, state, layout=layout, overwrite=True, context=QUICK)
            same(ckptcore.load(location, blank(state), context=QUICK), state)
        same(ckptcore.load(location, state, context=QUICK), state)
        noted = ckptcore.load(location, abstract_arrays(ckptcore.metadata(location)))
        assert all(noted[f"of {owner}"].is_fully_addressable for owner in range(place.size)), "each has one of its own"
        assert np.array_equal(noted["of 1"], ROWS + 1)
    return "done"


class Placements:
    """Context manager that records the memory kinds of new arrays, and the number of compilations.

    JAX creates every array from host elements with `batched_device_put` (jax 0.10.2).
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.compiled = 0

    def __enter__(self) -> Self:
        self._put: Any = pxla.batched_device_put
        clear: Any = jax.clear_caches
        clear()  # so that repeated computations are compiled again
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        for module in self._users():
            module.batched_device_put = self._noted
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)
        for module in self._users():
            module.batched_device_put = self._put

    def _users(self) -> list[Any]:
        modules = [module for name, module in sys.modules.items() if name.startswith("jax._src")]
        return [module for module in modules if getattr(module, "batched_device_put", None) in (self._put, self._noted)]

    def _noted(self, aval: Any, sharding: Any, *rest: Any, **named: Any) -> Any:
        self.kinds.add(sharding.memory_kind)
        return self._put(aval, sharding, *rest, **named)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.compiled += event.endswith("backend_compile_duration")


def offloaded(place: Place, kinds: Sequence[str] = ("pinned_host", "unpinned_host")) -> Any:
    """Save arrays in host memory, and load them to host memory. This must not use memory of devices."""
    mesh, other = over_all(2, 2), over_all(1, 4)

    def state(over: Mesh, kind: str) -> dict[str, Any]:
        single = SingleDeviceSharding(of_process(place.rank).devices[1], memory_kind=kind)
        data = jax.random.key_data(jax.random.split(jax.random.key(7), 4))
        return {
            "both": sharded(ROWS, NamedSharding(over, P("x", "y"), memory_kind=kind)),
            "across": sharded(ROWS.T.copy(), NamedSharding(over, P("y"), memory_kind=kind)),
            "all": sharded(ROWS[0], NamedSharding(over, P(), memory_kind=kind)),
            "away": sharded(ROWS, NamedSharding(of_process(1), P("x"), memory_kind=kind)),
            "own": jax.device_put(ROWS, single),
            "weak": jax.device_put(2.5, single),
            "keys": jax.random.wrap_key_data(sharded(data, NamedSharding(over, P("x"), memory_kind=kind))),
        }

    with Placements() as detour:
        device = jax.devices()[place.rank * place.devices]
        jnp.sin(jax.device_put(ROWS, device)).block_until_ready()
    assert detour.kinds == {"device"} and detour.compiled, "what is to be noticed is not noticed"
    for kind in kinds:
        saved = state(mesh, kind)
        for layout in place.layouts:
            location = place.directory / f"{kind}-{layout}"
            with Placements() as while_saving:
                ckptcore.save(location, saved, layout=layout, context=QUICK)
                ckptcore.save_async(location, saved, layout=layout, overwrite=True, context=QUICK).result()
            assert not while_saving.kinds and not while_saving.compiled, (kind, layout, while_saving.kinds)
            for expected in (saved, state(other, kind)):
                like = blank(expected)
                with Placements() as while_loading:
                    loaded = ckptcore.load(location, like, context=QUICK)
                assert while_loading.kinds == {kind} and not while_loading.compiled, (layout, while_loading.kinds)
                same(loaded, expected)
            noted = ckptcore.load(location, abstract_arrays(ckptcore.metadata(location)), context=QUICK)
            assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(noted)} == {kind}
            same({name: noted[name] for name in ("both", "keys")}, {name: saved[name] for name in ("both", "keys")})
            on_devices = state(other, "device")
            same(ckptcore.load(location, blank(on_devices), context=QUICK), on_devices)
    return "done"


def counted(place: Place) -> Any:
    """Count bytes per process for arrays that are sharded over the job, sharded over each process, and replicated."""
    mesh = over_all(2, 2)
    elements = np.random.default_rng(0).integers(0, 1 << 30, (4096, 512), np.int32)
    specs = {"cut": P("x", "y"), "by process": P("x"), "by device": P("y"), "everywhere": P()}
    saved: dict[str, Any] = {name: sharded(elements, NamedSharding(mesh, spec)) for name, spec in specs.items()}
    saved["own"] = jnp.asarray(elements)
    saved["small"] = [jnp.arange(4096) + number for number in range(40)]
    by_process = NamedSharding(mesh, P("x"))
    rows = {**saved, **{name: sharded(elements, by_process) for name in ("by device", "everywhere")}}

    def needed(tree: Any) -> list[int]:
        boxes = [
            {str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards} for leaf in jax.tree.leaves(tree)
        ]
        return [nbytes for of_array in boxes for nbytes in of_array.values()]

    answers = {}
    for layout in place.layouts:
        counting = Counting(replicas=ckptcore.context.ReplicaOptions(piece_bytes=1 << 16))
        location = counting.url(place.directory / f"counted-{layout}")
        ckptcore.save(location, saved, layout=layout, context=counting.context)
        written = counting.counted().written
        reads = []
        for like in (saved, rows):
            before = counting.counted().read
            same(ckptcore.load(location, blank(like), context=counting.context), like)
            reads.append({"needed": needed(like), "read": counting.counted().read - before})
        answers[layout] = {"written": written, "reads": reads}
    return {"whole": elements.nbytes * 5 + 40 * 4096 * 4, "layouts": answers}


def topology(*, filled: bool) -> dict[str, Any]:
    """Return arrays that are sharded over both axes of a mesh, over one axis, and over no axis."""
    mesh = over_all(jax.process_count(), len(jax.local_devices()))
    specs = {"even": P("x", "y"), "uneven": P("y"), "few": P(), "count": P()}
    arrays = {name: array if filled else np.zeros_like(array) for name, array in WHOLE.items()}
    return {name: sharded(arrays[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}


def save(place: Place) -> Any:
    """Save arrays over all devices."""
    for layout in place.layouts:
        ckptcore.save(
            place.directory / f"jax{place.size}-{layout}", topology(filled=True), layout=layout, context=QUICK
        )


def load(place: Place) -> Any:
    """Load all checkpoints into arrays over all devices."""
    names = sorted(path.name for path in place.directory.iterdir())
    for name in names:
        loaded = ckptcore.load(place.directory / name, blank(topology(filled=False)), context=QUICK)
        for key, array in loaded.items():
            for shard in array.addressable_shards:
                assert_part(key, shard.data, shard.index)
    return names


def unequal(place: Place) -> Any:
    """Save single-process arrays that differ between ranks, and save with a late rank.

    Arrays over all devices of the job are not compared.
    """
    state = {
        "key": jax.random.key(place.rank),
        "position": jnp.array(100 + place.rank),
        "large": jnp.full((1 << 20,), float(place.rank)),
    }
    messages = refusals(place, state, lambda mine, other: bool((mine == other).all()))
    mesh = NamedSharding(over_all(place.size * place.devices, 1), P())
    ckptcore.save(place.directory / "of-job", {"own": sharded(ROWS + place.rank, mesh)}, layout="dcp", context=QUICK)
    return {"refused": messages, "lines": wait_for_late_rank(place)}


def quick(place: Place) -> Any:
    """Run a sample of all tasks."""
    submeshes(place)
    offloaded(place, ["pinned_host"])
    return counted(place)


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {
    task.__name__: task for task in (submeshes, offloaded, counted, save, load, quick, unequal)
}
