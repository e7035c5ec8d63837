"""What a checkpoint says of itself, and what asks a load for a value."""

from __future__ import annotations

from typing import Any

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.loading.describe import (
    CheckpointablesMetadata,
    CheckpointMetadata,
    describe_checkpoint,
    describe_checkpointables,
)
from ckptcore.protocols import Transforms
from ckptcore.tree.abstract_values import abstract_value

__all__ = ["abstract", "checkpointables_metadata", "metadata"]


def metadata(
    location: LocationLike, *, context: Context | None = None, transforms: Transforms = ()
) -> CheckpointMetadata:
    """What a checkpoint says of itself; reads no array.

    Args:
        location: a path or URL.
        context: options.
        transforms: as for `load`: the tree that is told is the one that they make.

    Raises:
        TransformError: as for `load`.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
        CompositeCheckpointError: if it holds several checkpointables: use `checkpointables_metadata`.
    """
    return describe_checkpoint(location, context or default_context(), transforms)


def checkpointables_metadata(location: LocationLike, *, context: Context | None = None) -> CheckpointablesMetadata:
    """What a checkpoint of several checkpointables says of itself; reads no array.

    Raises:
        CompositeCheckpointError: if it is one tree: use `metadata`.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
    """
    return describe_checkpointables(location, context or default_context())


def abstract(state: Any, *, context: Context | None = None) -> Any:
    """The abstract tree of a value: given to `load`, it asks for a value like this one. Touches no elements and allocates none.

    Containers are of the same types, and have for every leaf what says its type, shape, dtype and placement: `AbstractArray` for NumPy
    arrays, a `ShardedArray` without elements for one with, `jax.ShapeDtypeStruct` with its sharding for arrays of JAX, tensors on the
    meta device and FakeTensors for those of PyTorch. Numbers, text and None stay: they are what is asked for by their kind. What is
    tied stays tied. What is abstract already stays as it is, and so does `PLACEHOLDER`.

    An object that has a state of its own (a module, an optimizer) stands as its state, under the names that it is saved by: what is
    loaded is such a state. It is the state that it has now: an optimizer that made no step has none. Where it can have more, give
    `load` the object itself. An object that writes files of its own has no abstract: give `load_checkpointables` that object.

    Args:
        state: a tree of containers and leaves that the installed plugins handle. Arrays in it may be deleted, donated, or still be
            computed.
        context: options.

    Raises:
        UnsupportedLeafError: lists, by path, every leaf that cannot be saved or loaded, and those that nothing abstract stands for.
        UnsupportedKeyError: if a key is neither an int nor a str.
    """
    return abstract_value(state, (context or default_context()).registry)
