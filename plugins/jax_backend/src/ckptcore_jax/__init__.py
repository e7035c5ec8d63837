"""The JAX plugin: `jax.Array`, random keys, abstract arrays, and containers registered with `jax.tree_util`.

Programs need not import this package: ckptcore finds `ckptcore_jax.plugin` by its entry point.
Importing the package does not import JAX. Accessing one of the following names does::

    ColocatedExecutor      executor of a single controller, whose workers run JAX's colocated Python
    JaxLeafHandler         leaf handler; use ``JaxLeafHandler(copy=False)`` if no array aliases
                           memory that changes
    RegisteredContainer    handler of registered containers
    KeyValueCoordinator    coordinator of a jax.distributed job;
                           ``KeyValueCoordinator.of_job(timeout_seconds=...)``
    abstract_arrays        abstract tree of a checkpoint with its stored shardings
    sharding_from_notes    stored sharding of an array, on the available devices
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptcore_jax.abstracts import abstract_arrays
    from ckptcore_jax.colocated import ColocatedExecutor
    from ckptcore_jax.containers import RegisteredContainer
    from ckptcore_jax.key_value_coordinator import KeyValueCoordinator
    from ckptcore_jax.leaves import JaxLeafHandler
    from ckptcore_jax.shardings import sharding_from_notes

__all__ = [
    "ColocatedExecutor",
    "JaxLeafHandler",
    "KeyValueCoordinator",
    "RegisteredContainer",
    "abstract_arrays",
    "sharding_from_notes",
]


def __getattr__(name: str) -> object:
    if name == "ColocatedExecutor":
        from ckptcore_jax.colocated import ColocatedExecutor

        return ColocatedExecutor
    if name == "JaxLeafHandler":
        from ckptcore_jax.leaves import JaxLeafHandler

        return JaxLeafHandler
    if name == "KeyValueCoordinator":
        from ckptcore_jax.key_value_coordinator import KeyValueCoordinator

        return KeyValueCoordinator
    if name == "RegisteredContainer":
        from ckptcore_jax.containers import RegisteredContainer

        return RegisteredContainer
    if name == "abstract_arrays":
        from ckptcore_jax.abstracts import abstract_arrays

        return abstract_arrays
    if name == "sharding_from_notes":
        from ckptcore_jax.shardings import sharding_from_notes

        return sharding_from_notes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
