"""Saves of a tree, or of several objects into one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.commit.location import LocationLike
from ckptcore.commit.stored_root import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.io.background import SaveHandle
from ckptcore.model.tree import JSON
from ckptcore.other_libraries import explains_arguments
from ckptcore.progress import ProgressCallback
from ckptcore.protocols import Layout, SaveStrategy
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import OneTree, Save, SaveDestination, SaveDraft, SaveHooks, SaveNotes, SaveRequest
from ckptcore.saving.save import begin_save, perform_save
from ckptcore.saving.writing import PlainSave

__all__ = ["save", "save_async", "save_checkpointables", "save_checkpointables_async"]


@explains_arguments
def save(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    strategy: SaveStrategy[SaveDraft, Save] | None = None,
    progress: bool | ProgressCallback = False,
    context: Context | None = None,
) -> None:
    """Save a tree, and return once it is committed. Host arrays are copied block by block as they are written.

    Do not change arrays during the save, because the checkpoint would mix old and new elements.

    Args:
        location: a path or URL. The checkpoint is a new directory there. A path that ends in ``.safetensors`` is one
            file in the format of the safetensors library. It stores a flat dict of arrays of one process.
        state: a tree of containers and leaves that the installed plugins handle.
        layout: the on-disk format: a name, or a layout object with options.
        overwrite: True to replace an existing checkpoint atomically. Refuses a directory with files that no save
            wrote, such as a tokenizer. ``"non-atomic"`` also replaces checkpoints on storages without an atomic
            replacement; on an object store, a crash may leave neither checkpoint. ``"best-effort"`` is like
            ``"non-atomic"`` on file systems, with a warning if the replacement is not atomic, and like True on object
            stores. ``"keep-other-files"`` is like True, but files that no save wrote stay, and other processes may
            write them at any time. To replace a checkpoint of the same layout, this layout must be dcp or safetensors.
            Object stores do not support this: a location with other files is refused. ``"with-other-files"`` is like
            ``"non-atomic"``, but also deletes files that no save wrote, and logs their names.
        metadata: JSON, stored with the checkpoint.
        strategy: what to write and commit, such as `Update` or `WithExports`; None: the whole state.
        progress: True to show a bar on stderr with rich or tqdm, on rank 0. Or a function that is called
            with the bytes of arrays that this process has written so far, and with the total. It is called from any
            thread; calls do not overlap. The last call has two equal numbers, and comes after the commit. It may raise
            an exception to stop the save.
        context: options.

    Raises:
        CheckpointExistsError: the location has something that must not be replaced.
        InvalidLocationError: the location is a file name of other software, such as ``model.pt``, or a
            ``.safetensors`` file, which cannot store this state.
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: the state cannot be saved. Nothing was written.
        BackgroundSaveError: an earlier asynchronous save failed, and its error was not retrieved. Call again to save.
        StorageError: the storage failed. An earlier checkpoint is unchanged, unless its replacement was not atomic.
    """
    context = context or default_context()
    with runtime_of(context).show_progress(progress, "saving") as report:
        hooks = SaveHooks(progress=report)
        perform_save(_request(location, OneTree(state), layout, overwrite, metadata, strategy, hooks), context)


@explains_arguments
def save_async(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    strategy: SaveStrategy[SaveDraft, Save] | None = None,
    context: Context | None = None,
) -> SaveHandle:
    """Begin to save a tree, and return once the state may change: later changes are not in the checkpoint.

    The checkpoint is written and committed in the background. The handle waits for it. If the error of a save is not
    retrieved from its handle, the next save of the Context raises it, or it is printed when the program ends.

    Arguments and errors are as for `save`; the handle raises errors that occur while files are written.
    """
    request = _request(location, OneTree(state), layout, overwrite, metadata, strategy, SaveHooks())
    return begin_save(request, context or default_context())


@explains_arguments
def save_checkpointables(
    location: LocationLike,
    checkpointables: Mapping[str, object],
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    strategy: SaveStrategy[SaveDraft, Save] | None = None,
    progress: bool | ProgressCallback = False,
    context: Context | None = None,
) -> None:
    """Save several objects into one checkpoint, each under a name; return once it is committed.

    Args:
        location: a path or URL. The checkpoint is a new directory there, with a directory for each name.
        checkpointables: by name: trees, objects with a state (modules, optimizers, iterators), and objects that write
            their own files. Each tree is also a complete checkpoint at ``location/name``.
        layout: the on-disk format of trees.
        overwrite, metadata, strategy, progress, context: see `save`.

    Raises:
        InvalidLocationError: a name is invalid.
        Errors of `save`, and errors that the objects raise. Nothing was committed.
    """
    context = context or default_context()
    with runtime_of(context).show_progress(progress, "saving") as report:
        hooks = SaveHooks(progress=report)
        perform_save(_request(location, checkpointables, layout, overwrite, metadata, strategy, hooks), context)


@explains_arguments
def save_checkpointables_async(
    location: LocationLike,
    checkpointables: Mapping[str, object],
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    strategy: SaveStrategy[SaveDraft, Save] | None = None,
    context: Context | None = None,
) -> SaveHandle:
    """Begin to save several objects, and return once they may change or advance.

    Arguments and errors are as for `save_checkpointables`; the handle raises errors that occur while files are written.
    """
    request = _request(location, checkpointables, layout, overwrite, metadata, strategy, SaveHooks())
    return begin_save(request, context or default_context())


def _request(
    location: LocationLike,
    values: OneTree | Mapping[str, object],
    layout: str | Layout,
    overwrite: Overwrite,
    metadata: Mapping[str, JSON] | None,
    strategy: SaveStrategy[SaveDraft, Save] | None,
    hooks: SaveHooks,
) -> SaveRequest:
    if strategy is not None and not hasattr(strategy, "prepare"):
        raise TypeError(f"strategy={strategy!r}: expected a SaveStrategy, such as ckptcore.Update(base=...)")
    request = SaveRequest(
        destination=SaveDestination(location, overwrite),
        values=values,
        layout=layout,
        strategy=strategy or PlainSave(),
        notes=SaveNotes(custom=metadata),
        hooks=hooks,
    )
    if "." not in str(location).rpartition("/")[2]:
        return request  # fast path: no suffix
    from ckptcore.commit.location import expect_directory_name, is_safetensors_file  # few locations need it

    if not is_safetensors_file(location):
        expect_directory_name(location)
        return request
    from ckptcore.saving.single_file import file_request  # few saves need it

    return file_request(request)
