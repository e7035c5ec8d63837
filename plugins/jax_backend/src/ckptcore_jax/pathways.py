"""The executor of Pathways, if JAX runs on it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import jax

if TYPE_CHECKING:
    from ckptcore_jax.colocated import ColocatedExecutor

__all__ = ["executor_of_pathways"]

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
    from ckptcore_jax.colocated import ColocatedExecutor, devices_by_host  # on other platforms nobody needs it

    return ColocatedExecutor(devices_by_host(devices))
