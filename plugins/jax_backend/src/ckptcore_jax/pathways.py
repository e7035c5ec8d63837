"""The executor of Pathways."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import jax

if TYPE_CHECKING:
    from ckptcore_jax.colocated import ColocatedExecutor

_PLATFORMS: Final = frozenset({"proxy", "pathways"})
"""Values of ``jax_platforms`` with Pathways. ``proxy`` is the documented value for Pathways on Cloud."""


def executor_of_pathways() -> ColocatedExecutor | None:
    """Return an executor whose workers are the hosts of Pathways, or None on other platforms.

    Return None also for a job of several processes, because it has no single controller. On other
    platforms, this function does not start a JAX backend.
    """
    config: Any = jax.config  # its options are untyped
    named = {name.strip() for name in (config.jax_platforms or "").split(",")}
    if not named & _PLATFORMS or jax.process_count() > 1:
        return None
    return _executor(tuple(jax.devices()))


@functools.lru_cache(maxsize=1)
def _executor(devices: tuple[Any, ...]) -> ColocatedExecutor:
    from ckptcore_jax.colocated import ColocatedExecutor, devices_by_host  # slow to import, and only needed here

    return ColocatedExecutor(devices_by_host(devices))
