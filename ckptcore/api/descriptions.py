"""Look into a checkpoint: its metadata, parts of its arrays on demand, and the abstract tree of a value."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.errors import UnsupportedLeafError
from ckptcore.loading.describe import (
    CheckpointMetadata,
    describe_checkpoint,
    describe_tree,
)
from ckptcore.loading.open_checkpoints import OpenCheckpoint
from ckptcore.model.tree import format_path
from ckptcore.other_libraries import explains_arguments
from ckptcore.protocols import LeafHandler, Transforms
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import flatten, unflatten_states

__all__ = ["abstract", "metadata", "open"]


@explains_arguments
def open(location: LocationLike, *, context: Context | None = None) -> OpenCheckpoint:
    """Open a checkpoint to inspect it and to read parts of its arrays on demand. Reads no array.

    The result is a mapping of the tree: ``checkpoint["params/w"][0:16]`` reads these rows only, and
    ``checkpoint.iter_boxes()`` streams all arrays. Close it, best with a ``with`` statement.

    Args:
        location: as for `load`.
        context: options; checksums are verified as by loads.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
        CompositeCheckpointError: if it holds several checkpointables: open one by its own location.
    """
    return OpenCheckpoint(location, context or default_context())


@explains_arguments
def metadata(
    location: LocationLike, *, context: Context | None = None, transforms: Transforms = ()
) -> CheckpointMetadata:
    """Read the metadata of a checkpoint of one tree or of several objects; reads no array.

    Args:
        location: a path or URL.
        context: options.
        transforms: as for `load`, for a checkpoint of one tree: describes the tree that they make.

    Raises:
        TransformError: as for `load`.
        CompositeCheckpointError: if transforms are given for a checkpoint of several objects.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
    """
    context = context or default_context()
    return describe_tree(location, context, transforms) if transforms else describe_checkpoint(location, context)


@explains_arguments
def abstract(state: Any, *, context: Context | None = None) -> Any:
    """Return the abstract tree of a value: passed to `load`, it requests a value like this one. Reads no elements.

    Containers have the same types. Leaves state their type, shape, dtype and placement: `AbstractArray` for NumPy
    arrays, a `ShardedArray` without elements for one with, `jax.ShapeDtypeStruct` with its sharding for arrays of JAX,
    and tensors on the meta device or FakeTensors for those of PyTorch. Numbers, text, None, `PLACEHOLDER` and abstract
    leaves stay as they are. Tied leaves stay tied.

    An object with a state of its own, such as a module or an optimizer, becomes this state, under the names that it is
    saved by, and a load returns such a state. It is the current state: that of an optimizer which has made no step is
    empty. If the saved state may have more, pass the object itself to `load`. An object that writes files of its own
    has no abstract leaf: pass it to `load_checkpointables`.

    Args:
        state: a tree of containers and leaves that the installed plugins handle. Arrays in it may be deleted, donated,
            or still be computed.
        context: options.

    Raises:
        UnsupportedLeafError: lists, by path, every leaf that cannot be saved or loaded, and those that nothing abstract
            stands for.
        UnsupportedKeyError: if a key is neither an int nor a str.
    """
    flat = flatten(state, runtime_of(context or default_context()).registry, placeholders=True)
    ties = _Ties()
    leaves: list[object] = []
    refused: list[str] = []
    for path, leaf, handler in zip(flat.paths(), flat.leaves, flat.handlers, strict=True):
        if handler is None:
            leaves.append(leaf)  # a placeholder
            continue
        try:
            leaves.append(ties.abstract(leaf, handler))
        except UnsupportedLeafError as error:
            refused.append(f"{format_path(path)}: {error}")
    if refused:
        more = f"; and {len(refused) - 20} more" if len(refused) > 20 else ""
        raise UnsupportedLeafError("; ".join(refused[:20]) + more)
    return unflatten_states(flat.shape, leaves)


class _Ties:
    """Makes abstract leaves. Leaves with the same elements share one, so that loaded leaves are tied in the same way.

    Most abstract leaves compare by shape, dtype and placement. A tensor on the meta device equals only itself.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, type, Hashable], object] = {}

    def abstract(self, leaf: object, handler: LeafHandler) -> object:
        made = handler.abstract(leaf)
        identity = handler.identity(leaf)
        if identity is None:
            return made
        known = self._made.setdefault((id(handler), type(leaf), identity), made)
        # The same elements may be asked for in two ways: on a device on purpose, and on whichever is the default.
        return known if known is made or handler.describe(known) == handler.describe(made) else made
