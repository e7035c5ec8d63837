"""The hooks of the JAX plugin. Imports no JAX: before a program imported it there is no value of a type of JAX's."""

from __future__ import annotations

import sys

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import Collectives, ContainerHandler, Coordinator, Executor, LeafHandler

__all__ = ["ckpt_collectives", "ckpt_container_handler", "ckpt_coordinator", "ckpt_executor", "ckpt_leaf_handler"]


@hookimpl
def ckpt_leaf_handler(leaf_type: type, example: object) -> LeafHandler | None:
    """Handles `jax.Array` and `jax.ShapeDtypeStruct`; refuses tracers and references with a reason."""
    if not _has_jax():
        return None
    from ckptcore_jax.leaves import leaf_handler

    return leaf_handler(leaf_type, example)


@hookimpl
def ckpt_container_handler(value_type: type, example: object) -> ContainerHandler | None:
    """Handles every type that is registered with `jax.tree_util` and is not one of Python's own."""
    if not _has_jax():
        return None
    from ckptcore_jax.containers import container_handler

    return container_handler(value_type, example)


@hookimpl
def ckpt_coordinator() -> Coordinator | None:
    """The coordinator of the job for which `jax.distributed.initialize` was called, if it has several processes."""
    if not _has_jax():
        return None
    from ckptcore_jax.key_value_coordinator import coordinator_of_job

    return coordinator_of_job()


@hookimpl
def ckpt_executor() -> Executor | None:
    """The workers of the Pathways backend, where JAX runs on it: this process is its only controller then."""
    if not _has_jax():
        return None
    from ckptcore_jax.pathways import executor_of_pathways

    return executor_of_pathways()


@hookimpl
def ckpt_collectives() -> Collectives | None:
    """The devices of the job for which `jax.distributed.initialize` was called, if it has several processes."""
    if not _has_jax():
        return None
    from ckptcore_jax.collectives import collectives_of_job

    return collectives_of_job()


def _has_jax() -> bool:
    # Another thread may be half-way through importing JAX; then nobody has a value of its types yet.
    jax = sys.modules.get("jax")
    return hasattr(jax, "Array") and hasattr(jax, "ShapeDtypeStruct") and hasattr(jax, "tree_util")
