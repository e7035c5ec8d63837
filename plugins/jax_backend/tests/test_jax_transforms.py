"""Results of transforms load as sharded JAX arrays, and each input is read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ckptcore_testing import assert_same_tree
from ckptcore_transforms import Cast, Fuse, Stack, Transform, Transpose, inverse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptcore
from ckptcore.results import LoadReport

CHAIN: list[Transform] = [
    Transpose("layers.*.weight"),
    Fuse(["layers.{i}.{name}.gate", "layers.{i}.{name}.up"], "layers.{i}.{name}.gate_up", axis=-1),
    Stack("layers.{i}.{name...}", "layers/{name}"),
]


def _state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    state = {}
    for layer in range(4):
        state[f"layers.{layer}.q.weight"] = rng.normal(size=(256, 512)).astype(np.float32)
        for part in ("gate", "up"):
            state[f"layers.{layer}.mlp.{part}"] = rng.normal(size=(64, 512)).astype(np.float32)
    return state


def test_scanned_tree_loads_onto_a_mesh_and_converts_back(tmp_path: Path) -> None:
    state = _state()
    ckptcore.save(tmp_path / "c", state, context=ckptcore.Context(io=ckptcore.context.IOOptions(checksums=False)))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("layers", "model"))

    def abstract(shape: tuple[int, ...], spec: PartitionSpec, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    wanted = {
        "layers": {
            "q.weight": abstract((4, 512, 256), PartitionSpec("layers", "model")),
            "mlp.gate_up": abstract((4, 64, 1024), PartitionSpec(None, None, ("layers", "model")), jnp.bfloat16),
        }
    }
    report = LoadReport()
    loaded = ckptcore.load(
        tmp_path / "c", wanted, transforms=[*CHAIN, Cast("layers/mlp.gate_up", "bfloat16")], report=report
    )
    assert report.bytes_read <= 1.1 * sum(array.nbytes for array in state.values())
    weights, fused = loaded["layers"]["q.weight"], loaded["layers"]["mlp.gate_up"]
    assert weights.sharding == wanted["layers"]["q.weight"].sharding
    assert np.array_equal(weights, np.stack([state[f"layers.{layer}.q.weight"].T for layer in range(4)]))
    pairs = [[state[f"layers.{layer}.mlp.{part}"] for part in ("gate", "up")] for layer in range(4)]
    assert np.array_equal(fused, np.stack([np.concatenate(pair, 1) for pair in pairs]).astype(jnp.bfloat16))

    wanted["layers"]["mlp.gate_up"] = abstract((4, 64, 1024), PartitionSpec("layers"))
    ckptcore.save(tmp_path / "trained", ckptcore.load(tmp_path / "c", wanted, transforms=CHAIN))
    back = ckptcore.load(tmp_path / "trained", transforms=inverse(CHAIN))
    assert_same_tree({name: back[name] for name in state}, state)
