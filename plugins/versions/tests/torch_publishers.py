"""Trainers in a job of torch.distributed, which publish sharded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from plugins.versions.tests.published import matrix, publisher
from tests.jobs.processes import Place
from tests.jobs.torch_program import run

__all__ = ["TASKS", "run"]


def _weights(place: Place, number: int, axis: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (place.size,))
    whole = torch.from_numpy(matrix(number))
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(axis)]),
        "half": distribute_tensor(whole.to(torch.bfloat16), mesh, [Shard(axis)]),
        "replicated": distribute_tensor(whole[:3], mesh, [Replicate()]),
        "plain": whole[:5].clone(),
    }


def publish(place: Place) -> int | None:
    """Publish the versions 1 and 2, with the rows divided between the processes."""
    with publisher(str(place.directory)) as versions:
        versions.publish(1, _weights(place, 1, 0))
        versions.publish(2, _weights(place, 2, 0), background=True)
        versions.wait()
        return versions.latest


def proceed(place: Place) -> int | None:
    """Publish the versions 3 and 4, with the columns and then the rows divided between the processes."""
    with publisher(str(place.directory)) as versions:
        versions.publish(3, _weights(place, 3, 1))
        versions.publish(4, _weights(place, 4, 0))
        return versions.latest


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {"publish": publish, "proceed": proceed}
