"""Saves between the call of a user and the commit: drafts, and saves that can be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

from ckptcore.commit.location import Location
from ckptcore.commit.occupants import Overwrite
from ckptcore.commit.root import Claimed, Member, Role
from ckptcore.context import Context
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import seen_by_all
from ckptcore.model.tree import JSON
from ckptcore.protocols import About, MemberKind, SaveStrategy
from ckptcore.saving.parts import PartDescription, SavePart

__all__ = [
    "NOTHING_COMMITTED",
    "CommitInfo",
    "Save",
    "SaveDraft",
    "Target",
    "fail_before_claim",
    "fail_everywhere",
]

NOTHING_COMMITTED: Final = "nothing was committed"
"""What it means if a stage before the commit fails on any rank."""


@dataclass(frozen=True, slots=True)
class Target:
    """The location that a save commits.

    Attributes:
        location: the location.
        overwrite: whether a checkpoint there is replaced.
        before_commit: called right before a process commits; an error of it stops the save.
    """

    location: Location
    overwrite: Overwrite = False
    before_commit: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """What the root of a checkpoint says besides its tree and its objects.

    Attributes:
        save_id: the save.
        created: when it began, ISO 8601 in UTC.
        custom, metrics, progress: metadata of the user.
        members: the checkpointables by name; None if the checkpoint is one tree.
        role: ``export`` for an export in the directory of its save. See `Root.role`.
    """

    save_id: str
    created: str
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, int] = field(default_factory=dict)
    members: Mapping[str, Member] | None = None
    role: Role = "checkpoint"

    @property
    def claimed(self) -> Claimed:
        """What a claim of the save says."""
        return Claimed(self.save_id, self.created)

    @property
    def about(self) -> About:
        """What layouts may write about the checkpoint."""
        members: dict[str, MemberKind] = {
            member.directory(name, rank): member.kind
            for name, member in (self.members or {}).items()
            for rank in range(member.processes or 1)
        }
        return About(self.created, self.custom, self.metrics, members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A checkpoint that can be written: every rank has the same trees, and their layouts can store them.

    Attributes:
        target: where it goes.
        info: what its root says.
        parts: what this process writes.
        strategy: claims and commits it.
        agreement: with the other processes of the job.
        recording: of its phases.
        context: options.
        further: saves of boxes that this save captures, which the strategy writes after its commit. Each has one part.
    """

    target: Target
    info: CommitInfo
    parts: Sequence[SavePart]
    strategy: SaveStrategy[SaveDraft, Save]
    agreement: Agreement
    recording: Recording
    context: Context
    further: Sequence[Save] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of arrays that this process and its workers write, further saves included."""
        own = sum(item.nbytes for part in self.parts for plan in part.plans for item in plan.items)
        return own + sum(save.nbytes for save in self.further)

    @property
    def uses_workers(self) -> bool:
        """True if workers of this controller write some of it."""
        return any(part.worker_plans for part in self.parts)

    @property
    def has_other_writers(self) -> bool:
        """True if other processes write some of it: those of the job, or workers of this controller."""
        return self.agreement.size > 1 or self.uses_workers

    def encode_receipts(self) -> bytes:
        """What this process says to the leader of a job: its receipt of each part. A job has no workers."""
        from ckptcore.commit.receipts import encode_receipts  # only a job needs it

        common = self._common_parts()
        return encode_receipts([part.plan.tree for part in common], [part.receipts[0] for part in common])

    def take_receipts(self, payloads: Sequence[object]) -> None:
        """On the leader of a job: give each part the receipts of all ranks, from what these said."""
        from ckptcore.commit.receipts import decode_receipts  # only a job needs it

        common = self._common_parts()
        trees = [part.plan.tree for part in common]
        by_rank = [decode_receipts(trees, data) for data in payloads if isinstance(data, bytes)]
        for number, part in enumerate(common):
            part.receipts = [of_rank[number] for of_rank in by_rank]

    def _common_parts(self) -> list[SavePart]:
        """The parts that all processes write together."""
        return [part for part in self.parts if not part.own]


@dataclass(frozen=True, slots=True)
class SaveDraft:
    """A save before its parts are planned. Every rank has equal trees.

    Attributes:
        save: the save without parts.
        descriptions: the checkpointables. They hold the state.
    """

    save: Save
    descriptions: Sequence[PartDescription]

    def plan(self, strategy: SaveStrategy[SaveDraft, Save]) -> Save:
        """Plan what this process writes of each checkpointable; return the save."""
        rank, size, info = self.save.agreement.rank, self.save.agreement.size, self.save.info
        parts = []
        for description in self.descriptions:
            member = description.member(size)
            directory = "" if info.members is None else member.directory(description.name, rank)
            plan, *of_workers = description.plans(rank, size, info.save_id)
            own = member.processes is not None
            parts.append(SavePart(directory, description.layout, plan, own, tuple(of_workers), description))
        return replace(self.save, parts=parts, strategy=strategy)


def fail_everywhere(agreement: Agreement, stage: str, error: BaseException) -> NoReturn:
    """Raise an error of this process, and fail the save on the other ranks at the end of a stage that they wait for."""
    with agreement.stage(stage):
        raise error
    raise error  # the stage has raised it


def fail_before_claim(agreement: Agreement, error: BaseException) -> NoReturn:
    """Raise an error of this process after the save was prepared; the other ranks get it in the stage of the claim."""
    with agreement.stage("claim"), seen_by_all(agreement, "claimed", "", bool):
        raise error
    raise error  # the stage has raised it
