"""Pathways: whether JAX runs on it, and which devices each of its hosts has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import jax

if TYPE_CHECKING:
    from ckptcore_jax.colocated import ColocatedExecutor

__all__ = ["devices_by_host", "executor_of_pathways"]

_PLATFORMS: Final = frozenset({"proxy", "pathways"})
"""What ``jax_platforms`` is on Pathways: ``proxy`` from a client, as Google's documentation of Pathways on Cloud sets it."""


def executor_of_pathways() -> ColocatedExecutor | None:
    """The hosts of Pathways as workers; None where JAX does not run on it. Starts no backend that was not asked for by name."""
    config: Any = jax.config  # its options have no types
    named = {name.strip() for name in (config.jax_platforms or "").split(",")}
    if not named & _PLATFORMS or jax.process_count() > 1:
        return None
    return _executor(tuple(jax.devices()))


@functools.lru_cache(maxsize=1)
def _executor(devices: tuple[Any, ...]) -> ColocatedExecutor:
    from ckptcore_jax.colocated import ColocatedExecutor

    return ColocatedExecutor(devices_by_host(devices))


def devices_by_host(devices: Sequence[Any]) -> Sequence[Sequence[Any]]:
    """Devices, those of one host together, in the order in which hosts come first.

    A host is a task of a slice. Pathways tells the task as ``virtual_task_index``; for its controller all devices are of
    one process. Elsewhere a host is a process.
    """
    hosts: dict[tuple[object, object], list[Any]] = {}
    for device in devices:
        task = getattr(device, "virtual_task_index", None)
        host = getattr(device, "slice_index", None), device.process_index if task is None else task
        hosts.setdefault(host, []).append(device)
    return tuple([tuple(found) for found in hosts.values()])
