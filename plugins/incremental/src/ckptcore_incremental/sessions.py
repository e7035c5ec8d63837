"""`PartialSession`: the save strategy of one session of a partial save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptcore.commit.location import Location
from ckptcore.commit.method import find_partial
from ckptcore.commit.root import PartialSave
from ckptcore.errors import CheckpointError, CommitUnknownError, UnsupportedLeafError
from ckptcore.events import logger_named
from ckptcore.job.visibility import seen_by_all
from ckptcore.model.arrays import Box
from ckptcore.model.transfer import WritePlan
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout, SaveCommit, StorageBackend
from ckptcore.saving.descriptions import TreeDescription
from ckptcore.saving.requests import Save, SaveDraft, failing_before_claim, save_created
from ckptcore.saving.writing import PlainSave
from ckptcore_incremental.session_claims import (
    OpenSession,
    PlannedSession,
    begin_session,
    expect_no_checkpoint,
    read_unchanged,
    session_store,
    store_of_session,
)
from ckptcore_incremental.session_tables import (
    describe_session,
    encode_session,
    expect_unwritten,
    read_sessions,
    session_key,
    written_boxes,
)

logger = logger_named("ckptcore.saving")


@dataclass(frozen=True, slots=True)
class PartialSession(PlainSave):
    """Write one session of a partial save. See `ckptcore.protocols.SaveStrategy`.

    Attributes:
        planned: the planned session; None before `prepare`.
    """

    merges_keys: ClassVar[bool] = True
    checks_target: ClassVar[bool] = True

    planned: PlannedSession | None = None

    def prepare(self, draft: SaveDraft) -> Save:
        """Read the earlier sessions, and plan this session.

        Raises:
            CheckpointExistsError: if the location has something other than a partial save.
            TreeMismatchError, NameCollisionError: if the session does not fit the earlier sessions.
            CheckpointError: if the layout does not support sessions, or differs from the layout of
                earlier sessions.
        """
        plan = _plan_session(draft)
        partial = plan.planned.partial
        draft.save.recording.save_id = partial.save_id
        info = draft.save.info._replace(save_id=partial.save_id, created=partial.created)
        draft = draft._replace(save=draft.save._replace(info=info))
        with failing_before_claim(draft.save.agreement):
            save = draft.plan(PartialSession(plan.planned))
            for part in save.parts:
                part.plan = plan.with_session_rank(part.plan)
        return save

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the session.

        Raises:
            UnsupportedLeafError: if the state has arrays on workers of a single controller.
        """
        if save.agreement.size == 1 and save.has_other_writers:
            raise UnsupportedLeafError(
                "arrays on workers of a single controller cannot be saved in sessions; save them with ckptcore.save. "
                "Nothing was written"
            )
        assert self.planned is not None  # set by `prepare`
        return _SessionCommit(save, self.planned)


class _SessionCommit:
    """Commit of a session: adds it to the session table, and leaves the partial save open.

    See `ckptcore.protocols.SaveCommit`.
    """

    meaning = "the session is not part of the partial save"
    commit_meaning = ""

    def __init__(self, save: Save, planned: PlannedSession) -> None:
        self._save = save
        self._location = save.target.location
        self._planned = planned
        self._claim: OpenSession | None = None

    def claim(self) -> None:
        """Claim the location on the leader. The other ranks check that they can see the claim."""
        agreement = self._save.agreement
        with seen_by_all(agreement, "claimed", self._location.absolute, self._sees_claim):
            if agreement.rank == 0:
                with self._save.recording.phase("claim"):
                    self._claim = begin_session(self._location, self._planned)
                    self._claim.transaction.expect_distinct(self._keys)

    def _keys(self) -> Iterator[str]:
        """Yield the keys of the other sessions, and the keys of this session that contain names of arrays."""
        yield from session_store(self._location).list()
        for part in self._save.parts:
            yield from part.layout.names_in_keys(part.plan)

    def _sees_claim(self) -> bool:
        table, partial = find_partial(self._location), self._planned.partial
        return table is not None and (table.save_id, table.token) == (partial.save_id, partial.token)

    @property
    def store(self) -> StorageBackend:
        """The storage of the claim."""
        if self._claim is not None:
            return self._claim.transaction.store
        return store_of_session(self._location, self._planned.partial)

    def commit(self, payloads: Sequence[object]) -> None:
        """Write the table of the session, and add the session to the session table."""
        if self._claim is None:
            return
        if self._save.agreement.size > 1:
            self._save.take_receipts(payloads)
        partial = self._planned.partial
        with self._save.recording.phase("commit"):
            (part,) = self._save.parts
            data = encode_session(part.plan.tree, part.receipts)
            if self._save.target.before_commit is not None:
                self._save.target.before_commit()
            self._claim.transaction.store.put(session_key(partial.save_id, part.receipts[0].rank), data)
            self._claim.complete(describe_session(partial, data, part.receipts, save_created()))

    def settle(self, error: Exception | None) -> None:
        """Handle a failed exchange after the commit: log a warning on the leader.

        The other ranks read the session table to check that the session is complete.
        """
        if error is None:
            return
        if self._claim is None:
            self._expect_complete(error)
            return
        logger.warning(
            "a session of %s is complete, but some ranks may not have been notified: %s: %s",
            self._location.display, type(error).__name__, error,
        )  # fmt: skip

    def _expect_complete(self, error: Exception) -> None:
        """Check in the storage that the session is complete, because the last exchange failed.

        Raises:
            CommitUnknownError: if the session is not complete, or the session table cannot be read.
        """
        location, partial, rank = self._location, self._planned.partial, self._save.agreement.rank
        try:
            table = find_partial(location)
        except CheckpointError as unreadable:
            raise CommitUnknownError(
                f"{location.display}: unknown whether this session is complete: {error}; the session table cannot be "
                f"read: {unreadable}"
            ) from error
        first = partial.owner
        if table is None or table.save_id != partial.save_id or all(each.first != first for each in table.sessions):
            raise CommitUnknownError(
                f"{location.display}: this session is not complete, or not yet: {error}; check the sessions again "
                f"before saving (rank {rank})"
            ) from error

    def abort(self) -> None:
        """Remove the objects of the session. Earlier sessions stay."""
        if self._claim is not None:
            self._claim.abort()


@dataclass(frozen=True, slots=True)
class _SessionPlan:
    """Plan of a session that follows the earlier sessions of a partial save.

    Attributes:
        planned: the planned session.
        written: for each leaf of the session's tree, the boxes that earlier sessions wrote.
    """

    planned: PlannedSession
    written: Mapping[int, Sequence[Box]]

    def with_session_rank(self, plan: WritePlan) -> WritePlan:
        """Return the plan of a process with its rank among the processes of all sessions.

        Raises:
            TreeMismatchError: if an earlier session wrote some of the elements.
        """
        expect_unwritten(plan.tree, plan.items, self.written)
        first = self.planned.partial.owner
        assert first is not None
        return plan._replace(rank=first + plan.rank, session=first)


def _plan_session(draft: SaveDraft) -> _SessionPlan:
    """Read the earlier sessions, and check that the new one fits. Every rank must call this. Writes nothing."""
    agreement, location = draft.save.agreement, draft.save.target.location
    save_id, created = draft.save.info.save_id, draft.save.info.created
    (description,) = draft.descriptions
    assert isinstance(description, TreeDescription)  # a partial save is one tree
    before: list[tuple[PartialSave | None, frozenset[str]]] = []

    def read_earlier_sessions() -> dict[str, Any]:
        layout = description.layout
        expect_session_support(layout)
        table = find_partial(location)
        kept: set[str] = set()
        written: Mapping[int, Sequence[Box]] = {}
        if table is None:
            expect_no_checkpoint(location)
            partial = PartialSave(save_id, created, layout.name, layout.session_options, 0, None)
        else:
            partial = table
            expect_no_checkpoint(location, table)
            expect_same_layout(location, table, layout)
            with read_unchanged(location, table):
                sessions = read_sessions(session_store(location), table)
            written = written_boxes(sessions, description.tree, layout)
            receipts = [receipt for session in sessions for receipt in session.receipts]
            kept = {record.key for receipt in receipts for record in receipt.objects}
            kept.update(session.key for session in table.sessions)
        before.append((table, frozenset(kept)))
        partial = partial.with_next_owner(agreement.size)
        return {
            "partial": [
                partial.save_id,
                partial.created,
                partial.layout,
                partial.agreed,
                partial.ranks,
                partial.owner,
                partial.token,
            ],
            "written": [[leaf, [[*box.start, *box.stop] for box in boxes]] for leaf, boxes in written.items()],
        }

    agreed = agreement.lead("session", read_earlier_sessions)
    partial = PartialSave(*agreed["partial"])
    written = {leaf: [_decode_box(bounds) for bounds in boxes] for leaf, boxes in agreed["written"]}
    if not before:
        return _SessionPlan(PlannedSession(None, partial, frozenset()), written)
    table, kept = before[0]
    partial = partial._replace(sessions=() if table is None else table.sessions)
    return _SessionPlan(PlannedSession(table, partial, kept), written)


def expect_session_support(layout: Layout) -> None:
    """Check that a layout supports sessions.

    Raises:
        CheckpointError: if it does not.
    """
    if not layout.capabilities.sessions:
        raise CheckpointError(
            f"the layout {layout.name} cannot be written in several sessions; use another layout, such as "
            "'safetensors', or save everything at once with ckptcore.save. Nothing was written"
        )


def expect_same_layout(location: Location, partial: PartialSave, layout: Layout) -> None:
    """Check that a layout and its options are the same as in the earlier sessions.

    Raises:
        CheckpointError: if they differ.
    """
    if (layout.name, layout.session_options) != (partial.layout, partial.agreed):
        stored, given = (
            f"{name} ({options})" if options else name
            for name, options in ((partial.layout, partial.agreed), (layout.name, layout.session_options))
        )
        raise CheckpointError(
            f"the sessions at {location.display} have the layout {stored}, but the given layout is {given}: pass the "
            "layout of the sessions, with the same options. Nothing was written"
        )


def _decode_box(bounds: Sequence[JSON]) -> Box:
    numbers: list[Any] = list(bounds)
    return Box(tuple(numbers[: len(numbers) // 2]), tuple(numbers[len(numbers) // 2 :]))
