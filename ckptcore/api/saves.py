"""Saving a tree, or several objects into one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.commit.location import LocationLike
from ckptcore.commit.target import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.io.background import SaveHandle
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout, SaveStrategy
from ckptcore.saving.requests import Destination, OneTree, Save, SaveDraft, SaveNotes, SaveRequest
from ckptcore.saving.save import begin_save, perform_save
from ckptcore.saving.writing import PlainSave

__all__ = ["save", "save_async", "save_checkpointables", "save_checkpointables_async"]


def save(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    strategy: SaveStrategy[SaveDraft, Save] | None = None,
    context: Context | None = None,
) -> None:
    """Save a tree and return once it is committed. Arrays in host memory are copied block by block as they are written.

    Do not change arrays during the save: the checkpoint could be loaded, but would mix old and new elements.

    Args:
        location: a path or URL; a directory is made there.
        state: a tree of containers and leaves that the installed plugins handle.
        layout: how arrays are laid out: a name, or a layout object with options.
        overwrite: whether a checkpoint that is there is replaced, with every file that stands in its directory: True: atomically; ``"non-atomic"``: also where the storage
            cannot do so, and a crash would leave neither.
        metadata: JSON of the user's, kept with the checkpoint.
        strategy: what is written and committed, such as `Update` or `WithExports`; None: everything that is given.
        context: options.

    Raises:
        CheckpointExistsError: if something is there that is not to be replaced.
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: for what cannot be saved; nothing was written.
        BackgroundSaveError: if an earlier asynchronous save failed unnoticed; call again to save.
        StorageError: if the storage fails. What was there before is there still.
    """
    request = _request(location, OneTree(state), layout, overwrite, metadata, strategy)
    perform_save(request, context or default_context())


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
    """Begin to save a tree and return once the save owns its memory: what changes afterwards is not in the checkpoint.

    Writing and the commit go on in the background; the handle tells when they are done. An error that nobody asks the
    handle for is raised by the next save of the Context, and printed when the program ends.

    Takes and raises what `save` does, as far as it is known before the writing begins.
    """
    request = _request(location, OneTree(state), layout, overwrite, metadata, strategy)
    return begin_save(request, context or default_context())


def save_checkpointables(
    location: LocationLike,
    checkpointables: Mapping[str, object],
    *,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    strategy: SaveStrategy[SaveDraft, Save] | None = None,
    context: Context | None = None,
) -> None:
    """Save several objects into one checkpoint, each under its name and in its own way; return once it is committed.

    Args:
        location: a path or URL; a directory is made there, with one for each name in it.
        checkpointables: by name: trees, objects that have a state (modules, optimizers, iterators), objects that write
            files of their own. What is a tree is by itself a checkpoint at ``location/name``.
        layout: how arrays are laid out.
        overwrite, metadata, strategy, context: as for `save`.

    Raises:
        InvalidLocationError: if something cannot be a name.
        What `save` does, and what the objects themselves raise; nothing was committed.
    """
    request = _request(location, checkpointables, layout, overwrite, metadata, strategy)
    perform_save(request, context or default_context())


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
    """Begin to save several objects and return once the save owns all it needs: they may change or advance afterwards.

    Takes and raises what `save_checkpointables` does, as far as it is known before the writing begins.
    """
    request = _request(location, checkpointables, layout, overwrite, metadata, strategy)
    return begin_save(request, context or default_context())


def _request(
    location: LocationLike,
    values: OneTree | Mapping[str, object],
    layout: str | Layout,
    overwrite: Overwrite,
    metadata: Mapping[str, JSON] | None,
    strategy: SaveStrategy[SaveDraft, Save] | None,
) -> SaveRequest:
    if strategy is not None and not hasattr(strategy, "prepare"):
        raise TypeError(f"strategy={strategy!r}: expected a SaveStrategy, such as ckptcore.Update(base=...)")
    return SaveRequest(
        destination=Destination(location, overwrite),
        values=values,
        layout=layout,
        strategy=strategy or PlainSave(),
        notes=SaveNotes(custom=metadata),
    )
