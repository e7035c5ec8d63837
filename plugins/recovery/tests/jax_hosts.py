"""Processes of jax.distributed with steps in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptcore import Checkpointer
from plugins.recovery.tests.framework_jobs import Framework, whole_array
from tests.jobs.jax_program import run as run_jax
from tests.jobs.processes import Place

run: Final = run_jax
_SPEC: Final[Any] = PartitionSpec  # untyped in JAX


def _state(step: int) -> dict[str, Any]:
    """Return sharded and replicated arrays."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    whole = whole_array(step)

    def array(elements: Any, spec: Any) -> jax.Array:
        return jax.make_array_from_callback(elements.shape, NamedSharding(mesh, spec), lambda index: elements[index])

    return {"sharded": array(whole, _SPEC("x")), "replicated": array(whole[:100], _SPEC()), "step": step}


def _load(run: Checkpointer) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = run.load(abstract=_state(0))
    return loaded


def _expect(loaded: Mapping[str, Any], step: int) -> None:
    expected = _state(step)
    assert loaded["step"] == step
    for name in ("sharded", "replicated"):
        assert loaded[name].sharding == expected[name].sharding
        for shard, other in zip(loaded[name].addressable_shards, expected[name].addressable_shards, strict=True):
            np.testing.assert_array_equal(shard.data, other.data)


def _wait() -> None:
    synchronize: Any = multihost_utils.sync_global_devices  # untyped
    synchronize("wait")


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = Framework(_state, _load, _expect, _wait).tasks
