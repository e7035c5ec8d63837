"""Save JAX arrays that are sharded over several devices, and load them with another sharding."""

# mypy: allow-untyped-calls

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # before JAX is imported: 4 CPU devices

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckptcore


def main(directory: Path) -> None:
    location = directory / "jax"
    devices = np.array(jax.devices())
    over_rows = NamedSharding(Mesh(devices, ("data",)), P("data"))
    weights = jax.device_put(jnp.arange(64.0).reshape(8, 8), over_rows)
    key = jax.random.key(0)
    ckptcore.save(location, {"params": {"w": weights}, "key": key, "step": 100})

    # The abstract tree sets the sharding of the loaded array: here its columns over a mesh of half of the devices.
    half = Mesh(devices[: max(1, len(devices) // 2)], ("model",))
    over_columns = NamedSharding(half, P(None, "model"))
    abstract = {
        "params": {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=over_columns)},
        "key": jax.random.key(1),
        "step": 0,
    }
    loaded = ckptcore.load(location, abstract)

    assert loaded["params"]["w"].sharding == over_columns
    assert np.array_equal(loaded["params"]["w"], weights)
    assert np.array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(key))
    print(f"{location}: saved over {over_rows.spec}, loaded over {loaded['params']['w'].sharding.spec}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
