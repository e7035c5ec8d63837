"""Dry runs of whole jobs: of the running job, and of simulated jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NoReturn, TypeVar

from ckptcore.commit.location import AnyLocation
from ckptcore.commit.stored_root import Overwrite
from ckptcore.context import Context
from ckptcore.errors import PluginError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement, Stage
from ckptcore.model.arrays import Box
from ckptcore.model.metadata import CHECKSUM_BYTES, ArrayRecord, ObjectRecord, TreeMetadata
from ckptcore.model.transfer import Receipt, WriteItem
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import OneTree, Save, SaveDestination, SaveRequest
from ckptcore.saving.save import prepare_save
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
    LeaderState,
    StorageKind,
    WrittenCheckpoint,
    WrittenProcess,
    run_commit,
    run_writes,
)
from ckptcore_tools.exports import Export, WithExports

T = TypeVar("T", bound=JSON)
R = TypeVar("R")


class MissingPayloadError(Exception):
    """A simulated process needs payloads of processes that have not run yet. The job runs it again later."""


class SimulatedJob:
    """A job whose processes run one after another in this process.

    Each process runs until it needs missing payloads of other processes. All are rerun until every payload exists.
    """

    def __init__(self, size: int) -> None:
        """Create a job of `size` processes."""
        self.size = size
        self._payloads: dict[str, dict[int, JSON]] = {}
        self._decisions: dict[str, JSON] = {}

    def run(self, process: Callable[[Agreement], R]) -> list[R]:
        """Run all processes, and return their results by rank."""
        while True:
            results = []
            waiting = False
            for rank in range(self.size):
                try:
                    results.append(process(SimulatedAgreement(self, rank)))
                except MissingPayloadError:
                    waiting = True
            if not waiting:
                return results

    def exchange(self, name: str, rank: int, payload: JSON) -> Sequence[JSON]:
        """Add a payload of a stage. Return the payloads of all ranks, or nothing if some are missing."""
        payloads = self._payloads.setdefault(name, {})
        payloads[rank] = json.loads(json.dumps(payload))  # what the other ranks would receive
        return [payloads[other] for other in range(self.size)] if len(payloads) == self.size else []

    def decide(self, name: str, rank: int, decide: Callable[[], T]) -> Any:
        """Return the decision of the leader.

        Raises:
            MissingPayloadError: if the leader has not decided, or payloads that it needs are missing.
        """
        if name not in self._decisions:
            if rank or any(len(payloads) < self.size for payloads in self._payloads.values()):
                raise MissingPayloadError(name)
            self._decisions[name] = json.loads(json.dumps(decide()))
        return self._decisions[name]


class SimulatedAgreement(Agreement):
    """The exchanges of one process of a simulated job."""

    def __init__(self, job: SimulatedJob, rank: int) -> None:
        super().__init__(_IsolatedCoordinator(rank, job.size), "simulated")
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
        stage.payloads = self._job.exchange(name, self.rank, stage.payload)
        decide, stage.decide = stage.decide, None
        stage.decision = None if decide is None else self._job.decide(name, self.rank, decide)

    def lead(self, name: str, decide: Callable[[], T]) -> T:
        decision: T = self._job.decide(name, self.rank, decide)
        return decision


class _IsolatedCoordinator:
    """A `Coordinator` with a rank and a size, but without communication."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        _refuse(key)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        _refuse(key)


def _refuse(key: str) -> NoReturn:
    raise PluginError(f"a simulated job used its coordinator ({key!r}): this is a bug in ckptcore, please report it")


def written_to_json(written: WrittenProcess) -> JSON:
    """Encode the writes of a process for the leader."""
    return {
        "checkpoints": [_checkpoint_to_json(item) for item in written.checkpoints],
        "memory": asdict(written.memory),
        "unplanned": list(written.unplanned),
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


def written_from_json(document: Any, trees: Sequence[Sequence[TreeMetadata]]) -> WrittenProcess:
    """Decode the writes of a process. `trees` are the trees that all processes write together, by checkpoint."""
    return WrittenProcess(
        checkpoints=[
            WrittenCheckpoint(
                receipts=[_receipt_from_json(*pair) for pair in zip(entry["receipts"], checkpoint_trees, strict=True)],
                sizes=entry["sizes"],
                at_most=frozenset(entry["at_most"]),
                about=frozenset(entry["about"]),
                array_bytes=entry["array_bytes"],
                boxes=entry["boxes"],
                requests=RequestCounts(**entry["requests"]),
            )
            for entry, checkpoint_trees in zip(document["checkpoints"], trees, strict=True)
        ],
        memory=MemoryPlan(**document["memory"]),
        unplanned=document["unplanned"],
    )


def _receipt_from_json(document: Any, tree: TreeMetadata) -> Receipt:
    items = []
    for leaf, boxes in document["items"]:
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # plans have no other items
        items.append(WriteItem(leaf, record.spec, tuple([Box(tuple(start), tuple(stop)) for start, stop in boxes])))
    objects = [ObjectRecord(key, size, bytes(CHECKSUM_BYTES * blocks)) for key, size, blocks in document["objects"]]
    return Receipt(document["rank"], tuple(items), document["state"], tuple(objects))


def plan_from_json(document: Any) -> SavePlan:
    """Decode a plan that `dataclasses.asdict` encoded."""
    exports = [
        ExportPlan(**{**export, "processes": _processes_from_json(export["processes"])})
        for export in document["exports"]
    ]
    return SavePlan(
        **{
            **document,
            "processes": _processes_from_json(document["processes"]),
            "memory": tuple([MemoryPlan(**memory) for memory in document["memory"]]),
            "exports": tuple(exports),
            "unplanned": tuple(document["unplanned"]),
        }
    )


def _processes_from_json(documents: Sequence[Any]) -> tuple[ProcessPlan, ...]:
    return tuple(
        [
            ProcessPlan(
                rank=process["rank"],
                array_bytes=process["array_bytes"],
                boxes=process["boxes"],
                objects=tuple([ObjectPlan(**planned) for planned in process["objects"]]),
                requests=RequestCounts(**process["requests"]),
            )
            for process in documents
        ]
    )


_NO_LOCATION: Final = "memory://ckptcore-dry-run"
"""The location that replaces a missing location in a dry run. It is always empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A save to plan.

    Attributes:
        location: the location of the save. None: no location is checked.
        layout, overwrite: options of the save.
        exports: the exports of `WithExports`.
    """

    location: AnyLocation | None
    layout: str | Layout
    overwrite: Overwrite
    exports: Sequence[Export]

    def save_request(self, state: object) -> SaveRequest:
        """Return the request of the save. Without a location, the locations of exports are not checked either."""
        exports = self.exports
        if self.location is None:
            exports = [
                replace(export, location=f"{_NO_LOCATION}/export-{number}") if isinstance(export, Export) else export
                for number, export in enumerate(exports)
            ]
        return SaveRequest(
            destination=SaveDestination(
                f"{_NO_LOCATION}/checkpoint" if self.location is None else self.location, self.overwrite
            ),
            values=OneTree(state),
            layout=self.layout,
            strategy=WithExports(exports),
        )


@dataclass(frozen=True, slots=True)
class _SimulatedSave:
    """The result of the dry run on one process."""

    save: Save
    kind: StorageKind
    written: WrittenProcess
    leader_states: Sequence[LeaderState]


def plan_running_job(request: PlanRequest, state: object, context: Context) -> SavePlan:
    """Plan a save of the running job. Every process calls this and returns the plan of the whole job."""
    agreement = Agreement(runtime_of(context).job(), runtime_of(context).exchange_key("the plan of a save"))
    simulated = _simulate(request, state, context, running_leaves(), agreement)
    with agreement.stage("plan") as stage:
        if agreement.size > 1:
            stage.payload = written_to_json(simulated.written)
    payloads: Sequence[Any] = stage.payloads
    plans: list[SavePlan] = []

    def lead() -> JSON:
        written = [simulated.written]
        if agreement.size > 1:
            trees = [
                [part.plan.tree for part in leader.save.parts if not part.own] for leader in simulated.leader_states
            ]
            written = [written_from_json(payload, trees) for payload in payloads]
        plans.append(_plan(request, simulated, written, context))
        return asdict(plans[0]) if agreement.size > 1 else None

    document = agreement.lead("planned", lead)
    return plans[0] if plans else plan_from_json(document)


def plan_simulated_job(
    request: PlanRequest, state_of: Callable[[int], object], processes: int, context: Context
) -> SavePlan:
    """Plan a save of a job that is not running. Each of its processes is simulated in this process."""
    first: list[_SimulatedSave] = []

    def process(agreement: Agreement) -> WrittenProcess:
        simulated = _simulate(request, state_of(agreement.rank), context, simulated_leaves(agreement.rank), agreement)
        if agreement.rank == 0:
            first[:] = [simulated]
        return simulated.written

    written = SimulatedJob(processes).run(process)
    return _plan(request, first[0], written, context)


def _simulate(
    request: PlanRequest, state: object, context: Context, wrap_leaf: WrapLeaf, agreement: Agreement
) -> _SimulatedSave:
    save_request = request.save_request(state)
    recording = Recording("save", str(save_request.destination.location), rank=agreement.rank)
    save = prepare_save(save_request, dry_run_context(context, wrap_leaf), recording, agreement)
    on_file_system = request.location is not None and save.target.location.commit_method.replaces_atomically
    kind: StorageKind = "directories" if on_file_system else "objects"
    return _SimulatedSave(save, kind, *run_writes(save, kind, context))


def _plan(
    request: PlanRequest, leader: _SimulatedSave, written: Sequence[WrittenProcess], context: Context
) -> SavePlan:
    """Simulate the commits of the leader, and combine the results of all processes into a plan."""
    checkpoints = [
        _plan_processes(state, [process.checkpoints[number] for process in written], context)
        for number, state in enumerate(leader.leader_states)
    ]
    parts = leader.save.parts
    trees = [part.plan.tree for part in parts]
    arrays = [_array_count(tree) for tree in trees]
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
                for export, prepared, processes in zip(
                    request.exports, leader.save.further, checkpoints[1:], strict=True
                )
            ]
        ),
        unplanned=tuple(dict.fromkeys([name for process in written for name in process.unplanned])),
    )


def _array_count(tree: TreeMetadata) -> int:
    return sum(isinstance(record, ArrayRecord) and leaf not in tree.aliases for leaf, record in enumerate(tree.leaves))


def _plan_processes(
    leader: LeaderState, written: Sequence[WrittenCheckpoint], context: Context
) -> tuple[ProcessPlan, ...]:
    """Simulate the commit of a checkpoint, and return the plan of each process. The leader also writes the root."""
    before = written[0].sizes.keys() - written[0].about
    run_commit(leader.save, leader.claim, [process.receipts for process in written], context)
    sizes = {key.partition("/")[2]: size for key, size in leader.storage.sizes.items()}
    processes = []
    for rank, process in enumerate(written):
        rank_sizes = process.sizes if rank else sizes
        about = process.about if rank else sizes.keys() - before
        processes.append(
            ProcessPlan(
                rank=rank,
                array_bytes=process.array_bytes,
                boxes=process.boxes,
                objects=tuple(
                    [
                        ObjectPlan(key, size, _certainty(key, process.at_most, about))
                        for key, size in sorted(rank_sizes.items())
                    ]
                ),
                requests=leader.storage.requests if rank == 0 else process.requests,
            )
        )
    return tuple(processes)


def _certainty(key: str, at_most: Collection[str], about: Collection[str]) -> Certainty:
    return "about" if key in about else "at most" if key in at_most else "exact"
