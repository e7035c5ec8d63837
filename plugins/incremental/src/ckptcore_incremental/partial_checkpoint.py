"""`ckptcore.partial`: fill a checkpoint in several sessions, and commit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from ckptcore.commit.location import LocationLike, expect_directory_name
from ckptcore.context import Context, default_context
from ckptcore.io.background import SaveHandle
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import OneTree, SaveDestination, SaveRequest
from ckptcore.saving.save import begin_save, perform_save
from ckptcore_incremental.finalizing import finalize_sessions
from ckptcore_incremental.sessions import PartialSession

__all__ = ["PartialCheckpoint", "partial"]


def partial(
    location: LocationLike, *, layout: str | Layout | None = None, context: Context | None = None
) -> PartialCheckpoint:
    """Return a checkpoint that several sessions fill one after another, until `finalize` commits it. Does no I/O.

    ::

        with ckptcore.partial(path) as session:
            session.save({"encoder": encoder})
            session.save({"head": head})
            session.finalize()

    Sessions and `finalize` can run in different processes and programs. Each calls `partial` with
    the same path.

    Args:
        location: path or URL, the same in every session.
        layout: see `save`. Every session and `finalize` must use the same layout with the same
            options. None means ``"safetensors"`` for sessions, and for `finalize` the layout of the
            sessions with default options.
        context: options.
    """
    return PartialCheckpoint(location, layout, context or default_context())


class PartialCheckpoint:
    """A checkpoint that several sessions fill one after another. See `partial`.

    The checkpoint does not exist before `finalize`: a load raises an error that lists the sessions.
    A failed session is discarded, and earlier sessions stay. Neither `ckptcore.save` nor the
    retention of a `Checkpointer` replaces or deletes a partial save; `ckptcore.delete` deletes it.

    A ``with`` block waits at its end for the asynchronous sessions it started. It does not
    finalize.
    """

    def __init__(self, location: LocationLike, layout: str | Layout | None, context: Context) -> None:
        """See `partial`."""
        expect_directory_name(location)
        self._location = location
        self._layout = layout
        self._context = context
        self._handles: list[SaveHandle] = []

    def save(self, state: object) -> None:
        """Save a part of the tree as one session. Return once the session is complete and durable.

        In a job every process must call this. Mappings of all sessions are merged by key. Any other
        container must have the same keys in every session that saves it. A value that is not an
        array must be equal in all of them. Sessions may save different boxes of one sharded array
        (`ShardedArray`, arrays of a job).

        Args:
            state: the part of the tree.

        Raises:
            TreeMismatchError: if an earlier session saved one of the arrays, or if the tree does
                not fit the trees of earlier sessions. Nothing was written.
            CheckpointExistsError: if the location has something other than a partial save.
            SaveLostError: if another session is running at the location, or took over from this
                one.
            CheckpointError: if the layout differs from that of earlier sessions, or does not
                support sessions.
            The errors of `ckptcore.save`.
        """
        perform_save(self._request(state), self._context)

    def save_async(self, state: object) -> SaveHandle:
        """Begin a session, and return once the state is copied, as `ckptcore.save_async` does.

        Arguments and errors: see `save`.
        """
        handle = begin_save(self._request(state), self._context)
        self._handles.append(handle)
        return handle

    def finalize(self, *, metadata: Mapping[str, JSON] | None = None) -> None:
        """Commit all sessions as one checkpoint, as if one save had written it. Does not rewrite array data.

        In a job every process must call this. If it fails, the sessions stay: save more sessions,
        or call it again.

        Args:
            metadata: user metadata of the checkpoint, as JSON.

        Raises:
            CheckpointNotFoundError: if there is no partial save, or it has no complete session.
            TreeMismatchError: if elements of arrays are missing. Names the arrays.
            CheckpointError: if the layout or its options differ from those of the sessions, or the
                layout cannot store the tree.
            SaveLostError: if a session is running or began during the call.
            CorruptCheckpointError: if the tables of the sessions are damaged.
        """
        finalize_sessions(self._location, self._layout, metadata, self._context, self._wait)

    def _request(self, state: object) -> SaveRequest:
        # Planning reads the tables of earlier sessions, so wait until the previous session is
        # complete.
        runtime_of(self._context).saves.wait()
        return SaveRequest(
            destination=SaveDestination(self._location),
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
        """Wait for asynchronous sessions.

        Raise the first error that was not retrieved yet. If the block itself raised an error, add
        such errors to it as notes instead.
        """
        if error is None:
            self._wait()
            return
        for handle in self._handles:
            if handle.matters and (failure := handle.exception()) is not None:
                error.add_note(f"and then: {type(failure).__name__}: {failure}")
