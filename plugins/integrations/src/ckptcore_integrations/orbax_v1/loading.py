"""Loads: Orbax finds the checkpoint, its layout and the handlers, and ckptcore loads the trees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import deprecated

from ckptcore.training import expanded_location
from ckptcore_integrations.orbax_v1.library import get_context, v1
from ckptcore_integrations.orbax_v1.trees import remedy_of_equinox, with_tree_handler

PLACEHOLDER = v1.PLACEHOLDER

T = TypeVar("T")


def _with_ckptcore(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function of Orbax that loads trees with ckptcore, and knows the home directory."""

    @functools.wraps(function)
    def call(path: Any, *args: Any, **kwargs: Any) -> T:
        with remedy_of_equinox(args, kwargs), with_tree_handler(get_context()):
            return function(expanded_location(path), *args, **kwargs)

    return call


load = _with_ckptcore(v1.load)
load_async = _with_ckptcore(v1.load_async)
load_checkpointables = _with_ckptcore(v1.load_checkpointables)
load_checkpointables_async = _with_ckptcore(v1.load_checkpointables_async)
metadata = _with_ckptcore(v1.metadata)
checkpointables_metadata = _with_ckptcore(v1.checkpointables_metadata)
is_orbax_checkpoint = _with_ckptcore(v1.is_orbax_checkpoint)


@deprecated("Use `load` instead.")
def load_pytree(*args: Any, **kwargs: Any) -> Any:
    """Call `load`, its present name."""
    return load(*args, **kwargs)


@deprecated("Use `load_async` instead.")
def load_pytree_async(*args: Any, **kwargs: Any) -> v1.AsyncResponse[Any]:
    """Call `load_async`, its present name."""
    return load_async(*args, **kwargs)


@deprecated("Use `metadata` instead.")
def pytree_metadata(*args: Any, **kwargs: Any) -> v1.CheckpointMetadata[Any]:
    """Call `metadata`, its present name."""
    return metadata(*args, **kwargs)
