"""Loads and metadata. Orbax finds the checkpoint and its layout; `TreeHandler` replaces Orbax's `PyTreeHandler`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from ckptcore_jax import abstract_arrays
from typing_extensions import deprecated

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    TreeMismatchError,
    UncommittedCheckpointError,
    converts_errors,
)
from ckptcore.model import Node, Skeleton, are_indices
from ckptcore.redaction import redacted_location
from ckptcore.training import expanded_location
from ckptcore_integrations.orbax_v1.library import PYTREE_METADATA_FILE, get_context, typestr, v1
from ckptcore_integrations.orbax_v1.settings import context_of, matching_of, text_of

TREE_HANDLER = typestr(v1.handlers.PyTreeHandler)
"""The class name of Orbax's handler of trees, as checkpoints store it."""

_MISMATCH: Final = "User-provided restore item and on-disk value metadata tree structures do not match"
"""Text of Orbax's error. Programs search for this text."""

_NUMBERS: Final = (int, float, np.number)

_SUPPORTED: Final = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, *_NUMBERS, bytes, str)
"""Types of the leaves that Orbax saves and loads."""


class TreeHandler:
    """A `CheckpointableHandler` for trees. It accepts the same trees as Orbax's handler."""

    def __init__(self) -> None:
        """Take the options from the current Context."""
        self._context = get_context()
        self._orbax = v1.handlers.PyTreeHandler(context=self._context)

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Raise an error, because `saving` writes trees."""
        raise NotImplementedError("trees are saved by ckptcore_integrations.orbax_v1.save")

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Check the abstract tree. The result loads the tree when it is awaited."""
        self._orbax.validate_abstract_leaves_handleable(abstract_checkpointable)

        async def read() -> Any:
            if not (directory / PYTREE_METADATA_FILE).exists():
                raise FileNotFoundError(
                    f"No structure could be identified: {redacted_location(str(directory))} has no "
                    f"{PYTREE_METADATA_FILE}"
                )
            return _load_tree(str(directory), abstract_checkpointable, self._context)

        return read()

    async def metadata(self, directory: Any) -> Any:
        """Return Orbax's metadata of the tree."""
        return await self._orbax.metadata(directory)

    def validate_leaves_handleable(self, checkpointable: Any) -> None:
        """Raise Orbax's error for a leaf without a handler."""
        self._orbax.validate_leaves_handleable(checkpointable)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return True if Orbax can save this tree."""
        return bool(self._orbax.is_handleable(checkpointable))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Return True if Orbax can load into this abstract tree."""
        return bool(self._orbax.is_abstract_handleable(abstract_checkpointable))


@converts_errors
def remedy_of_equinox(*values: object) -> Iterator[None]:
    """Add a remedy to Orbax's error for a module of Equinox that contains a function or another object.

    Args:
        values: the trees that are saved, or the arguments of a load.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError) or len(error.args) != 1 or not _has_module_with_objects(values):
            raise
        raise type(error)(
            f"{error.args[0]} Of a module of Equinox, save and load eqx.filter(model, eqx.is_array), and give the "
            "result of a load the rest with eqx.combine"
        ) from error


def _has_module_with_objects(tree: object) -> bool:
    equinox = sys.modules.get("equinox")  # values of its types exist only if it was imported
    if equinox is None:
        return False
    modules = [
        node
        for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, equinox.Module))
        if isinstance(node, equinox.Module)
    ]
    return any(not isinstance(leaf, _SUPPORTED) for leaf in jax.tree.leaves(modules))


def with_tree_handler(context: v1.Context) -> v1.Context:
    """Return a copy of a Context whose registry has `TreeHandler` for each `PyTreeHandler`."""
    registry = v1.handlers.local_registry(include_global_registry=False)
    known = context.checkpointables.registry
    for handler, name in known.get_all_entries():
        names = known.get_secondary_typestrs(handler)
        if handler is v1.handlers.PyTreeHandler:
            handler, names = TreeHandler, [TREE_HANDLER, *names]
        registry.add(handler, checkpointable_name=name, secondary_typestrs=names)
    child = v1.Context(context)
    child.checkpointables.registry = registry
    return child


def _load_tree(location: str, abstract: Any, context: v1.Context) -> Any:
    """Load a tree as Orbax does: with the types of the abstract leaves, or with the saved types.

    Args:
        location: directory of the tree.
        abstract: the abstract tree; None to get dicts and lists, and leaves with their saved types.
        context: the Context of Orbax.

    Raises:
        ValueError: the trees differ, or an abstract array lacks a sharding that the options require.
        NotImplementedError: an option cannot be honoured.
    """
    chosen, matching = context_of(context), matching_of(context)
    if context.array.loading.use_load_and_broadcast and _lacks_sharding(abstract):
        raise ValueError("Must provide `sharding` to restore with `SingleReplicaArrayHandler`.")
    try:
        metadata = ckptcore.metadata(location, context=chosen)
        as_saved = abstract_arrays(metadata)
        if abstract is None:
            return ckptcore.load(location, _plain(metadata.tree.skeleton, as_saved), matching=matching, context=chosen)
        request = _Request(_by_text(as_saved), allows_new_placeholders=matching.unexpected == "ignore")
        requested = jax.tree_util.tree_map_with_path(request.leaf, abstract)
        loaded = ckptcore.load(location, requested, matching=matching, context=chosen)
    except TreeMismatchError as error:
        raise TreeMismatchError(f"{_MISMATCH}: {error}", error.differences) from error
    except CorruptCheckpointError as error:
        raise type(error)(_opening(location, error), key=error.key, start=error.start, stop=error.stop) from error
    except (UncommittedCheckpointError, ObjectNotFoundError) as error:  # Orbax raises ValueError for missing files
        raise CorruptCheckpointError(_opening(location, error)) from error
    return jax.tree_util.tree_map_with_path(request.result, loaded) if request.numbers else loaded


def _opening(location: str, error: CheckpointError) -> str:
    """Return the message of an error with Orbax's text for missing or damaged files, because programs search for it."""
    return f"Error opening {location} with ckptcore in place of a TensorStore driver: {error}"


def _lacks_sharding(abstract: Any) -> bool:
    return abstract is None or any(
        isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None for leaf in jax.tree.leaves(abstract)
    )


class _Request:
    """Conversion of abstract leaves of Orbax to leaves that ckptcore loads.

    Attributes:
        numbers: the type of each leaf that is requested as a Python number, by its key path.
    """

    def __init__(self, stored: Mapping[tuple[str, ...], Any], *, allows_new_placeholders: bool) -> None:
        self.numbers: dict[tuple[Any, ...], type] = {}
        self._stored = stored
        self._allows_new_placeholders = allows_new_placeholders

    def leaf(self, path: tuple[Any, ...], leaf: Any) -> Any:
        """Return the leaf to load.

        Args:
            path: its key path.
            leaf: the abstract leaf: a value, a type, or an object with a shape and a dtype.

        Raises:
            TreeMismatchError: there is no stored leaf for a placeholder.
        """
        stored = self._stored.get(tuple(map(text_of, path)))
        if leaf is v1.PLACEHOLDER:
            if stored is None and not self._allows_new_placeholders:
                name = jax.tree_util.keystr(path)
                difference = f"missing: {name} is a placeholder, and no leaf is stored there"
                raise TreeMismatchError(difference, (difference,))
            return leaf
        kind = leaf if isinstance(leaf, type) else type(leaf)
        if issubclass(kind, _NUMBERS):
            self.numbers[path] = kind
            return leaf if stored is None else stored
        if leaf is kind:
            return _of_type(kind, stored)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        return _array(leaf, stored)

    def result(self, path: tuple[Any, ...], leaf: Any) -> Any:
        """Return a loaded leaf with the requested type of number."""
        kind = self.numbers.get(path)
        return leaf if kind is None or isinstance(leaf, str) else kind(np.asarray(leaf)[()])


def _of_type(kind: type, stored: Any) -> Any:
    """Return the leaf to load for a type."""
    if not hasattr(stored, "dtype"):
        return stored
    if issubclass(kind, np.ndarray):
        return ckptcore.AbstractArray(stored.shape, stored.dtype)
    return _abstract(stored.shape, stored.dtype, getattr(stored, "sharding", None))


def _array(leaf: Any, stored: Any) -> Any:
    """Return the leaf to load for an abstract array, whose shape, dtype and sharding may be None."""
    if _is_key(stored) and not _is_key(leaf):
        return stored  # Orbax's metadata has the shape and the dtype of the data
    shape, dtype = leaf.shape, leaf.dtype
    if hasattr(stored, "dtype"):
        # Orbax saves no empty arrays, so an empty one in an abstract tree means a NumPy array of the stored shape.
        is_empty = isinstance(leaf, np.ndarray) and leaf.size == 0
        shape = stored.shape if shape is None or is_empty else shape
        dtype = stored.dtype if dtype is None else dtype
    if not hasattr(leaf, "sharding"):
        return ckptcore.AbstractArray(shape, dtype)
    return _abstract(shape, dtype, getattr(stored, "sharding", None) if leaf.sharding is None else leaf.sharding)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _abstract(shape: Any, dtype: Any, sharding: Any) -> Any:
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # JAX has no 64-bit dtypes while jax_enable_x64 is off
    make: Any = jax.ShapeDtypeStruct  # the constructor is untyped in JAX
    return make(shape, dtype, sharding=sharding)


def _by_text(tree: Any) -> Mapping[tuple[str, ...], Any]:
    """Return the leaves of a tree by the texts of their keys."""
    return {tuple(map(text_of, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _plain(node: Skeleton, abstract: Any) -> Any:
    """Return an abstract tree with the containers that Orbax builds: dicts with text keys, and lists."""
    if not isinstance(node, Node):
        return abstract
    children = list(abstract.values()) if isinstance(abstract, dict) else list(abstract)
    made = [_plain(child, inner) for child, inner in zip(node.children, children, strict=True)]
    if node.kind in ("list", "tuple"):
        return made if made or node.kind == "list" else ()
    if node.kind == "object":
        if not made:
            return None
        if are_indices(node.keys):
            return made
    return dict(zip(map(str, node.keys), made, strict=True))


PLACEHOLDER = v1.PLACEHOLDER

T = TypeVar("T")


def _with_ckptcore(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function of Orbax that loads trees with ckptcore and expands ``~`` in the path."""

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
    """Call `load`, the present name of this function."""
    return load(*args, **kwargs)


@deprecated("Use `load_async` instead.")
def load_pytree_async(*args: Any, **kwargs: Any) -> v1.AsyncResponse[Any]:
    """Call `load_async`, the present name of this function."""
    return load_async(*args, **kwargs)


@deprecated("Use `metadata` instead.")
def pytree_metadata(*args: Any, **kwargs: Any) -> v1.CheckpointMetadata[Any]:
    """Call `metadata`, the present name of this function."""
    return metadata(*args, **kwargs)
