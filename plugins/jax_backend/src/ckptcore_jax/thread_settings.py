"""Settings of JAX for the thread of a load: those of its caller, without checks that would refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import jax.experimental

__all__ = ["thread_settings"]


def thread_settings() -> AbstractContextManager[None]:
    """Return a context manager that applies the settings of this thread to the thread that enters it.

    The default device, 64-bit numbers and the mesh are copied: they decide about loaded arrays. Checks
    for NaN, infinities, transfers, ranks and dtypes are off: loaded arrays have the elements that are
    stored, and a load is a transfer that the caller asked for.
    """
    return _entering([*_copied(), *_without_checks()])


@contextmanager
def _entering(settings: list[Callable[[], Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting())
        yield


def _copied() -> list[Callable[[], Any]]:
    options: Any = jax.config  # its attributes are defined at run time
    device, wide = options.jax_default_device, bool(options.jax_enable_x64)
    # Versions before 0.8 have it only in `jax.experimental`.
    enable_x64: Any = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    found: list[Callable[[], Any]] = [lambda: jax.default_device(device), lambda: enable_x64(wide)]
    get_mesh: Any = getattr(jax.sharding, "get_mesh", None)  # versions before 0.8.1 lack it
    try:
        mesh = None if get_mesh is None else get_mesh()
    except ValueError:  # JAX traces a function: its mesh can neither be found nor set
        mesh = None
    if mesh is not None and not mesh.empty:
        found.append(lambda: jax.set_mesh(mesh))
    return found


def _without_checks() -> list[Callable[[], Any]]:
    return [
        lambda: jax.debug_nans(False),
        lambda: jax.debug_infs(False),
        lambda: jax.transfer_guard("allow"),
        lambda: jax.numpy_rank_promotion("allow"),
        lambda: jax.numpy_dtype_promotion("standard"),
    ]
