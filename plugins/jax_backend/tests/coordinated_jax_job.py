"""A job whose processes save and load together.

``coordinated_jax_job.py ADDRESS RANK SIZE DEVICES TASK DIRECTORY``. Each process has DEVICES
devices of the host. Raises an error on a wrong result.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

ADDRESS, RANK, SIZE, DEVICES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax
import jax.numpy as jnp
import numpy as np
from ckptcore_jax import KeyValueCoordinator, abstract_arrays
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions
from ckptcore.errors import CheckpointError, CoordinationTimeoutError, PluginConflictError, RankFailedError
from ckptcore.runtime import runtime_of

P: Final[Any] = PartitionSpec
ROWS: Final = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)


def over_all(*shape: int) -> Mesh:
    """Return a mesh with the axes x and y over all devices of the job."""
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def sharded(elements: Any, sharding: Any) -> jax.Array:
    elements = np.asarray(elements)
    return jax.make_array_from_callback(elements.shape, sharding, lambda index: elements[index])


def state(mesh: Mesh, step: int) -> dict[str, Any]:
    """Return arrays of every kind: sharded, replicated, on some processes, and separate on each process."""
    key = jax.random.key(7)
    return {
        "both": sharded(ROWS + step, NamedSharding(mesh, P("x", "y"))),
        "across": sharded(ROWS.T + step, NamedSharding(mesh, P("y"))),
        "everywhere": sharded(np.arange(40_000, dtype=np.int32) + step, NamedSharding(mesh, P())),
        "own": jnp.arange(5) + step,
        "key": key,
        "keys": jax.random.wrap_key_data(
            sharded(jax.random.key_data(jax.random.split(key, 4)), NamedSharding(mesh, P("x")))
        ),
        "step": step,
    }


def blank(like: Any) -> Any:
    def blank_leaf(leaf: Any) -> Any:
        make: Any = jax.ShapeDtypeStruct
        if not isinstance(leaf, jax.Array):
            return type(leaf)()
        return make(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(blank_leaf, like)


def same(actual: Any, expected: Any) -> None:
    """Assert equal arrays, with equal shardings on the devices of this process."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        if not isinstance(other, jax.Array):
            assert type(leaf) is type(other) and leaf == other, path
            continue
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), path
        assert leaf.sharding == other.sharding, (path, leaf.sharding, other.sharding)
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        for mine, its in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            assert mine.index == its.index and np.asarray(mine.data).tobytes() == np.asarray(its.data).tobytes(), path


def bytes_below(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def small(directory: Path) -> None:
    """Save sharded and replicated arrays, and load them with other shardings."""
    mesh, other = over_all(2, 2), over_all(1, 4)
    saved = {"cut": sharded(ROWS, NamedSharding(mesh, P("x", "y"))), "all": sharded(ROWS, NamedSharding(mesh, P()))}
    wanted = {"cut": sharded(ROWS, NamedSharding(other, P("y"))), "all": sharded(ROWS, NamedSharding(other, P("x")))}
    ckptcore.save(directory / "c", saved, layout="ocdbt", context=Context(durability="none"))
    same(ckptcore.load(directory / "c", blank(wanted)), wanted)


def layouts(directory: Path) -> None:
    """Save on one mesh. Load on the same mesh, on another mesh, with the stored shardings, and as NumPy arrays."""
    mesh, other = over_all(SIZE, DEVICES), over_all(1, SIZE * DEVICES)
    saved, wanted = state(mesh, 3), state(other, 3)
    for layout in ("zarr3", "ocdbt", "dcp"):
        place = directory / layout
        ckptcore.save(place, saved, layout=layout)
        for expected in (saved, wanted):
            same(ckptcore.load(place, blank(expected)), expected)
        same(ckptcore.load(place, abstract_arrays(ckptcore.metadata(place))), saved)
        assert np.array_equal(ckptcore.load(place)["both"], ROWS + 3)


def reshard(directory: Path) -> None:
    """Load a checkpoint of a job of another size, and save it again."""
    here = state(over_all(SIZE * DEVICES, 1), 3)
    for layout in ("zarr3", "ocdbt", "dcp"):
        loaded = ckptcore.load(directory / layout, blank(here))
        same(loaded, here)
        ckptcore.save(directory / f"{layout}-{SIZE}", loaded, layout=layout)


def once(directory: Path) -> None:
    """Check that arrays on all devices are written once, including arrays with two replicas."""
    random = np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
    mesh = over_all(2, 2)
    held = {
        "everywhere": sharded(random, NamedSharding(mesh, P())),
        "twice": sharded(random[::-1], NamedSharding(mesh, P("y"))),
        "own": jnp.asarray(random[::2]),
    }
    for layout in ("zarr3", "ocdbt", "dcp"):
        handle = ckptcore.save_async(directory / layout, held, layout=layout)
        handle.result()
        assert bytes_below(directory / layout) < 2.5 * (1 << 20) + 100_000, layout


def run(directory: Path) -> None:
    """Save in the background, as steps and as overwrites. Then fail a save on one rank."""
    mesh = over_all(2, 2)
    job = runtime_of(Context()).job()
    assert isinstance(job, KeyValueCoordinator) and (job.rank, job.size) == (RANK, SIZE)
    ckptcore.save_async(directory / "async", state(mesh, 1), layout="zarr3").result()
    same(ckptcore.load(directory / "async", blank(state(mesh, 1))), state(mesh, 1))
    for step in (1, 2):
        ckptcore.save(directory / "again", state(mesh, step), layout="ocdbt", overwrite=True)
    same(ckptcore.load(directory / "again", blank(state(mesh, 2))), state(mesh, 2))
    with ckptcore.Checkpointer(directory / "run", layout="ocdbt") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(mesh, step))
        checkpointer.wait()
        assert checkpointer.latest == 3
        same(checkpointer.load(2, blank(state(mesh, 2))), state(mesh, 2))
    bad: dict[str, object] = {"step": object() if RANK else 1}
    try:
        ckptcore.save(directory / "failed", bad, layout="zarr3")
    except CheckpointError as error:
        assert isinstance(error, RankFailedError) == (RANK == 0), error
    else:
        raise AssertionError("a state that cannot be saved was saved")
    assert not (directory / "failed").exists()
    ckptcore.save(directory / "failed", state(mesh, 4), layout="zarr3")
    own = ckptcore.PerProcess({"position": jnp.arange(3) + RANK})
    ckptcore.save_checkpointables(directory / "parts", {"data": own, "model": state(mesh, 5)}, layout="zarr3")
    blanks = {"data": ckptcore.PerProcess({"position": jnp.zeros(3, jnp.int32)}), "model": blank(state(mesh, 5))}
    parts = ckptcore.load_checkpointables(directory / "parts", blanks)
    assert parts["data"]["position"].tolist() == [RANK, RANK + 1, RANK + 2]
    same(parts["model"], state(mesh, 5))
    _save_in_two_jobs(directory, job)
    left = job._client.key_value_dir_get_bytes("ckptcore")
    job.gather("over", b"")
    assert RANK or not [name for name, _ in left if "/gather/" in name], left


def orbax(directory: Path) -> None:
    """Exchange checkpoints of the job with Orbax in both directions.

    Each checkpoint is loaded onto the mesh of the save and onto another mesh.
    """
    from orbax.checkpoint import v1 as ocp

    mesh, other = over_all(2, 2), over_all(1, 4)
    # Orbax rejects arrays that are separate on each process.
    saved, wanted = (
        {name: leaf for name, leaf in state(over, 3).items() if name not in ("own", "key")} for over in (mesh, other)
    )
    ckptcore.save(directory / "ours", saved, layout="ocdbt")
    ocp.save((directory / "theirs").absolute(), saved)
    for expected in (saved, wanted):
        same(ocp.load((directory / "ours").absolute(), expected), expected)
        same(ckptcore.load(directory / "theirs", blank(expected)), expected)
    same(ckptcore.load(directory / "theirs", abstract_arrays(ckptcore.metadata(directory / "theirs"))), saved)


def _save_in_two_jobs(directory: Path, job: KeyValueCoordinator) -> None:
    """Check that a coordinator must be selected if the processes are also a job of torch.distributed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=RANK, world_size=SIZE)
    try:
        ckptcore.save(directory / "two jobs", {"own": jnp.arange(3)}, layout="zarr3")
    except PluginConflictError as error:
        assert "jax and torch" in str(error) or "torch and jax" in str(error), error
    else:
        raise AssertionError("one of two jobs was chosen")
    ckptcore.save(
        directory / "two jobs", {"own": jnp.arange(3)}, layout="zarr3", context=Context(job=JobOptions(coordinator=job))
    )
    dist.destroy_process_group()


def part(directory: Path) -> None:
    """Save arrays on the devices of one process.

    The other processes do not pass them. Also save from one process alone.
    """

    def over_one(owner: int) -> jax.Array:
        theirs = [device for device in jax.devices() if device.process_index == owner]
        sharding = NamedSharding(Mesh(np.array(theirs), ("x",)), P("x"))
        places = sharding.addressable_devices_indices_map(ROWS.shape)
        parts = [jax.device_put(ROWS[index] + owner, device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays(ROWS.shape, sharding, parts, dtype=ROWS.dtype)

    mesh = over_all(2, 2)
    held = {f"of {RANK}": over_one(RANK), "both": sharded(ROWS, NamedSharding(mesh, P("x")))}
    for layout in ("zarr3", "ocdbt", "dcp"):
        ckptcore.save(directory / layout, held, layout=layout)
        same(ckptcore.load(directory / layout, blank(held)), held)
        loaded = ckptcore.load(directory / layout)
        assert all(np.array_equal(loaded[f"of {owner}"], ROWS + owner) for owner in range(SIZE))
    alone = Context(job=JobOptions(coordinator=KeyValueCoordinator(KeyValueCoordinator.of_job()._client, 0, 1)))
    everywhere = {"w": sharded(ROWS, NamedSharding(mesh, P()))}
    ckptcore.save(directory / f"alone {RANK}", everywhere, layout="zarr3", context=alone)
    same(ckptcore.load(directory / f"alone {RANK}", blank(everywhere), context=alone), everywhere)


def killed(directory: Path) -> None:
    """Fail the last rank during a save.

    The others get an error within the timeout, and save without it.
    """
    _die(directory, SIZE - 1)


def leader_killed(directory: Path) -> None:
    """Kill the leader, and JAX's service with it, during a save: JAX terminates the other processes."""
    _die(directory, 0)


def _die(directory: Path, rank: int) -> None:
    mesh = over_all(2, 2)
    job = KeyValueCoordinator.of_job(timeout_seconds=3)
    ckptcore.save(
        directory / "before", state(mesh, 1), layout="ocdbt", context=Context(job=JobOptions(coordinator=job))
    )
    if RANK == rank:

        class Dying(KeyValueCoordinator):
            def gather(self, key: str, payload: bytes) -> Any:
                if key.endswith("/write"):
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().gather(key, payload)

        job = Dying.of_job(timeout_seconds=3)
    started = time.monotonic()
    try:
        ckptcore.save(
            directory / "killed", state(mesh, 2), layout="ocdbt", context=Context(job=JobOptions(coordinator=job))
        )
    except CoordinationTimeoutError as error:
        assert list(error.missing) == [rank], error
    else:
        raise AssertionError("a save without one of its processes committed")
    assert time.monotonic() - started < 12
    assert not (directory / "killed").exists()
    alone = Context(job=JobOptions(coordinator=KeyValueCoordinator(job._client, 0, 1)))
    ckptcore.save(directory / "after", {"own": jnp.arange(5)}, layout="ocdbt", context=alone)
    (directory / "told").touch()
    sys.stdout.flush()
    os._exit(0)  # exit at once, because JAX would wait for the failed process


def again(directory: Path) -> None:
    """Resume in a restarted job from the last save, and repeat the failed save."""
    mesh = over_all(2, 2)
    loaded = ckptcore.load(directory / "before", blank(state(mesh, 1)))
    same(loaded, state(mesh, 1))
    ckptcore.save(directory / "killed", state(mesh, 2), layout="ocdbt")
    same(ckptcore.load(directory / "killed", blank(state(mesh, 2))), state(mesh, 2))


TASKS: Final[Mapping[str, Callable[[Path], None]]] = {
    task.__name__: task for task in (small, layouts, reshard, once, run, part, orbax, killed, leader_killed, again)
}

if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(ADDRESS, SIZE, RANK, cluster_detection_method="deactivate")
    try:
        TASKS[sys.argv[5]](Path(sys.argv[6]))
    finally:
        jax.distributed.shutdown()
