"""PartialSession: the save strategy of one session of a partial save."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ckptcore.commit.location import Location
from ckptcore.commit.method import (
    PlannedSession,
    expect_no_checkpoint,
    find_partial,
    read_unchanged,
)
from ckptcore.commit.root import PartialSave, Session
from ckptcore.commit.root_json import encode_partial
from ckptcore.errors import CheckpointError, CommitUnknownError, UnsupportedLeafError
from ckptcore.job.visibility import seen_by_all
from ckptcore.model.arrays import Box
from ckptcore.model.transfer import WritePlan
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout, SaveCommit, StorageBackend, Transaction
from ckptcore.runtime import runtime_of
from ckptcore.saving.preparing import save_created
from ckptcore.saving.requests import Save, SaveDraft, fail_before_claim
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore_incremental.session_tables import (
    boxes_taken,
    describe_session,
    encode_session,
    read_sessions,
    refuse_boxes,
    session_key,
)

__all__ = ["PartialSession", "expect_same_layout", "expect_sessions"]

logger = logging.getLogger("ckptcore.saving")


@dataclass(frozen=True, slots=True)
class PartialSession:
    """Write a session of a partial save. See `ckptcore.protocols.SaveStrategy`.

    Attributes:
        planned: the session; None before `prepare`.
    """

    takes_placeholders: ClassVar[bool] = False
    checks_target: ClassVar[bool] = True

    planned: PlannedSession | None = None

    def prepare(self, draft: SaveDraft) -> Save:
        """Find the sessions before this one, and plan what it adds.

        Raises:
            CheckpointExistsError: something is at the location that is no partial save.
            TreeMismatchError, NameCollisionError: the session does not fit those before it.
            UnsupportedLeafError: arrays are at workers of this controller.
            CheckpointError: the layout cannot be written in sessions, or differs from that of the sessions before.
        """
        place = _plan_session(draft)
        partial = place.planned.partial
        draft.save.recording.save_id = partial.save_id
        info = replace(draft.save.info, save_id=partial.save_id, created=partial.created)
        draft = replace(draft, save=replace(draft.save, info=info))
        try:
            save = draft.plan(PartialSession(place.planned))
            for part in save.parts:
                part.plan = place.placed(part.plan)
        except BaseException as error:  # noqa: BLE001  # sent to the other ranks, then raised
            fail_before_claim(draft.save.agreement, error)
        return save

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of a session."""
        assert self.planned is not None  # `prepare` returned this strategy
        return _SessionCommit(save, self.planned)


class _SessionCommit:
    """The commit of a session: the session counts, and the partial save stays open. See `ckptcore.protocols.SaveCommit`."""

    meaning = "the session does not count"
    commit_meaning = ""

    def __init__(self, save: Save, planned: PlannedSession) -> None:
        """Claim nothing yet."""
        self._save = save
        self._location = save.target.location
        self._planned = planned
        self._conditions = runtime_of(save.context).conditions
        self._claim: _OpenSession | None = None

    def claim(self) -> None:
        """Claim the location on the leader; see the claim on the other ranks."""
        agreement = self._save.agreement
        with seen_by_all(agreement, "claimed", self._location.absolute, self._sees_claim):
            if agreement.rank == 0:
                with self._save.recording.phase("claim"):
                    transaction = self._location.commits.begin_session(self._location, self._planned, self._conditions)
                    self._claim = _OpenSession(self._location, self._planned, transaction)

    def _sees_claim(self) -> bool:
        found, partial = find_partial(self._location), self._planned.partial
        return found is not None and (found.save_id, found.token) == (partial.save_id, partial.token)

    @property
    def store(self) -> StorageBackend:
        """The storage of the claim."""
        if self._claim is not None:
            return self._claim.store
        partial = self._planned.partial
        return self._location.commits.store_of(self._location, partial.save_id, self._conditions, owner=partial.owner)

    def commit(self, payloads: Sequence[object]) -> None:
        """Put the table of the session, and let it count."""
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
            self._claim.store.put(session_key(partial.save_id, part.receipts[0].rank), data)
            self._claim.complete(describe_session(partial, data, part.receipts, save_created()))

    def settle(self, error: Exception | None) -> None:
        """Warn on the leader, whose session counts; look for the session on the other ranks."""
        if error is None:
            return
        if self._claim is None:
            self._expect_complete(error)
            return
        logger.warning(
            "a session of %s is complete, but perhaps not all ranks know: %s: %s",
            self._location.display, type(error).__name__, error,
        )  # fmt: skip

    def _expect_complete(self, error: Exception) -> None:
        """Make sure that the session counts although an exchange failed at its end: only the storage says so."""
        location, partial, rank = self._location, self._planned.partial, self._save.agreement.rank
        try:
            found = find_partial(location)
        except CheckpointError as unreadable:
            raise CommitUnknownError(
                f"whether a session of {location.display} counts is not known: {error}, and the list of its sessions "
                f"cannot be read: {unreadable}"
            ) from error
        first = partial.owner
        if found is None or found.save_id != partial.save_id or all(one.first != first for one in found.sessions):
            raise CommitUnknownError(
                f"the session of {location.display} does not count, or not yet: {error}; look again before saving "
                f"(rank {rank})"
            ) from error

    def abort(self) -> None:
        """Remove what the session wrote; earlier sessions still count."""
        if self._claim is not None:
            self._claim.abort()


@dataclass(frozen=True, slots=True)
class _OpenSession:
    """A session that may write. It ends with `complete` or `abort`.

    Attributes:
        location: the location of the partial save.
        planned: the session.
        transaction: the resumed transaction.
    """

    location: Location
    planned: PlannedSession
    transaction: Transaction

    @property
    def store(self) -> StorageBackend:
        """The storage to write objects to."""
        return self.transaction.store

    def complete(self, session: Session) -> None:
        """Add the session to the table; durable if the storage was opened durable.

        Raises:
            CheckpointExistsError: a save that began before the first session has committed.
            SaveLostError: another session, or a deletion, took over. The session does not count.
            CommitUnknownError: the session may count.
        """
        expect_no_checkpoint(self.location, self.planned.partial)
        self.transaction.replace(encode_partial(self.planned.partial.complete(session)))
        self.transaction.leave()

    def abort(self) -> None:
        """Remove the objects of the session; the whole partial save if no other session is complete."""
        partial = self.planned.partial
        if partial.sessions:
            self.transaction.restore(encode_partial(partial._replace(owner=None)), self.planned.kept)
        else:
            self.transaction.abort()


@dataclass(frozen=True, slots=True)
class _SessionPlace:
    """The place of a session among those of a partial save.

    Attributes:
        planned: the session.
        taken: by leaf of the session's tree, the boxes of arrays that earlier sessions wrote in part.
    """

    planned: PlannedSession
    taken: Mapping[int, Sequence[Box]]

    def placed(self, plan: WritePlan) -> WritePlan:
        """Return the plan of a process, with its rank among the processes of all sessions.

        Raises:
            TreeMismatchError: an earlier session wrote some of its elements.
        """
        refuse_boxes(plan.tree, plan.items, self.taken)
        first = self.planned.partial.owner
        assert first is not None
        return plan._replace(rank=first + plan.rank, session=first)


def _plan_session(draft: SaveDraft) -> _SessionPlace:
    """Read the earlier sessions, and refuse a session that does not fit them. Every rank calls this; it writes nothing."""
    agreement, location = draft.save.agreement, draft.save.target.location
    save_id, created = draft.save.info.save_id, draft.save.info.created
    (description,) = draft.descriptions
    assert isinstance(description, TreeDescription)  # a partial save is one tree
    before: list[tuple[PartialSave | None, frozenset[str]]] = []

    def look() -> dict[str, Any]:
        layout = description.layout
        expect_sessions(layout)
        if description.held.at_workers:
            raise UnsupportedLeafError(
                "arrays that the workers of a controller hold cannot be saved in sessions: expected arrays of this "
                "process; save them with ckptcore.save. Nothing was written"
            )
        found = find_partial(location)
        kept: set[str] = set()
        taken: Mapping[int, Sequence[Box]] = {}
        if found is None:
            expect_no_checkpoint(location)
            partial = PartialSave(save_id, created, layout.name, layout.session_options, 0, None)
        else:
            partial = found
            expect_no_checkpoint(location, found)
            expect_same_layout(location, found, layout)
            with read_unchanged(location, found):
                sessions = read_sessions(location.commits.session_store(location), found)
            taken = boxes_taken(sessions, description.tree, layout)
            receipts = [receipt for session in sessions for receipt in session.receipts]
            kept = {record.key for receipt in receipts for record in receipt.objects}
            kept.update(session.key for session in found.sessions)
        before.append((found, frozenset(kept)))
        partial = partial.own_by_next(agreement.size)
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
            "taken": [[leaf, [[*box.start, *box.stop] for box in boxes]] for leaf, boxes in taken.items()],
        }

    agreed = agreement.lead("session", look)
    partial = PartialSave(*agreed["partial"])
    taken = {leaf: [_box(bounds) for bounds in boxes] for leaf, boxes in agreed["taken"]}
    if not before:
        return _SessionPlace(PlannedSession(None, partial, frozenset()), taken)
    found, kept = before[0]
    partial = partial._replace(sessions=() if found is None else found.sessions)
    return _SessionPlace(PlannedSession(found, partial, kept), taken)


def expect_sessions(layout: Layout) -> None:
    """Refuse a layout that cannot be written in sessions.

    Raises:
        CheckpointError
    """
    if not layout.capabilities.sessions:
        raise CheckpointError(
            f"the layout {layout.name} cannot be written in several sessions; save with another layout, such as "
            "'safetensors', or everything at once with ckptcore.save. Nothing was written"
        )


def expect_same_layout(location: Location, partial: PartialSave, layout: Layout) -> None:
    """Make sure that a layout is that of the earlier sessions.

    Raises:
        CheckpointError
    """
    if (layout.name, layout.session_options) != (partial.layout, partial.agreed):
        raise CheckpointError(
            f"the sessions at {location.display} have the layout {_named(partial.layout, partial.agreed)}, and this "
            f"is {_named(layout.name, layout.session_options)}: give the layout that they have, with its options. "
            "Nothing was written"
        )


def _named(name: str, agreed: str) -> str:
    return f"{name} ({agreed})" if agreed else name


def _box(bounds: Sequence[JSON]) -> Box:
    numbers: list[Any] = list(bounds)
    return Box(tuple(numbers[: len(numbers) // 2]), tuple(numbers[len(numbers) // 2 :]))
