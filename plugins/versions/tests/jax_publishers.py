"""Trainers in a job of jax.distributed, which publish sharded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plugins.versions.tests.published import matrix, publisher
from tests.jobs.jax_program import run
from tests.jobs.processes import Place

__all__ = ["TASKS", "run"]

_P: Final[Any] = PartitionSpec
_SPECS: Final = [_P("x"), _P(None, "x")]


def _weights(number: int, axis: int) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    whole = matrix(number)

    def placed(array: Any, spec: Any) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    return {
        "sharded": placed(whole, _SPECS[axis]),
        "half": placed(np.asarray(jnp.asarray(whole, jnp.bfloat16)), _SPECS[axis]),
        "replicated": placed(whole[:3], _P()),
        "plain": whole[:5].copy(),
    }


def publish(place: Place) -> int | None:
    """Publish the versions 1 and 2, with the rows divided between the devices."""
    with publisher(str(place.directory)) as versions:
        versions.publish(1, _weights(1, 0))
        versions.publish(2, _weights(2, 0), background=True)
        versions.wait()
        return versions.latest


def proceed(place: Place) -> int | None:
    """Publish the versions 3 and 4, with the columns and then the rows divided between the devices."""
    with publisher(str(place.directory)) as versions:
        versions.publish(3, _weights(3, 1))
        versions.publish(4, _weights(4, 0))
        return versions.latest


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {"publish": publish, "proceed": proceed}
