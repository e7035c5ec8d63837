"""Dry runs of whole jobs: of the job that this process is part of, and of one that is not running."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NoReturn, TypeVar

from ckptcore.commit.location import Place
from ckptcore.commit.target import Overwrite
from ckptcore.context import Context
from ckptcore.errors import PluginError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement, Stage
from ckptcore.model.arrays import Box
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.objects import CHECKSUM_BYTES, ObjectRecord
from ckptcore.model.transfer import Receipt, WriteItem
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.preparing import prepare_save
from ckptcore.saving.requests import Destination, OneTree, Save, SaveRequest
from ckptcore_tools.dry_run.leaves import WrapLeaf, dry_run_context, running_leaves, simulated_leaves
from ckptcore_tools.dry_run.plans import (
    Certainty,
    ExportPlan,
    MemoryPlan,
    ObjectPlan,
    ProcessPlan,
    RequestCounts,
    SavePlan,
)
from ckptcore_tools.dry_run.writes import (
    Leading,
    StorageKind,
    WrittenCheckpoint,
    WrittenProcess,
    run_commit,
    run_writes,
)
from ckptcore_tools.exports import Export, WithExports

__all__ = [
    "Asked",
    "NotToldYetError",
    "SimulatedAgreement",
    "SimulatedJob",
    "plan_from_json",
    "plan_running_job",
    "plan_simulated_job",
    "written_from_json",
    "written_to_json",
]

T = TypeVar("T", bound=JSON)
R = TypeVar("R")


class NotToldYetError(Exception):
    """A process would decide for all, and some have not said yet what it decides by. To be asked again when they have."""


class SimulatedJob:
    """A job whose processes are played one after the other.

    Each is played up to where it would need what the others say, until all have said it. Most jobs need one round:
    every process has the same tree.
    """

    def __init__(self, size: int) -> None:
        """A job of so many processes."""
        self.size = size
        self._told: dict[str, dict[int, JSON]] = {}
        self._decided: dict[str, JSON] = {}

    def play(self, process: Callable[[Agreement], R]) -> list[R]:
        """What each process comes to, in order of rank."""
        while True:
            results = []
            waiting = False
            for rank in range(self.size):
                try:
                    results.append(process(SimulatedAgreement(self, rank)))
                except NotToldYetError:
                    waiting = True
            if not waiting:
                return results

    def tell(self, name: str, rank: int, payload: JSON) -> Sequence[JSON]:
        """What all ranks said in a stage, if they all did; else nothing."""
        told = self._told.setdefault(name, {})
        told[rank] = json.loads(json.dumps(payload))  # as it would arrive
        return [told[other] for other in range(self.size)] if len(told) == self.size else []

    def decide(self, name: str, rank: int, decide: Callable[[], T]) -> Any:
        """The decision of the leader."""
        if name not in self._decided:
            if rank or any(len(told) < self.size for told in self._told.values()):
                raise NotToldYetError(name)
            self._decided[name] = json.loads(json.dumps(decide()))
        return self._decided[name]


class SimulatedAgreement(Agreement):
    """The exchanges of one process of a simulated job."""

    def __init__(self, job: SimulatedJob, rank: int) -> None:
        super().__init__(_Member(rank, job.size), "simulated")
        self._job = job

    def part(self, name: str) -> Agreement:
        return self

    def recorded(self, recording: Recording) -> Agreement:
        return self

    @contextmanager
    def stage(self, name: str, *, meaning: str = "") -> Iterator[Stage]:
        stage = Stage()
        yield stage
        stage.done = True
        stage.payloads = self._job.tell(name, self.rank, stage.payload)

    def lead(self, name: str, decide: Callable[[], T]) -> T:
        decision: T = self._job.decide(name, self.rank, decide)
        return decision


class _Member:
    """A `Coordinator` that knows its place and reaches nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        _refuse(key)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        _refuse(key)


def _refuse(key: str) -> NoReturn:
    raise PluginError(f"the exchange {key!r} was begun in a simulated job: this is a bug of ckptcore")


def written_to_json(written: WrittenProcess) -> JSON:
    """What a process tells the leader."""
    return {
        "checkpoints": [_checkpoint_to_json(one) for one in written.checkpoints],
        "memory": asdict(written.memory),
        "untold": list(written.untold),
    }


def _checkpoint_to_json(written: WrittenCheckpoint) -> JSON:
    return {
        "receipts": [
            {
                "rank": receipt.rank,
                "items": [[item.leaf, [[box.start, box.stop] for box in item.boxes]] for item in receipt.items],
                "state": receipt.state,
                "objects": [
                    [record.key, record.size, len(record.checksums) // CHECKSUM_BYTES] for record in receipt.objects
                ],
            }
            for receipt in written.receipts
        ],
        "sizes": dict(written.sizes),
        "at_most": sorted(written.at_most),
        "about": sorted(written.about),
        "array_bytes": written.array_bytes,
        "boxes": written.boxes,
        "requests": asdict(written.requests),
    }


def written_from_json(told: Any, trees: Sequence[Sequence[TreeMetadata]]) -> WrittenProcess:
    """The inverse of `written_to_json`; `trees` are those that the processes write together, by checkpoint and part."""
    return WrittenProcess(
        checkpoints=[
            WrittenCheckpoint(
                receipts=[_receipt(*found) for found in zip(one["receipts"], of_one, strict=True)],
                sizes=one["sizes"],
                at_most=frozenset(one["at_most"]),
                about=frozenset(one["about"]),
                array_bytes=one["array_bytes"],
                boxes=one["boxes"],
                requests=RequestCounts(**one["requests"]),
            )
            for one, of_one in zip(told["checkpoints"], trees, strict=True)
        ],
        memory=MemoryPlan(**told["memory"]),
        untold=told["untold"],
    )


def _receipt(told: Any, tree: TreeMetadata) -> Receipt:
    items = []
    for leaf, boxes in told["items"]:
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # plans have no other items
        items.append(WriteItem(leaf, record.spec, tuple([Box(tuple(start), tuple(stop)) for start, stop in boxes])))
    objects = [ObjectRecord(key, size, bytes(CHECKSUM_BYTES * blocks)) for key, size, blocks in told["objects"]]
    return Receipt(told["rank"], tuple(items), told["state"], tuple(objects))


def plan_from_json(told: Any) -> SavePlan:
    """The plan that the leader told: ``asdict`` of it."""
    exports = [
        ExportPlan(**{**export, "processes": _processes_from_json(export["processes"])}) for export in told["exports"]
    ]
    return SavePlan(
        **{
            **told,
            "processes": _processes_from_json(told["processes"]),
            "memory": tuple([MemoryPlan(**memory) for memory in told["memory"]]),
            "exports": tuple(exports),
            "untold": tuple(told["untold"]),
        }
    )


def _processes_from_json(told: Sequence[Any]) -> tuple[ProcessPlan, ...]:
    return tuple(
        [
            ProcessPlan(
                rank=process["rank"],
                array_bytes=process["array_bytes"],
                boxes=process["boxes"],
                objects=tuple([ObjectPlan(**planned) for planned in process["objects"]]),
                requests=RequestCounts(**process["requests"]),
            )
            for process in told
        ]
    )


_NOWHERE: Final = "memory://ckptcore-dry-run"
"""Where a dry run without a location is: in memory of this process, where nothing ever is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A save that is to be planned.

    Attributes:
        location: where it would go; None: nothing is looked at.
        layout, overwrite: as of the save.
        exports: as of `WithExports`.
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
            destination=Destination(
                f"{_NOWHERE}/checkpoint" if self.location is None else self.location, self.overwrite
            ),
            values=OneTree(state),
            layout=self.layout,
            strategy=WithExports(exports),
        )


@dataclass(frozen=True, slots=True)
class _Played:
    save: Save
    kind: StorageKind
    written: WrittenProcess
    leading: Sequence[Leading]


def plan_running_job(asked: Asked, state: object, context: Context) -> SavePlan:
    """Plan a save of the job that this process is part of; every process calls this, and each gets the plan of all."""
    agreement = Agreement(runtime_of(context).job(), runtime_of(context).exchange_key("the plan of a save"))
    played = _play(asked, state, context, running_leaves(), agreement)
    with agreement.stage("plan") as stage:
        if agreement.size > 1:
            stage.payload = written_to_json(played.written)
    payloads: Sequence[Any] = stage.payloads
    plans: list[SavePlan] = []

    def lead() -> JSON:
        written = [played.written]
        if agreement.size > 1:
            trees = [[part.plan.tree for part in one.save.parts if not part.own] for one in played.leading]
            written = [written_from_json(payload, trees) for payload in payloads]
        plans.append(_plan(asked, played, written, context))
        return asdict(plans[0]) if agreement.size > 1 else None

    told = agreement.lead("planned", lead)
    return plans[0] if plans else plan_from_json(told)


def plan_simulated_job(asked: Asked, state_of: Callable[[int], object], processes: int, context: Context) -> SavePlan:
    """Plan a save of a job that does not run: each process is played in this one."""
    first: list[_Played] = []

    def process(agreement: Agreement) -> WrittenProcess:
        played = _play(asked, state_of(agreement.rank), context, simulated_leaves(agreement.rank), agreement)
        if agreement.rank == 0:
            first[:] = [played]
        return played.written

    written = SimulatedJob(processes).play(process)
    return _plan(asked, first[0], written, context)


def _play(asked: Asked, state: object, context: Context, wrap_leaf: WrapLeaf, agreement: Agreement) -> _Played:
    request = asked.request(state)
    recording = Recording("save", str(request.destination.place), rank=agreement.rank)
    save = prepare_save(request, dry_run_context(context, wrap_leaf), recording, agreement)
    real = asked.location is not None and save.target.location.commits.replaces_atomically
    kind: StorageKind = "directories" if real else "objects"
    return _Played(save, kind, *run_writes(save, kind, context))


def _plan(asked: Asked, leader: _Played, written: Sequence[WrittenProcess], context: Context) -> SavePlan:
    """Let the leader commit what all processes wrote, and say what that came to."""
    checkpoints = [
        _processes(leading, [process.checkpoints[number] for process in written], context)
        for number, leading in enumerate(leader.leading)
    ]
    parts = leader.save.parts
    trees = [part.plan.tree for part in parts]
    arrays = [_arrays(tree) for tree in trees]
    return SavePlan(
        layout=parts[0].layout.name,
        storage=leader.kind,
        arrays=sum(arrays),
        values=sum([sum(not isinstance(record, ArrayRecord) for record in tree.leaves) for tree in trees]),
        array_bytes=sum([tree.nbytes for tree in trees]),
        processes=checkpoints[0],
        memory=tuple([process.memory for process in written]),
        exports=tuple(
            [
                ExportPlan(location=str(export.location), layout=prepared.parts[0].layout.name, processes=processes)
                for export, prepared, processes in zip(asked.exports, leader.save.further, checkpoints[1:], strict=True)
            ]
        ),
        untold=tuple(dict.fromkeys([name for process in written for name in process.untold])),
    )


def _arrays(tree: TreeMetadata) -> int:
    return sum(isinstance(record, ArrayRecord) and leaf not in tree.aliases for leaf, record in enumerate(tree.leaves))


def _processes(leading: Leading, written: Sequence[WrittenCheckpoint], context: Context) -> tuple[ProcessPlan, ...]:
    """What each process writes of a checkpoint; the leader also what makes it whole."""
    before = written[0].sizes.keys() - written[0].about
    run_commit(leading.save, leading.claim, [one.receipts for one in written], context)
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
