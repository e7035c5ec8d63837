"""A process in a job of JAX that saves and loads with the replacement for Orbax v1.

``orbax_v1_job.py TASK DIRECTORY PORT SIZE RANK``. Each process writes ``DIRECTORY/TASK.RANK`` at the end.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ckptcore_integrations import orbax_v1 as ours
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kills import kill_at
from orbax.checkpoint import v1 as original


def state_of(value: int) -> dict[str, Any]:
    """Return sharded and replicated arrays, and a number."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    whole = np.arange(64, dtype=np.float32).reshape(16, 4) + value

    def array(dtype: Any, *spec: str | None) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index].astype(dtype))

    return {
        "rows": array(jnp.bfloat16, "x"),
        "columns": array(np.float32, None, "x"),
        "all": array(np.int32),
        "n": value,
    }


def expect(loaded: Any, value: int, name: str) -> None:
    """Compare the shards of this process, and the number."""
    for key, expected in state_of(value).items():
        if key == "n":
            assert loaded[key] == expected, name
            continue
        assert loaded[key].sharding.is_equivalent_to(expected.sharding, 2), name
        for left, other in zip(loaded[key].addressable_shards, expected.addressable_shards, strict=True):
            assert left.index == other.index and (np.asarray(left.data) == np.asarray(other.data)).all(), (name, key)


def both_ways(directory: Path) -> None:
    """Load each library's checkpoint with both libraries."""
    state = state_of(3)
    ours.save(directory / "ours", state)
    ours.save_async(directory / "async", state).result()
    original.save(directory / "theirs", state)
    abstract = jax.tree.map(original.arrays.to_shape_dtype_struct, state)
    for name in ("ours", "async", "theirs"):
        for library in (ours, original):
            expect(library.load(directory / name, abstract), 3, f"{name} by {library.__name__}")


def training(directory: Path) -> None:
    """Continue each library's run with the other library."""
    for step, library in enumerate((ours, original, ours)):
        with library.training.Checkpointer(directory / "run") as checkpointer:
            if step:
                abstract = jax.tree.map(original.arrays.to_shape_dtype_struct, state_of(0))
                expect(checkpointer.load(checkpointer.latest, abstract), step - 1, f"step {step - 1}")
            checkpointer.save(step, state_of(step))
    with original.training.Checkpointer(directory / "run") as checkpointer:
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [0, 1, 2]


def killed(directory: Path, victim: str, event: str) -> None:
    """Overwrite a checkpoint. One process is killed at its n-th change of the file system."""
    ours.save(directory / "saved", state_of(1))
    multihost_utils.sync_global_devices("saved")
    if jax.process_index() == int(victim):
        kill_at(int(event), directory)
    ours.save(directory / "saved", state_of(2), overwrite=True)


def main() -> None:
    """Run a task."""
    warnings.simplefilter("ignore")
    task, directory, port, size, rank, *arguments = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(size), int(rank), cluster_detection_method="deactivate")
    globals()[task](Path(directory), *arguments)
    (Path(directory) / f"{task}.{rank}").touch()
    multihost_utils.sync_global_devices("end")
    os._exit(0)


if __name__ == "__main__":
    main()
