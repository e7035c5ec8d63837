"""The functions that users call: save, load, look at, verify, convert and delete checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptcore.background import LoadHandle, SaveHandle
from ckptcore.commit import Overwrite, read_root, remove_checkpoint
from ckptcore.context import Context, default_context
from ckptcore.conversion import convert_checkpoint
from ckptcore.engine.memory import StagingMemory
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedVersionError,
)
from ckptcore.loading import abstract_tree, load_into_target, load_value
from ckptcore.locations import LocationLike, resolve_location
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.tree import JSON
from ckptcore.opening import Opened, while_unchanged
from ckptcore.protocols import Layout
from ckptcore.root import new_save_id
from ckptcore.saving import describe, fail_everywhere, persist, start_copy, start_view
from ckptcore.snapshots import BoundedSnapshot, CopiedSnapshot, ViewedSnapshot
from ckptcore.verification import ProgressCallback, VerifyReport, verify_checkpoint

__all__ = [
    "CheckpointMetadata",
    "convert",
    "delete",
    "load",
    "load_async",
    "load_into",
    "metadata",
    "save",
    "save_async",
    "verify",
]


def save(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    context: Context | None = None,
) -> None:
    """Save a tree and return once it is committed. Arrays in host memory are not copied; do not change them meanwhile.

    Args:
        location: a path or URL; a directory is made there.
        state: a tree of containers and leaves that the installed plugins handle.
        layout: how arrays are laid out: a name, or a layout object with options.
        overwrite: whether a checkpoint that is there is replaced, with every file that stands in its directory: True: atomically; ``"non-atomic"``: also where the storage
            cannot do so, and a crash would leave neither.
        metadata: JSON of the user's, kept with the checkpoint.
        context: options.

    Raises:
        CheckpointExistsError: if something is there that is not to be replaced.
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: for what cannot be saved; nothing was written.
        BackgroundSaveError: if an earlier asynchronous save failed unnoticed; call again to save.
        StorageError: if the storage fails. What was there before is there still.
    """
    context = context or default_context()
    described, leaves = describe(location, state, layout=layout, overwrite=overwrite, custom=metadata, context=context)
    context.saves.wait()
    persist(described, ViewedSnapshot(described.plan, start_view(described.plan, leaves)), context)


def save_async(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    context: Context | None = None,
) -> SaveHandle:
    """Begin to save a tree and return once the save owns its memory: what changes afterwards is not in the checkpoint.

    Writing and the commit go on in the background; the handle tells when they are done. An error that nobody asks the
    handle for is raised by the next save of the Context, and printed when the program ends.

    Takes and raises what `save` does, as far as it is known before the writing begins.
    """
    context = context or default_context()
    saves = context.saves
    if context.when_busy == "wait":
        saves.wait()
    described, leaves = describe(location, state, layout=layout, overwrite=overwrite, custom=metadata, context=context)
    plan = described.plan
    handle = SaveHandle(described.location.display, sum(item.spec.nbytes for item in plan.items))
    memory = StagingMemory(context.staging, context.io_threads)
    limit = context.memory.save_bytes
    start = start_copy(plan, leaves, memory)
    if limit is None:
        try:
            snapshot = CopiedSnapshot(plan, start, memory.give_back)
            snapshot.wait()
        except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
            memory.close()
            fail_everywhere(described, error)

        def work() -> None:
            try:
                persist(described, snapshot, context, handle)
            finally:
                memory.close()
                _release(context)

        try:
            saves.run(handle, work)
        except RuntimeError as error:
            memory.close()
            fail_everywhere(described, error)
        return handle
    bounded = BoundedSnapshot(plan, start, memory.give_back, limit)

    def bounded_work() -> None:
        try:
            persist(described, bounded, context, handle)
        finally:
            bounded.writer_ended()
            memory.close()
            _release(context)

    try:
        saves.run(handle, bounded_work)
    except RuntimeError as error:
        memory.close()
        fail_everywhere(described, error)
    try:
        bounded.copy_all()
    except BaseException:
        handle.exception()  # the writer ends with the same error, which is told here and need not be again
        raise
    return handle


def _release(context: Context) -> None:
    if not context.memory.keep_staging:
        context.staging.release_unused()


def load(location: LocationLike, abstract: Any = None, *, context: Context | None = None) -> Any:
    """Load a checkpoint.

    Args:
        location: a path or URL: a checkpoint of ours, or of any format an installed layout reads, also one file.
        abstract: a tree like the one wanted: each leaf tells shape, dtype, framework and placement (an array itself will do,
            a `jax.ShapeDtypeStruct`, a tensor on the meta device, an `AbstractArray`). `PLACEHOLDER` stands for parts not
            to be loaded. None: NumPy leaves in the structure that was saved.
        context: options.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: if there is nothing to load.
        TreeMismatchError: if the abstract tree and the stored one differ; lists every difference.
        CorruptCheckpointError: if bytes are not what was written; names file, array and range.
    """
    return load_value(location, abstract, context or default_context())


def load_async(location: LocationLike, abstract: Any = None, *, context: Context | None = None) -> LoadHandle[Any]:
    """Begin to load a checkpoint in the background; takes what `load` does, and the handle's result raises what it does."""
    context = context or default_context()
    return context.saves.load(functools.partial(load_value, location, abstract, context))


def load_into(location: LocationLike, target: Any, *, context: Context | None = None) -> Any:
    """Load a checkpoint into what is there: arrays and tensors are filled in place; returns the target.

    Leaves that cannot be changed (numbers, jax.Arrays) are replaced in their dict, list or object.

    Raises:
        TreeMismatchError, CheckpointNotFoundError: before anything is changed.
        TargetUndefinedError: if it fails half-way; the target then holds a mix.
    """
    load_into_target(location, target, context or default_context())
    return target


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a checkpoint says of itself, without its arrays.

    Attributes:
        abstract: a tree that can be passed to `load`: `AbstractArray` for arrays, and small values themselves.
        tree: the structure and a record of each leaf.
        layout: the name of its layout.
        created: when the save began, ISO 8601 in UTC; None where other software wrote it and does not say.
        writer: the software that wrote it.
        custom: metadata of the user's.
        save_id: which save wrote it; None where other software did.
        objects: its objects, by key.
    """

    abstract: Any
    tree: TreeMetadata
    layout: str
    created: str | None
    writer: str
    custom: Mapping[str, JSON]
    save_id: str | None
    objects: Mapping[str, ObjectRecord]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, tied ones counted once."""
        return self.tree.nbytes


def metadata(location: LocationLike, *, context: Context | None = None) -> CheckpointMetadata:
    """What a checkpoint says of itself; reads no array.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
    """
    context = context or default_context()

    def describe_opened(opened: Opened) -> CheckpointMetadata:
        return CheckpointMetadata(
            abstract=abstract_tree(opened.tree, context.registry),
            tree=opened.tree,
            layout=opened.layout.name,
            created=opened.root.created if opened.root else None,
            writer=opened.writer,
            custom=opened.custom,
            save_id=opened.root.save_id if opened.root else None,
            objects=opened.objects,
        )

    return while_unchanged(location, context, describe_opened)


def delete(location: LocationLike, *, context: Context | None = None) -> None:
    """Delete a checkpoint of ours, also an unfinished or a damaged one; it is never there in part.

    Every file in its directory goes with it.

    Raises:
        CheckpointNotFoundError: if there is nothing.
        CheckpointExistsError: if what is there is no checkpoint of ckptcore; it is left alone.
    """
    context = context or default_context()
    durable = context.durability == "full"
    resolved = resolve_location(location, context.registry, durable=durable, config=context.storage)
    try:
        ours = read_root(resolved.store) is not None
    except (CorruptCheckpointError, UnsupportedVersionError):
        ours = True
    if not ours:
        if resolved.is_object or resolved.store.list_names():
            raise CheckpointExistsError(
                f"{resolved.display} was not written by ckptcore and is left alone; remove it with your own tools"
            )
        raise CheckpointNotFoundError(f"there is nothing at {resolved.display} to delete")
    remove_checkpoint(resolved, new_save_id())


def verify(
    location: LocationLike, *, progress: ProgressCallback | None = None, context: Context | None = None
) -> VerifyReport:
    """Read every byte of a checkpoint and check it.

    Args:
        location: a path or URL.
        progress: called with bytes checked and bytes in all, from any thread.
        context: options.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: if there is nothing to verify.
    """
    return verify_checkpoint(location, context or default_context(), progress)


def convert(
    source: LocationLike,
    destination: LocationLike,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    progress: ProgressCallback | None = None,
    context: Context | None = None,
) -> None:
    """Write a checkpoint again in another layout or place; holds few arrays at a time.

    Args:
        source, destination: paths or URLs.
        layout, overwrite: as for `save`.
        progress: called with bytes written and bytes in all, from any thread.
        context: options.

    Raises:
        What `load` and `save` do; the source is never changed.
    """
    convert_checkpoint(source, destination, layout, overwrite, progress, context or default_context())
