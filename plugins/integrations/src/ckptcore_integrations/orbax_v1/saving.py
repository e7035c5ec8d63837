"""Saves, and their `AsyncResponse`. One commit of ckptcore contains the trees and the files of Orbax's handlers."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from typing_extensions import deprecated

import ckptcore
from ckptcore.redaction import redacted_location
from ckptcore.results import SaveHandle
from ckptcore.training import expanded_location
from ckptcore_integrations.orbax_v1.library import (
    STATE_CHECKPOINTABLE_KEY,
    ensure_available,
    get_context,
    resolve_handler_for_save,
    run_sync,
    typestr,
    v1,
    validate_save_checkpointables,
    validate_state,
)
from ckptcore_integrations.orbax_v1.settings import array_rules, context_of, layout_of, storage_options
from ckptcore_integrations.orbax_v1.trees import TREE_HANDLER, TreeHandler, remedy_of_equinox, with_tree_handler
from ckptcore_integrations.own_options import own_options
from ckptcore_integrations.saving_threads import start

T = TypeVar("T")


class Response(Generic[T]):
    """An `AsyncResponse` of work in a separate thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Start the work."""
        self._future = start(work, "ckptcore-response")

    def result(self, timeout: float | None = None) -> T:
        """Wait for the work, at most `timeout` seconds. Return its result, or raise its error."""
        return self._future.result(timeout)

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Call a function with the result once the work is done. Not called if the work fails."""
        self._future.add_done_callback(lambda done: None if done.exception() else callback(done.result()))


class SaveResponse:
    """The `AsyncResponse` of a save.

    If the error of a save is not retrieved by `result`, the next save raises it.
    """

    def __init__(self, handle: SaveHandle, timeout_seconds: float) -> None:
        """Start the timeout of the Context."""
        self._handle = handle
        self._deadline = time.monotonic() + timeout_seconds

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed.

        Raises:
            TimeoutError: it is not committed after `timeout` seconds, or after the timeout of the Context.
            CheckpointError: the save failed.
        """
        remaining = max(0.0, self._deadline - time.monotonic())
        self._handle.result(remaining if timeout is None else min(timeout, remaining))

    def on_complete(self, callback: Callable[[None], None]) -> None:
        """Call a function once the checkpoint is committed. Not called if the save fails."""

        def wait() -> None:
            if self._handle.exception() is None:
                callback(None)

        threading.Thread(target=wait, name="ckptcore-on-complete", daemon=False).start()


class Item:
    """A checkpointable with its handler. Saves itself into a directory."""

    def __init__(self, handler: Any, value: Any) -> None:
        self._handler = handler
        self._value = value

    async def save(self, directory: Any) -> Awaitable[None]:
        """Begin to save. The result writes the files when it is awaited."""
        rest: Awaitable[None] = await self._handler.save(directory, self._value)
        return rest

    async def load(self, directory: Any) -> Awaitable[None]:
        """Raise an error, because Orbax's handler loads the files."""
        raise NotImplementedError("load items with ckptcore_integrations.orbax_v1.load_checkpointables")


def save(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = STATE_CHECKPOINTABLE_KEY,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Save a tree, and return once it is committed. See `orbax.checkpoint.v1.save`."""
    with remedy_of_equinox(state):
        validate_state(state)
    save_checkpointables(path, {checkpointable_name: state}, overwrite=overwrite, custom_metadata=custom_metadata)


def save_async(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = STATE_CHECKPOINTABLE_KEY,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> v1.AsyncResponse[None]:
    """Begin to save a tree. Return once the caller may change the tree. See `orbax.checkpoint.v1.save_async`."""
    with remedy_of_equinox(state):
        validate_state(state)
    return save_checkpointables_async(
        path, {checkpointable_name: state}, overwrite=overwrite, custom_metadata=custom_metadata
    )


@own_options("overwrite")
def save_checkpointables(
    path: Any, checkpointables: dict[str, Any], *, overwrite: bool = False, custom_metadata: Any = None
) -> None:
    """Save several objects in one checkpoint. See `orbax.checkpoint.v1.save_checkpointables`."""
    validate_save_checkpointables(checkpointables)
    arguments = prepare(path, checkpointables, overwrite, custom_metadata)
    ckptcore.save_checkpointables(**arguments)


@own_options("overwrite")
def save_checkpointables_async(
    path: Any, checkpointables: dict[str, Any], *, overwrite: bool = False, custom_metadata: Any = None
) -> v1.AsyncResponse[None]:
    """Begin to save several objects. See `orbax.checkpoint.v1.save_checkpointables_async`."""
    validate_save_checkpointables(checkpointables)
    arguments = prepare(path, checkpointables, overwrite, custom_metadata)
    handle = ckptcore.save_checkpointables_async(**arguments)
    options = get_context().asynchronous
    if not options.create_directories_asynchronously:
        handle.wait_for_claim()
    return SaveResponse(handle, options.timeout_secs)


@deprecated("Use `save` instead.")
def save_pytree(*args: Any, **kwargs: Any) -> None:
    """Call `save`, the present name of this function."""
    return save(*args, **kwargs)


@deprecated("Use `save_async` instead.")
def save_pytree_async(*args: Any, **kwargs: Any) -> v1.AsyncResponse[None]:
    """Call `save_async`, the present name of this function."""
    return save_async(*args, **kwargs)


def prepare(path: Any, checkpointables: dict[str, Any], overwrite: bool, custom_metadata: Any) -> dict[str, Any]:
    """Return the arguments of `ckptcore.save_checkpointables` for a save of Orbax.

    Raises:
        ValueError: the destination exists, or a tree is empty or has an empty array.
        NotImplementedError: an option of the Context cannot be honoured, or a handler of Orbax would write files in a
            job of several processes.
        The errors of Orbax for checkpointables without a handler.
    """
    context = get_context()
    path = context.file.path_class(expanded_location(path))
    run_sync(ensure_available(path))
    if not overwrite and not context.file.skip_sync_file_validations and path.exists():
        raise ValueError(f"Destination {redacted_location(str(path))} already exists.")
    values: dict[str, Any] = {}
    handlers: dict[str, str] = {}
    rules: dict[str, Any] = {}
    child = with_tree_handler(context)
    with remedy_of_equinox(checkpointables), child:
        for name, value in checkpointables.items():
            handler = resolve_handler_for_save(child.checkpointables.registry, value, name=name)
            if isinstance(handler, TreeHandler):
                handler.validate_leaves_handleable(value)
                _validate(value)
                options = storage_options(context, value)
                values[name] = _stored(value, options)
                handlers[name] = TREE_HANDLER
                rules.update(array_rules(context, options))
            else:
                if jax.process_count() > 1:
                    raise NotImplementedError(
                        f"{name}: {type(handler).__name__} writes files of all processes into one directory, and "
                        "ckptcore has a directory for each process. Save it from one process, in its own checkpoint"
                    )
                values[name] = Item(handler, value)
                handlers[name] = typestr(type(handler))
    return {
        "location": str(path),
        "checkpointables": values,
        "layout": layout_of(context, rules, handlers),
        "overwrite": "with-other-files" if overwrite else False,  # as Orbax does
        "metadata": custom_metadata,
        "context": context_of(context),
    }


def _validate(tree: Any) -> None:
    """Refuse trees that Orbax refuses.

    Raises:
        ValueError: the tree is empty, or has an empty array.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves and not tree:
        raise ValueError("Found empty item.")
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.size == 0:
            raise ValueError(f"Cannot save arrays with zero size: {jax.tree_util.keystr(path)}")


def _stored(tree: Any, options: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return a tree with its leaves cast to the dtypes of their storage options."""
    if all(chosen.dtype is None for chosen in options.values()):
        return tree

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        dtype = options[path].dtype
        if dtype is None or isinstance(leaf, str):
            return leaf
        if isinstance(leaf, jax.Array | np.ndarray):
            return leaf.astype(dtype)
        return np.asarray(leaf).astype(dtype).item()

    return jax.tree_util.tree_map_with_path(cast, tree)
