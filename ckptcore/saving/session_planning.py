"""Planning a session of a partial save: what is there, whether this one fits it, and which ranks it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.commit.location import Location
from ckptcore.commit.root import PartialSave
from ckptcore.commit.session_tables import boxes_taken, read_sessions, refuse_boxes
from ckptcore.commit.sessions import (
    PlannedSession,
    expect_no_checkpoint,
    find_partial,
    read_unchanged,
)
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from ckptcore.job.agreement import Agreement
from ckptcore.model.arrays import Box
from ckptcore.model.transfer import WritePlan
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout, WritesSessions
from ckptcore.saving.parts import PartDescription
from ckptcore.saving.tree_descriptions import TreeDescription

__all__ = ["SessionPlace", "expect_same_layout", "layout_of_sessions", "plan_session"]


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """The place of a session among those of a partial save.

    Attributes:
        planned: the session.
        taken: by leaf of the session's tree, the boxes of arrays that earlier sessions wrote in part.
    """

    planned: PlannedSession
    taken: Mapping[int, Sequence[Box]]

    def placed(self, plan: WritePlan) -> WritePlan:
        """What a process writes, with the rank that it has among those of all sessions.

        Raises:
            TreeMismatchError: an earlier session wrote some of it.
        """
        refuse_boxes(plan.tree, plan.items, self.taken)
        first = self.planned.partial.owner
        assert first is not None
        return replace(plan, rank=first + plan.rank, session=first)


def plan_session(
    agreement: Agreement, location: Location, descriptions: Sequence[PartDescription], save_id: str, created: str
) -> SessionPlace:
    """Look at what sessions there are, and refuse a further one that does not fit them. On every rank; writes nothing.

    Args:
        agreement: with the other processes.
        location: where.
        descriptions: of the one tree, united over the processes.
        save_id, created: of the partial save, if this is the first session.

    Raises:
        CheckpointExistsError: something stands there that is no partial save.
        TreeMismatchError, NameCollisionError: the session does not fit those before it.
        UnsupportedLeafError: arrays are at workers of this controller.
        CheckpointError: the layout cannot be written in sessions, or is another one than that of the sessions before.
    """
    (description,) = descriptions
    assert isinstance(description, TreeDescription)  # a partial save is one tree
    before: list[tuple[PartialSave | None, frozenset[str]]] = []

    def look() -> dict[str, Any]:
        layout = layout_of_sessions(description.layout)
        if description.at_workers:
            raise UnsupportedLeafError(
                "arrays that the workers of a controller hold cannot be saved in sessions: expected arrays of this process; save them "
                "with ckptcore.save. Nothing was written"
            )
        found = find_partial(location)
        kept: set[str] = set()
        taken: Mapping[int, Sequence[Box]] = {}
        if found is None:
            expect_no_checkpoint(location)
            partial = PartialSave(save_id, created, description.layout.name, layout.agreed, 0, None)
        else:
            partial = found
            expect_no_checkpoint(location, found)
            expect_same_layout(location, found, description.layout, layout)
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

    told = agreement.lead("session", look)
    partial = PartialSave(*told["partial"])
    taken = {leaf: [_box(bounds) for bounds in boxes] for leaf, boxes in told["taken"]}
    if not before:
        return SessionPlace(PlannedSession(None, partial, frozenset()), taken)
    found, kept = before[0]
    partial = replace(partial, sessions=() if found is None else found.sessions)
    return SessionPlace(PlannedSession(found, partial, kept), taken)


def layout_of_sessions(layout: Layout) -> WritesSessions:
    """A layout as one that is written in sessions.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(layout, WritesSessions):
        raise CheckpointError(
            f"the layout {layout.name} cannot be written in several sessions; save with another layout, such as 'safetensors', or "
            "everything at once with ckptcore.save. Nothing was written"
        )
    return layout


def expect_same_layout(location: Location, partial: PartialSave, layout: Layout, sessions: WritesSessions) -> None:
    """Make sure that a layout is that of the sessions there are.

    Raises:
        CheckpointError
    """
    if (layout.name, sessions.agreed) != (partial.layout, partial.agreed):
        raise CheckpointError(
            f"the sessions at {location.display} have the layout {_told(partial.layout, partial.agreed)}, and this is "
            f"{_told(layout.name, sessions.agreed)}: give the layout that they have, with its options. Nothing was written"
        )


def _told(name: str, agreed: str) -> str:
    return f"{name} ({agreed})" if agreed else name


def _box(bounds: Sequence[JSON]) -> Box:
    numbers: list[Any] = list(bounds)
    return Box(tuple(numbers[: len(numbers) // 2]), tuple(numbers[len(numbers) // 2 :]))
