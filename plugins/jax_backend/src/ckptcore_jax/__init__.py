"""JAX in ckptcore: `jax.Array`, random keys, abstract arrays, and every container registered with `jax.tree_util`.

Nothing here has to be imported to save and load: ckptcore finds `ckptcore_jax.plugin` by its entry point. Importing
this package does not import JAX; asking it for one of these names does:

    JaxLeafHandler       the leaf handler; ``JaxLeafHandler(copy=True)`` for arrays that alias memory you change
    RegisteredContainer  the handler of registered containers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptcore_jax.containers import RegisteredContainer
    from ckptcore_jax.leaves import JaxLeafHandler

__all__ = ["JaxLeafHandler", "RegisteredContainer"]


def __getattr__(name: str) -> object:
    if name == "JaxLeafHandler":
        from ckptcore_jax.leaves import JaxLeafHandler

        return JaxLeafHandler
    if name == "RegisteredContainer":
        from ckptcore_jax.containers import RegisteredContainer

        return RegisteredContainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
