"""Two processes of jax.distributed with two devices each: arrays over a mesh of 2 x 2."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # JAX reads the flags above
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptcore

# This file runs as a program, so the root of the repository is not in the path.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.launchers.states import ARRAYS, STEP, assert_box, run_job

SPECS: dict[str, tuple[str | None, ...]] = {"w": ("x", "y"), "e": (None, "y"), "b": (), "i": ("x",)}


def _shardings() -> dict[str, NamedSharding]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    return {
        name: NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]  # JAX says no types here
        for name, spec in SPECS.items()
    }


def _state(leaf: Any) -> dict[str, Any]:
    made = {name: leaf(name, sharding) for name, sharding in _shardings().items()}
    return {"params": {name: made[name] for name in "web"}, "i": made["i"], "step": STEP}


def save(location: Path, layout: str) -> None:
    """Save arrays of every sharding."""
    state = _state(
        lambda name, sharding: jax.make_array_from_callback(
            ARRAYS[name].shape, sharding, lambda index: ARRAYS[name][index]
        )
    )
    ckptcore.save(location, state, layout=layout)


def load(location: Path) -> None:
    """Load arrays with the same shardings."""
    wanted = _state(
        lambda name, sharding: jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]  # JAX says no types here
            ARRAYS[name].shape, ARRAYS[name].dtype, sharding=sharding
        )
    )
    for _ in range(2):
        loaded = ckptcore.load(location, wanted)
        assert loaded["step"] == STEP
        arrays = {**loaded["params"], "i": loaded["i"]}
        for name, array in arrays.items():
            assert array.sharding == _shardings()[name]
            for shard in array.addressable_shards:
                assert_box(name, shard.data, shard.index)
        for array in arrays.values():
            array.delete()
        wanted = ckptcore.abstract(loaded)  # works for deleted arrays, which have shards on the other process


if __name__ == "__main__":
    rank, port = int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]  # JAX says no types here
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]  # JAX says no types here
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    run_job("jax_mesh", rank == 0, save, load, jax.distributed.shutdown)
