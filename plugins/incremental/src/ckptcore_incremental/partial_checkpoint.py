"""Fill a checkpoint in several sessions, and commit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.io.background import SaveHandle
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import Destination, OneTree, SaveRequest
from ckptcore.saving.save import begin_save, perform_save
from ckptcore_incremental.finalizing import finalize_sessions
from ckptcore_incremental.sessions import PartialSession

__all__ = ["PartialCheckpoint", "partial"]


def partial(
    location: LocationLike, *, layout: str | Layout | None = None, context: Context | None = None
) -> PartialCheckpoint:
    """Return a checkpoint that several sessions fill, one after the other, until `finalize` commits it. Does no I/O.

    ::

        with ckptcore.partial(path) as session:
            session.save({"encoder": encoder})
            session.save({"head": head})
            session.finalize()

    Sessions and `finalize` may be in different processes and programs: each calls `partial` with the same path.

    Args:
        location: a path or URL, the same in every session.
        layout: as for `save`, the same with the same options in every session and for `finalize`. None:
            ``"safetensors"`` for sessions; for `finalize` that of the sessions, with its default options.
        context: options.
    """
    return PartialCheckpoint(location, layout, context or default_context())


class PartialCheckpoint:
    """A checkpoint that several sessions fill, one after the other. See `partial`.

    Until `finalize` there is no checkpoint: a load raises an error that lists the sessions. A session that fails does
    not count, and those before it do. Nothing replaces a partial save: not `save`, not the retention of a
    `Checkpointer`; `delete` removes it.

    The end of a ``with`` block waits for asynchronous sessions that it began. It does not finalize.
    """

    def __init__(self, location: LocationLike, layout: str | Layout | None, context: Context) -> None:
        """See `partial`."""
        self._location = location
        self._layout = layout
        self._context = context
        self._handles: list[SaveHandle] = []

    def save(self, state: object) -> None:
        """Save a part of the tree as one session. Returns once the session is durable and counts.

        In a job every process calls this. Mappings are united by key; every other container, and every value that is in
        several sessions, must be the same in all of them. Of an array that gives its boxes (`ShardedArray`, arrays of a
        job) sessions may have different ones.

        Args:
            state: what this session has.

        Raises:
            TreeMismatchError: for an array that an earlier session has, and for what does not fit the trees of those.
                Nothing was written.
            CheckpointExistsError: if something is at the location that is no partial save.
            SaveLostError: if another session is running there, or took over from this one.
            CheckpointError: if the layout differs from that of earlier sessions, or cannot be written in sessions.
            What `ckptcore.save` raises.
        """
        perform_save(self._request(state), self._context)

    def save_async(self, state: object) -> SaveHandle:
        """Begin a session and return once it owns its memory, as `ckptcore.save_async` does. Takes and raises what `save` does."""
        handle = begin_save(self._request(state), self._context)
        self._handles.append(handle)
        return handle

    def finalize(self, *, metadata: Mapping[str, JSON] | None = None) -> None:
        """Commit what the sessions wrote as one checkpoint, as if one save had written it. Moves no element of an array.

        In a job every process calls this. If it fails the sessions stay, further ones may follow, and it can be called
        again.

        Args:
            metadata: JSON of the user's, kept with the checkpoint.

        Raises:
            CheckpointNotFoundError: if there is no partial save, or no session of it is complete.
            TreeMismatchError: if elements of arrays are missing: names the arrays.
            CheckpointError: if the layout has other options than the sessions.
            SaveLostError: if a session is running there, or began meanwhile.
            CorruptCheckpointError: if the tables of the sessions are damaged.
        """
        finalize_sessions(self._location, self._layout, metadata, self._context, self._wait)

    def _request(self, state: object) -> SaveRequest:
        # A session is planned after the one before it: it reads the table of sessions.
        runtime_of(self._context).saves.wait()
        return SaveRequest(
            destination=Destination(self._location),
            values=OneTree(state),
            layout="safetensors" if self._layout is None else self._layout,
            strategy=PartialSession(),
        )

    def _wait(self) -> None:
        while self._handles:
            handle = self._handles[0]
            try:
                if handle.matters:
                    handle.result()
            finally:
                if handle.done():  # not if the wait was interrupted
                    self._handles.remove(handle)

    def __enter__(self) -> Self:
        """Return this checkpoint."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait for asynchronous sessions; raise the first error that no caller has retrieved, or add it as a note."""
        if error is None:
            self._wait()
            return
        for handle in self._handles:
            if handle.matters and (failure := handle.exception()) is not None:
                error.add_note(f"and then: {type(failure).__name__}: {failure}")
