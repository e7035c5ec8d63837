"""Inspect and manage checkpoints: open, describe, verify, delete. Abstract trees of values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ckptcore.commit.delete import delete_checkpoint
from ckptcore.commit.location import LocationLike, resolve_location
from ckptcore.context import Context, default_context
from ckptcore.errors import UnsupportedLeafError
from ckptcore.inspection.describe import CheckpointMetadata, describe_checkpoint, describe_tree_at
from ckptcore.inspection.verify import VerifyReport, verify_checkpoint
from ckptcore.model.tree import format_path
from ckptcore.on_demand.checkpoints import OpenCheckpoint
from ckptcore.other_libraries import explains_arguments
from ckptcore.progress import ProgressCallback
from ckptcore.protocols import LeafHandler, Transforms
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import flatten, saved_columns
from ckptcore.tree.shapes import unflatten_states

__all__ = ["abstract", "delete", "metadata", "open", "verify"]


@explains_arguments
def open(location: LocationLike, *, context: Context | None = None) -> OpenCheckpoint:
    """Open a checkpoint to inspect it and to read parts of its arrays on demand. Reads no array.

    The result is a mapping of the tree: ``checkpoint["params/w"][0:16]`` reads only 16 rows, and
    ``checkpoint.iter_boxes()`` streams all arrays. Use it in a ``with`` statement, or close it.

    Args:
        location: see `load`.
        context: options; reads verify checksums as loads do.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
        CompositeCheckpointError: the checkpoint has several checkpointables. Open one by its own location.
        TreeMismatchError: the checkpoint has the files of an object instead of a tree.
    """
    return OpenCheckpoint(location, context or default_context())


@explains_arguments
def metadata(
    location: LocationLike, *, context: Context | None = None, transforms: Transforms = ()
) -> CheckpointMetadata:
    """Read the metadata of a checkpoint of one tree or of several objects. Reads no array.

    Args:
        location: a path or URL.
        context: options.
        transforms: see `load`; returns the metadata of the transformed tree. Only for a checkpoint of one tree.

    Raises:
        TransformError: see `load`.
        CompositeCheckpointError: transforms are passed for a checkpoint of several objects.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
    """
    context = context or default_context()
    return describe_tree_at(location, context, transforms) if transforms else describe_checkpoint(location, context)


@explains_arguments
def verify(
    location: LocationLike, *, progress: bool | ProgressCallback = False, context: Context | None = None
) -> VerifyReport:
    """Read and check every byte of a checkpoint. The report lists damage, which is not raised as an error.

    Args:
        location: a path or URL.
        progress: True to show a bar on stderr with rich or tqdm, on rank 0. Or a function of the bytes checked so far
            and the total, called from any thread. The last call has two equal numbers.
        context: options.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: there is no checkpoint to verify.
        StorageError: an object cannot be read, so its damage is unknown.
    """
    context = context or default_context()
    with runtime_of(context).show_progress(progress, "verifying") as report:
        return verify_checkpoint(location, context, report)


@explains_arguments
def delete(location: LocationLike, *, other_files: bool = False, context: Context | None = None) -> None:
    """Delete a checkpoint of ckptcore, even an unfinished or damaged checkpoint.

    No process can load a partly deleted checkpoint. Never deletes another checkpoint.

    Args:
        location: a path or URL.
        other_files: True to delete also files in its directory that no save wrote, such as a tokenizer.
        context: options.

    Raises:
        CheckpointNotFoundError: the location is empty.
        CheckpointExistsError: the files at the location are not a checkpoint of ckptcore, or its directory contains
            another checkpoint, or files that no save wrote. Nothing is deleted.
        CheckpointReferredError: other checkpoints in the same parent directory refer to its arrays. The error names
            them. References from checkpoints in other directories are not detected.
    """
    runtime = runtime_of(context or default_context())
    resolved = resolve_location(location, runtime.storages, to_write=True)
    delete_checkpoint(resolved, runtime.io_threads, other_files=other_files)


@explains_arguments
def abstract(state: Any, *, context: Context | None = None) -> Any:
    """Return the abstract tree of a value, which `load` accepts to build a similar value. Reads no elements.

    Containers have the same types. Leaves state their type, shape, dtype and placement: `AbstractArray` for NumPy
    arrays, `ShardedArray` without elements for sharded arrays, `jax.ShapeDtypeStruct` with a sharding for JAX arrays,
    tensors on the meta device or FakeTensors for PyTorch tensors. Numbers, text, None, `PLACEHOLDER` and abstract
    leaves are unchanged. Tied leaves stay tied.

    An object with a state, such as a module or an optimizer, is replaced by its current state under the saved names,
    and a load returns such a state. An optimizer that has not made a step has an empty state; if the saved state may
    have more leaves, pass the object itself to `load`. An object that writes files has no abstract leaf: pass it to
    `load_checkpointables`.

    Args:
        state: a tree of containers and leaves that the installed plugins handle. Its arrays may be deleted, donated, or
            not computed yet.
        context: options.

    Raises:
        UnsupportedLeafError: leaves cannot be saved or loaded, or have no abstract form. Lists the first 20 leaves.
        UnsupportedKeyError: a key is not an int, a bool, a str, or a tuple of them.
    """
    registry = runtime_of(context or default_context()).registry
    flat = flatten(state, registry, placeholders=True, columns=saved_columns(registry, mappings=True))
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
    """Creates abstract leaves. Tied leaves share one abstract leaf, so that loaded leaves are tied as well.

    Most abstract leaves compare by shape, dtype and placement, but a tensor on the meta device equals only itself.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, object, Hashable], object] = {}

    def abstract(self, leaf: object, handler: LeafHandler) -> object:
        made = handler.abstract(leaf)
        identity = handler.identity(leaf)
        if identity is None:
            return made
        return self._made.setdefault((id(handler), handler.built_type(leaf), identity), made)
