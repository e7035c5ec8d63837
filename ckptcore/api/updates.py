"""Saving a checkpoint that refers to another one for what did not change."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.commit.location import LocationLike
from ckptcore.commit.occupants import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.io.background import SaveHandle
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout
from ckptcore.saving.save import begin_save, perform_save
from ckptcore.saving.save_requests import Destination, OneTree, SaveNotes, SaveRequest
from ckptcore.saving.updates import Update

__all__ = ["save_update", "save_update_async"]


def save_update(
    location: LocationLike,
    state: object,
    *,
    base: LocationLike,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    context: Context | None = None,
) -> None:
    """Save a checkpoint of which only what is given is written, and all other arrays are those of a base. Returns once it is committed.

    It is loaded, sliced, transformed, verified and converted as any other, as long as its base is there as it was; `copy` makes one that
    needs none. Software that reads the layout sees only what was written. References are one deep: what the base refers to is referred to where it is.

    Args:
        location: a path or URL; a directory is made there.
        state: what is new. Keys of mappings that are left out, and what a `PLACEHOLDER` stands for, are those of the base; other keys are
            added. A container that is no mapping is given whole, or with placeholders.
        base: the checkpoint that has the rest, of one tree, in the same directory; elsewhere in the same storage with
            ``Context(io=IOOptions(bases="anywhere"))``.
        layout, overwrite, metadata, context: as for `save`. The layout may be another one than that of the base.

    Raises:
        TreeMismatchError: if the state does not go over the base. Nothing was written.
        InvalidLocationError: if the base is where none may be, or is none.
        SaveLostError: if the base was deleted or replaced meanwhile.
        What `save` does, and for the base what `load` does.
    """
    perform_save(_update(location, state, base, layout, overwrite, metadata), context or default_context())


def save_update_async(
    location: LocationLike,
    state: object,
    *,
    base: LocationLike,
    layout: str | Layout = "safetensors",
    overwrite: Overwrite = False,
    metadata: Mapping[str, JSON] | None = None,
    context: Context | None = None,
) -> SaveHandle:
    """Begin to save an update and return once it owns its memory, as `save_async` does. Takes and raises what `save_update` does."""
    return begin_save(_update(location, state, base, layout, overwrite, metadata), context or default_context())


def _update(
    location: LocationLike,
    state: object,
    base: LocationLike,
    layout: str | Layout,
    overwrite: Overwrite,
    metadata: Mapping[str, JSON] | None,
) -> SaveRequest:
    return SaveRequest(
        destination=Destination(location, overwrite),
        values=OneTree(state),
        layout=layout,
        strategy=Update(base),
        notes=SaveNotes(custom=metadata),
    )
