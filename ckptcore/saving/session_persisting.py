"""Making a session of a partial save durable: claim its place, write, and let it count."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckptcore.commit.location import Location
from ckptcore.commit.root import PartialSave
from ckptcore.commit.session_tables import describe_session, encode_session, session_key
from ckptcore.commit.sessions import OpenSession, PlannedSession, begin_session, find_partial
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CommitUnknownError
from ckptcore.events import Recording
from ckptcore.io.background import SaveHandle
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import seen_by_all
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import Captured
from ckptcore.saving.persisting import Described, decode_written, encode_written, write_parts
from ckptcore.saving.preparing import save_created

__all__ = ["persist_session"]

_NOTHING = "the session does not count"

logger = logging.getLogger("ckptcore.persisting")


def persist_session(
    described: Described,
    planned: PlannedSession,
    captured: Sequence[Captured],
    context: Context,
    recording: Recording,
    handle: SaveHandle | None = None,
) -> None:
    """Claim the place, write, and let the session count. On every rank; returns once it does.

    Args:
        described: the session as a save.
        planned: the session.
        captured: what its tree holds.
        context: options.
        recording: is told the phases.
        handle: counts the bytes written.

    Raises:
        CheckpointError: why it does not count; earlier sessions still do.
        CommitUnknownError: if that cannot be told.
    """
    agreement, location, partial = described.agreement, described.location, planned.partial
    claim: OpenSession | None = None
    try:
        with (
            agreement.stage("claim", meaning=_NOTHING),
            seen_by_all(agreement, "claimed", location.absolute, lambda: _is_owned(location, partial)),
        ):
            if agreement.rank == 0:
                with recording.phase("claim"):
                    claim = begin_session(location, planned, runtime_of(context).conditions)
        if claim is not None:
            store = claim.store
        else:
            conditions = runtime_of(context).conditions
            store = location.commits.store_of(location, partial.save_id, conditions, owner=partial.owner)
        try:
            with agreement.stage("write", meaning=_NOTHING) as stage:
                with recording.phase("write") as phase:
                    ((receipt,),) = write_parts(described, captured, store, context, handle, None)
                    phase.nbytes = sum(record.size for record in receipt.objects)
                if agreement.size > 1:
                    stage.payload = encode_written(described, [receipt])
        except Exception as error:
            if agreement.rank == 0 or not stage.done or stage.failed:
                raise
            # The leader may have this rank's receipt and go on without it hearing of that.
            _look_whether_complete(agreement, location, partial, error)
            return
        try:
            with agreement.stage("commit") as end:
                if claim is not None:
                    with recording.phase("commit"):
                        receipts = (receipt,) if agreement.size == 1 else decode_written(described, stage.payloads)[0]
                        data = encode_session(described.parts[0].plan.tree, receipts)
                        if described.before_commit is not None:
                            described.before_commit()
                        store.put(session_key(partial.save_id, receipts[0].rank), data)
                        claim.complete(describe_session(partial, data, receipts, save_created()))
        except Exception as error:
            if not end.done or 0 in end.failed:
                raise
            if agreement.rank == 0:
                logger.warning(
                    "a session of %s is complete, but perhaps not all ranks know: %s: %s",
                    location.display, type(error).__name__, error,
                )  # fmt: skip
            else:
                _look_whether_complete(agreement, location, partial, error)
    except BaseException as error:
        try:
            if claim is not None:
                claim.abort()
        except CheckpointError as failure:
            # The error that stopped the session says more; what is left goes when the checkpoint is finalized.
            error.add_note(f"removing what was written failed too: {failure}")
        raise


def _is_owned(location: Location, partial: PartialSave) -> bool:
    """Whether this process sees that its leader claimed the place."""
    found = find_partial(location)
    return found is not None and (found.save_id, found.token) == (partial.save_id, partial.token)


def _look_whether_complete(agreement: Agreement, location: Location, partial: PartialSave, error: Exception) -> None:
    """The exchange at the end failed: only what stands in the place of the root tells whether the session counts."""
    try:
        found = find_partial(location)
    except CheckpointError as unreadable:
        raise CommitUnknownError(
            f"whether a session of {location.display} counts is not known: {error}, and what stands there cannot be read: {unreadable}"
        ) from error
    first = partial.owner
    if found is None or found.save_id != partial.save_id or all(one.first != first for one in found.sessions):
        raise CommitUnknownError(
            f"the session of {location.display} does not count, or not yet: {error}; look again before saving (rank {agreement.rank})"
        ) from error
