"""Hooks of the JAX plugin. They do not import JAX: JAX values exist only after the program has imported it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from ckptcore.hookspecs import hookimpl
from ckptcore.model import ArrayRecord
from ckptcore.protocols import AbstractLeaves, Collectives, ContainerHandler, Coordinator, Executor, LeafHandler


@hookimpl
def ckpt_leaf_handler(leaf_type: type, example: object) -> LeafHandler | None:
    """Return the handler of `jax.Array` and `jax.ShapeDtypeStruct`.

    Tracers and references get a handler that refuses them.
    """
    if not _has_jax():
        return None
    from ckptcore_jax.leaves import leaf_handler

    return leaf_handler(leaf_type, example)


@hookimpl
def ckpt_container_handler(value_type: type, example: object) -> ContainerHandler | None:
    """Return the handler of types registered with `jax.tree_util`, except Python's built-in containers."""
    if not _has_jax():
        return None
    from ckptcore_jax.containers import container_handler

    return container_handler(value_type, example)


@hookimpl
def ckpt_frameworks() -> Mapping[str, AbstractLeaves]:
    """Return JAX, which is imported when it is used."""
    return {"jax": _abstract_leaves}


def _abstract_leaves(stored: Sequence[ArrayRecord]) -> Sequence[object]:
    from ckptcore_jax.abstracts import abstract_leaves

    return abstract_leaves(stored)


@hookimpl
def ckpt_coordinator() -> Coordinator | None:
    """Return the coordinator of the initialized JAX job, if it has several processes."""
    if not _has_jax():
        return None
    from ckptcore_jax.key_value_coordinator import coordinator_of_job

    return coordinator_of_job()


@hookimpl
def ckpt_executor() -> Executor | None:
    """Return the executor of Pathways, if JAX uses Pathways. This process is then the only controller."""
    if not _has_jax():
        return None
    from ckptcore_jax.pathways import executor_of_pathways

    return executor_of_pathways()


@hookimpl
def ckpt_collectives() -> Collectives | None:
    """Return the collectives of the initialized JAX job, if it has several processes."""
    if not _has_jax():
        return None
    from ckptcore_jax.collectives import collectives_of_job

    return collectives_of_job()


@hookimpl
def ckpt_thread_settings() -> AbstractContextManager[None] | None:
    """Return the JAX settings of this thread, to apply them in the thread of a load."""
    if not _has_jax():
        return None
    from ckptcore_jax.thread_settings import thread_settings

    return thread_settings()


def _has_jax() -> bool:
    # Check the names too: while another thread imports JAX, the module is incomplete and has no
    # values.
    jax = sys.modules.get("jax")
    return hasattr(jax, "Array") and hasattr(jax, "ShapeDtypeStruct") and hasattr(jax, "tree_util")
