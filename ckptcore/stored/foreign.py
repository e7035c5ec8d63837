"""Recognition of checkpoints of other software that are whole directories, which a save may replace."""

from __future__ import annotations

import functools

from ckptcore.commits.occupants import IsForeign
from ckptcore.context import Context
from ckptcore.engine.reader import ObjectReader
from ckptcore.errors import CheckpointError, CompositeCheckpointError
from ckptcore.locations import Location
from ckptcore.protocols import Layout

__all__ = ["foreign_checkpoints"]

_MOST_NAMES = 1000
"""Limit of names that are tested for files that are checkpoints by themselves."""


def foreign_checkpoints(context: Context) -> IsForeign:
    """Return a function that recognises checkpoints of other software, with the layouts of a Context."""
    return functools.partial(_is_foreign, context)


def _is_foreign(context: Context, location: Location) -> bool:
    store = ObjectReader(location.store, {}, context.io_threads, verify=context.verify)
    for layout in context.registry.layouts():
        try:
            found = layout.inspect(store, None) is not None
        except CompositeCheckpointError:
            found = True  # of several items
        except CheckpointError:
            return False  # unfinished or damaged: its extent is unknown
        if found:
            return not _has_single_files(layout, store)
    return False


def _has_single_files(layout: Layout, store: ObjectReader) -> bool:
    """Return whether a file in the directory is a checkpoint by itself, like ``model.safetensors``.

    Such a directory is the user's: it may have other files, such as a tokenizer or a configuration.
    """
    files = [name for name in store.list_names("")[:_MOST_NAMES] if not name.endswith("/") and not name.startswith(".")]
    for name in files:
        try:
            if layout.inspect(store, name) is not None:
                return True
        except CheckpointError:
            continue  # no file of this layout
    return False
