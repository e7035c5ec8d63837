"""One process of a jax.distributed job. One process reads data, and sends it to the others.

``broadcast_jax_job.py ADDRESS RANK SIZE DEVICES TASK PLACE``. Raises an error on a wrong result.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[4]}"

import jax  # imported after the environment variables are set, because JAX reads them
import ml_dtypes
import numpy as np
from ckptcore_jax.collectives import collectives_of_job
from ckptcore_testing import FaultPlan, FaultyStorage
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptcore
from ckptcore import Context
from ckptcore.builtin.local import LocalStorage
from ckptcore.context import IOOptions, JobOptions, PluginOptions
from ckptcore.errors import CheckpointError
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

SPECS: Mapping[str, tuple[str | None, ...]] = {"w": ("x", "y"), "e": (None, "y"), "b": (), "i": ("x",)}


def state() -> dict[str, Any]:
    """Return arrays so large that other bytes, which a load reads between them, are negligible."""
    generator = np.random.default_rng(5)
    return {
        "w": generator.standard_normal((1024, 1024)).astype(np.float32),
        "e": generator.standard_normal((512, 2048)).astype(ml_dtypes.bfloat16),
        "b": generator.standard_normal(300_000),
        "i": np.arange(300_000) << 30,
    }


class Counting(FaultyStorage):
    """Counts the bytes of arrays that are read. Fails reads of arrays on request."""

    def __init__(self, inner: StorageBackend, fails: bool) -> None:
        super().__init__(inner, FaultPlan())
        self.lock = threading.Lock()
        self.nbytes = 0
        self.fails = fails

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if key.endswith(".safetensors"):
            if self.fails:
                raise CheckpointError(f"the disk under {key} is gone")
            with self.lock:
                self.nbytes += sum([len(buffer) for _, buffer in ranges])
        super().get_into(key, ranges)


class CountedStorage:
    """A plugin for the storage ``counted:///PATH``, which is a local directory."""

    def __init__(self) -> None:
        self.opened: list[Counting] = []
        self.fails = False

    @ckptcore.hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"counted": self.open}

    def open(self, url: str, options: StorageOptions) -> Counting:
        self.opened.append(Counting(LocalStorage(url.removeprefix("counted://"), options), self.fails))
        return self.opened[-1]


def _abstract() -> dict[str, jax.ShapeDtypeStruct]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, PartitionSpec(*SPECS[name])))
        for name, array in state().items()
    }


def _check(loaded: Mapping[str, Any]) -> None:
    expected = state()
    for name, array in loaded.items():
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), expected[name][shard.index]), name


def loads(rank: int, directory: Path) -> None:
    """Load in two ways: in every process separately, and collectively. Write the bytes read into a JSON file."""
    location = f"counted://{directory}/saved"
    read = {}
    for reads in ("all", "broadcast"):
        storage = CountedStorage()
        # Turn verification off, because it reads whole blocks.
        context = Context(
            job=JobOptions(reads=reads), plugins=PluginOptions(extra=[storage]), io=IOOptions(verify=False)
        )
        _check(ckptcore.load(location, _abstract(), context=context))
        read[reads] = sum(storage.nbytes for storage in storage.opened)
    (directory / f"{rank}.json").write_text(json.dumps(read))
    storage = CountedStorage()
    storage.fails = rank == 1
    context = Context(job=JobOptions(reads="broadcast"), plugins=PluginOptions(extra=[storage]))
    try:
        ckptcore.load(location, _abstract(), context=context)
    except CheckpointError as error:
        assert "the disk under" in str(error) and (rank == 1) != ("rank 1" in str(error)), str(error)
    else:
        raise AssertionError("a load that rank 1 could not read for did not fail")


def conformance(rank: int, directory: Path) -> None:
    """Run one test of the conformance class, which the parent process has pickled."""
    work = pickle.loads((directory / "work").read_bytes())
    collectives = collectives_of_job()
    assert collectives is not None
    (directory / f"{rank}.result").write_bytes(pickle.dumps(work(collectives)))


if __name__ == "__main__":
    address, rank, size, _, task, place = sys.argv[1:]
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=int(size), process_id=int(rank))
    (loads if task == "loads" else conformance)(int(rank), Path(place))
    jax.distributed.shutdown()
