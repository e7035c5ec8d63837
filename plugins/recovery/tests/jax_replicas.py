"""Programs of jax.distributed in which processes lose their state, and get it from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from ckptcore_recovery.replicas import RecoveryReport, recover
from jax.sharding import NamedSharding, PartitionSpec

from tests.jobs.jax_program import over_all, parts_of, sharded
from tests.jobs.jax_program import run as run_jax
from tests.jobs.processes import Place

run: Final = run_jax
_LOST: Final = (0, 3)
_WHOLE: Final = np.random.default_rng(0).random((800, 600), np.float32)


def _state(place: Place, *, is_lost: bool) -> dict[str, Any]:
    """Return arrays that all processes hold, and arrays whose shards two processes hold."""
    mesh = over_all(2, place.size * place.devices // 2)  # each shard along y is on two processes
    whole = np.zeros_like(_WHOLE) if is_lost else _WHOLE
    spec: Any = PartitionSpec
    return {
        "params": {
            "replicated": sharded(whole, NamedSharding(mesh, spec())),
            "sharded": sharded(whole, NamedSharding(mesh, spec("y"))),
            "half": sharded(whole.astype(jnp.bfloat16), NamedSharding(mesh, spec(None, "y"))),
        },
        "local": jnp.asarray(whole[:3]),
        "key": jax.random.key(0 if is_lost else 42),
        "step": 0 if is_lost else 7,
    }


def _data_parallel(place: Place) -> Any:
    lost, report = place.rank in _LOST, RecoveryReport()
    given = _state(place, is_lost=lost)
    state = recover(given, lost=lost, report=report)
    assert state is given
    expected = _state(place, is_lost=False)
    assert state["step"] == 7
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(expected["key"])).all()
    np.testing.assert_array_equal(state["local"], expected["local"])
    for name, array in expected["params"].items():
        loaded = state["params"][name]
        assert loaded.sharding == array.sharding
        whole = _WHOLE.astype(array.dtype)
        for shard, part in zip(loaded.addressable_shards, parts_of(whole, array.sharding), strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(part))
    return {"needed": report.bytes_needed, "moved": report.bytes_moved, "received": sorted(report.received)}


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {"data parallel": _data_parallel}
