"""Filling a checkpoint in several sessions, and committing it."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.io.background import SaveHandle
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout
from ckptcore.saving.finalizing import finalize_sessions
from ckptcore.saving.save import begin_save, perform_save
from ckptcore.saving.save_requests import Destination, OneTree, SaveRequest
from ckptcore.saving.sessions import PartialSession

__all__ = ["finalize", "save_partial", "save_partial_async"]


def save_partial(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    context: Context | None = None,
) -> None:
    """Save a part of a tree: a session of a checkpoint that several fill, one after the other, until `finalize` commits it.

    Returns once the session is durable and counts. Until `finalize` there is no checkpoint: a load says which sessions there are.
    Each session may be of another process, or of a whole job in which every process calls this. Mappings are united by key; every other
    container, and every value that is in several sessions, must be the same in all of them. Of an array that tells its boxes
    (`ShardedArray`, arrays of a job) sessions may have different ones.

    A session that fails or dies does not count, and those before it do. Nothing replaces a partial save: not `save`, not the collection
    of a `Checkpointer`; `delete` removes it.

    Args:
        location: a path or URL, the same in every session; nothing may be there when the first one begins.
        state: what this session has.
        layout: as for `save`, the same with the same options in every session.
        context: options.

    Raises:
        TreeMismatchError: for an array that an earlier session has, and for what does not fit the trees of those. Nothing was written.
        CheckpointExistsError: if something is there that is no partial save.
        SaveLostError: if another session is under way there, or took over from this one.
        CheckpointError: if the layout is another one than before, or cannot be written in sessions.
        What `save` does.
    """
    perform_save(_session(location, state, layout), context or default_context())


def save_partial_async(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout = "safetensors",
    context: Context | None = None,
) -> SaveHandle:
    """Begin a session of a partial save and return once it owns its memory, as `save_async` does. Takes and raises what `save_partial` does."""
    return begin_save(_session(location, state, layout), context or default_context())


def finalize(
    location: LocationLike,
    *,
    layout: str | Layout | None = None,
    metadata: Mapping[str, JSON] | None = None,
    context: Context | None = None,
) -> None:
    """Commit what sessions of `save_partial` wrote as one checkpoint, as if one save had written it. Moves no element of an array.

    In a job every process calls this. One that died is called again. Sessions stay as they are where it fails, and further ones may come.

    Args:
        location: as for `save_partial`.
        layout: the one that the sessions have, with its options; None: with its defaults.
        metadata: JSON of the user's, kept with the checkpoint.
        context: options.

    Raises:
        CheckpointNotFoundError: if there is no partial save, or no session of it is complete.
        TreeMismatchError: if arrays are not whole: names them.
        CheckpointError: if the layout has other options than the sessions.
        SaveLostError: if a session is under way there, or began meanwhile.
        CorruptCheckpointError: if what says what sessions wrote is damaged.
    """
    finalize_sessions(location, layout, metadata, context or default_context())


def _session(location: LocationLike, state: object, layout: str | Layout) -> SaveRequest:
    return SaveRequest(
        destination=Destination(location), values=OneTree(state), layout=layout, strategy=PartialSession()
    )
