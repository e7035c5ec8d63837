"""Rehearsals of whole jobs: of the one that this process is part of, and of one that does not run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ckptcore.commit.location import Place
from ckptcore.commit.occupants import Overwrite
from ckptcore.context import Context
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.protocols import AtomicDirectories, Layout
from ckptcore.saving.exports import Export
from ckptcore.saving.preparing import PreparedSave, prepare_save
from ckptcore.saving.save_requests import OneTree, SaveRequest
from ckptcore_tools.dry_run.commits import rehearse_commit
from ckptcore_tools.dry_run.imagined import ImaginedJob
from ckptcore_tools.dry_run.leaves import WrapLeaf, imagined_leaves, rehearsal_context, running_leaves
from ckptcore_tools.dry_run.plans import Certainty, ExportPlan, ObjectPlan, ProcessPlan, SavePlan
from ckptcore_tools.dry_run.telling import plan_from_json, written_from_json, written_to_json
from ckptcore_tools.dry_run.writes import Leading, StorageKind, WrittenCheckpoint, WrittenProcess, rehearse_writes

__all__ = ["Asked", "plan_imagined_job", "plan_running_job"]

_NOWHERE: Final = "memory://ckptcore-rehearsal"
"""Where a rehearsal without a location is: in memory of this process, where nothing ever is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A save that is to be planned.

    Attributes:
        location: where it would go; None: nothing is looked at.
        layout, overwrite, exports: as of the save.
    """

    location: Place | None
    layout: str | Layout
    overwrite: Overwrite
    exports: Sequence[Export]

    def request(self, state: object) -> SaveRequest:
        """The save of a state. Without a location its exports have none either."""
        exports = self.exports
        if self.location is None:
            exports = [
                replace(export, location=f"{_NOWHERE}/export-{number}") if isinstance(export, Export) else export
                for number, export in enumerate(exports)
            ]
        return SaveRequest(
            location=f"{_NOWHERE}/checkpoint" if self.location is None else self.location,
            values=OneTree(state),
            layout=self.layout,
            overwrite=self.overwrite,
            custom=None,
            exports=exports,
        )


@dataclass(frozen=True, slots=True)
class _Played:
    save: PreparedSave
    kind: StorageKind
    written: WrittenProcess
    leading: Sequence[Leading]


def plan_running_job(asked: Asked, state: object, context: Context) -> SavePlan:
    """Plan a save of the job that this process is part of; every process calls this, and each gets the plan of all."""
    agreement = Agreement(context.job(), context.exchange_key("the plan of a save"))
    played = _play(asked, state, context, running_leaves(), agreement)
    with agreement.stage("plan") as stage:
        if agreement.size > 1:
            stage.payload = written_to_json(played.written)
    payloads: Sequence[Any] = stage.payloads
    plans: list[SavePlan] = []

    def lead() -> JSON:
        written = [played.written]
        if agreement.size > 1:
            trees = [[part.plan.tree for part in one.described.parts if not part.own] for one in played.leading]
            written = [written_from_json(payload, trees) for payload in payloads]
        plans.append(_plan(asked, played, written, context))
        return asdict(plans[0]) if agreement.size > 1 else None

    told = agreement.lead("planned", lead)
    return plans[0] if plans else plan_from_json(told)


def plan_imagined_job(asked: Asked, state_of: Callable[[int], object], processes: int, context: Context) -> SavePlan:
    """Plan a save of a job that does not run: each process is played in this one."""
    first: list[_Played] = []

    def process(agreement: Agreement) -> WrittenProcess:
        played = _play(asked, state_of(agreement.rank), context, imagined_leaves(agreement.rank), agreement)
        if agreement.rank == 0:
            first[:] = [played]
        return played.written

    written = ImaginedJob(processes).play(process)
    return _plan(asked, first[0], written, context)


def _play(asked: Asked, state: object, context: Context, wrap_leaf: WrapLeaf, agreement: Agreement) -> _Played:
    request = asked.request(state)
    recording = Recording("save", str(request.location), rank=agreement.rank)
    save = prepare_save(request, rehearsal_context(context, wrap_leaf), recording, agreement)
    real = asked.location is not None and isinstance(save.described.location.parent, AtomicDirectories)
    kind: StorageKind = "directories" if real else "objects"
    return _Played(save, kind, *rehearse_writes(save, kind, context))


def _plan(asked: Asked, leader: _Played, written: Sequence[WrittenProcess], context: Context) -> SavePlan:
    """Let the leader commit what all processes wrote, and say what that came to."""
    checkpoints = [
        _processes(leading, [process.checkpoints[number] for process in written], context)
        for number, leading in enumerate(leader.leading)
    ]
    described = leader.save.described
    trees = [part.plan.tree for part in described.parts]
    arrays = [_arrays(tree) for tree in trees]
    return SavePlan(
        layout=described.parts[0].layout.name,
        storage=leader.kind,
        arrays=sum(arrays),
        values=sum([sum(not isinstance(record, ArrayRecord) for record in tree.leaves) for tree in trees]),
        array_bytes=sum([tree.nbytes for tree in trees]),
        processes=checkpoints[0],
        memory=tuple([process.memory for process in written]),
        exports=tuple(
            [
                ExportPlan(
                    location=str(export.location), layout=prepared.described.parts[0].layout.name, processes=processes
                )
                for export, prepared, processes in zip(asked.exports, leader.save.exports, checkpoints[1:], strict=True)
            ]
        ),
        untold=tuple(dict.fromkeys([name for process in written for name in process.untold])),
    )


def _arrays(tree: TreeMetadata) -> int:
    return sum(isinstance(record, ArrayRecord) and leaf not in tree.aliases for leaf, record in enumerate(tree.leaves))


def _processes(leading: Leading, written: Sequence[WrittenCheckpoint], context: Context) -> tuple[ProcessPlan, ...]:
    """What each process writes of a checkpoint; the leader also what makes it whole."""
    before = written[0].sizes.keys() - written[0].about
    rehearse_commit(leading.described, leading.claim, [one.receipts for one in written], context)
    sizes = {key.partition("/")[2]: size for key, size in leading.storage.sizes.items()}
    processes = []
    for rank, one in enumerate(written):
        of_rank = one.sizes if rank else sizes
        about = one.about if rank else sizes.keys() - before
        processes.append(
            ProcessPlan(
                rank=rank,
                array_bytes=one.array_bytes,
                boxes=one.boxes,
                objects=tuple(
                    [
                        ObjectPlan(key, size, _certainty(key, one.at_most, about))
                        for key, size in sorted(of_rank.items())
                    ]
                ),
                requests=leading.storage.requests if rank == 0 else one.requests,
            )
        )
    return tuple(processes)


def _certainty(key: str, at_most: Collection[str], about: Collection[str]) -> Certainty:
    return "about" if key in about else "at most" if key in at_most else "exact"
