"""A process of a JAX job that ends. A second job begins with one process of the first job and a new one.

``rejoined_jax_job.py WHO DIRECTORY PORT PORT``: ``stays`` is process 0 of both jobs, ``leaves`` is process 1 of the
first job, and ``comes`` is process 1 of the second job.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax  # imported after the environment variables are set, because JAX reads them
import jax.extend.backend
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions

_LIVES: Final = {"stays": (0, 1), "leaves": (0,), "comes": (1,)}
_ROWS: Final = np.arange(8, dtype=np.float32).reshape(4, 2)


def _save_and_load(place: Path, life: int) -> None:
    """Overwrite the checkpoint twice, and load it collectively.

    If the processes counted exchanges differently, they would wait for each other until the timeout.
    """
    spec: Any = PartitionSpec  # untyped in JAX
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), spec("x"))
    rows = _ROWS + life
    array = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
    for step in range(2):
        ckptcore.save(place, {"rows": array, "life": life, "step": step}, overwrite=True, layout="zarr3")
    loaded = ckptcore.load(place, context=Context(job=JobOptions(reads="broadcast")))
    assert np.array_equal(loaded["rows"], rows) and loaded["step"] == 1


def main(who: str, directory: Path, ports: list[str]) -> None:
    for life in _LIVES[who]:
        rank = 0 if who == "stays" else 1
        jax.distributed.initialize(f"127.0.0.1:{ports[life]}", 2, rank, cluster_detection_method="deactivate")
        _save_and_load(directory / "run", life)
        jax.distributed.shutdown()
        jax.extend.backend.clear_backends()  # JAX refuses to initialize again without this


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
