"""Settings of JAX for the thread of a load: the settings of its caller, without checks that would refuse the load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.experimental


def thread_settings() -> AbstractContextManager[None]:
    """Return a context manager that applies the settings of this thread to the thread that enters it.

    The settings for the default device, 64-bit numbers and the mesh are copied, because they
    determine the loaded arrays. Checks for NaN, infinities, transfers, ranks and dtypes are off,
    because a load must return the stored elements, and because the caller requested its transfers.
    """
    options: Any = jax.config  # its attributes are defined at run time
    return _applied(options.jax_default_device, bool(options.jax_enable_x64), _mesh())


@contextmanager
def _applied(device: Any, has_64_bits: bool, mesh: Any) -> Iterator[None]:
    # Versions before 0.8 have `enable_x64` only in `jax.experimental`.
    enable_x64: Any = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with (
        jax.default_device(device),
        enable_x64(has_64_bits),
        nullcontext() if mesh is None else jax.set_mesh(mesh),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


def _mesh() -> Any:
    """Return the mesh of this thread, or None if no mesh is set."""
    get_mesh: Any = getattr(jax.sharding, "get_mesh", None)  # versions before 0.8.1 lack it
    try:
        mesh = None if get_mesh is None else get_mesh()
    except ValueError:  # inside a traced function, a mesh cannot be read or set
        return None
    return None if mesh is None or mesh.empty else mesh
