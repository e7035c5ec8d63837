"""recover: processes that lost their state get it from processes of the running job that hold replicas of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore.context import Context, default_context
from ckptcore.errors import TreeMismatchError
from ckptcore.events import logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.loading.in_place import load_into_target
from ckptcore.loading.load import Load, LoadRequest, recorded_load
from ckptcore.loading.reading import TreeRead
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.protocols import ReadBoxes
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import TreeDescription
from ckptcore_recovery.replicas.agreeing import (
    NOTHING_CHANGED,
    Address,
    Agreed,
    Start,
    agree_on_parcels,
    agree_on_start,
    agree_on_state,
    needs_payload,
    paths_of,
)
from ckptcore_recovery.replicas.fetching import Fetch, Wanted
from ckptcore_recovery.replicas.job_state import (
    PLACE,
    JobState,
    NoReplicaError,
    describe_state,
    placed_in,
    report_digest,
    report_of,
)
from ckptcore_recovery.replicas.sending import HeldElements, ReplicaServer
from ckptcore_recovery.replicas.transfers import missing_boxes

logger = logger_named("ckptcore.recovery")

_SHOWN: Final = 20


@dataclass(slots=True, kw_only=True)
class RecoveryReport:
    """A report of a recovery. The caller creates one and passes it to `recover`, which fills it.

    Attributes:
        lost: the ranks that lost their state.
        differing: by rank of a process that has its state, the paths of arrays in which it differs from the majority.
            Its memory may be corrupt: recover it, too.
        bytes_needed: bytes of the elements that this process needed; 0 if it has its state.
        bytes_moved: bytes of elements that this process received, including those that it refused.
        received: by rank of a process that sent elements, the bytes that this process accepted.
        replaced: by rank of a process that failed, or sent wrong bytes, the reason. Others sent its part.
    """

    lost: Sequence[int] = ()
    differing: Mapping[int, Sequence[str]] = field(default_factory=dict)
    bytes_needed: int = 0
    bytes_moved: int = 0
    received: Mapping[int, int] = field(default_factory=dict)
    replaced: Mapping[int, str] = field(default_factory=dict)


def recover(
    state: Any,
    *,
    lost: bool,
    interface: str = "127.0.0.1",
    report: RecoveryReport | None = None,
    context: Context | None = None,
) -> Any:
    """Give processes that lost their state the state of the others, over the network, without storage.

    Every process of the job calls this between the same two steps, with a state of the same structure. The processes
    that have their state hold replicas of the lost boxes, as in data-parallel training or HSDP. The lost state is
    filled in place, as by `ckptcore.load_into`. Each holder sends the same share. If a holder fails meanwhile, the
    others send its part.

    Args:
        state: a tree of arrays, values, modules, optimizers and other objects. If it was lost, its values do not count.
        lost: True in a process that lost its state, such as one that was started again.
        interface: the IP address of this host at which the other hosts of the job reach it.
        report: filled by the recovery.
        context: options.

    Returns:
        The state. If it was lost and cannot be changed in place, a new one.

    Raises:
        NoReplicaError: no process holds a part of the lost state, which the error lists. Nothing was changed. Also
            raised if all holders of a part have failed.
        ReplicasDifferError: processes that have their state hold different elements or values, and there is no
            majority. Nothing was changed.
        TreeMismatchError: the lost state has another structure than that of the others. Nothing was changed.
        RankFailedError: the recovery failed on another rank, which raises the error itself.
        TargetUndefinedError: it failed after it had begun to change the lost state.
    """
    context, report = context or default_context(), report or RecoveryReport()
    job, key = runtime_of(context).job(), runtime_of(context).exchange_key("recover")
    whole = {"state": state}  # a state that cannot be changed is replaced here
    with recorded_load(PLACE, context) as recording:
        agreement = Agreement(job, key, recording)
        description = None
        with agreement.stage("describe", meaning=NOTHING_CHANGED):
            if not lost:
                with recording.phase("open"):
                    description = describe_state(whole, context, rank=job.rank, size=job.size)
        start = agree_on_start(agreement, None if description is None else report_digest(description))
        report.lost = start.lost
        if not start.lost:
            return state
        if not start.groups:
            raise NoReplicaError(f"all {job.size} processes of the job lost their state. Load a checkpoint")
        if description is not None:
            _send(description, start, agreement, interface, report)
            return state
        with agreement.stage("reports", meaning=NOTHING_CHANGED) as stage:
            pass
        encoded, addresses = agree_on_state(agreement, start, stage.payloads)
        with agreement.stage("tree", meaning=NOTHING_CHANGED):
            job_state = JobState.decode(encoded)
            checkpoint = job_state.as_checkpoint(context)
        request = LoadRequest(strategy=_FromReplicas(agreement, start, job_state, addresses, report))
        load_into_target(checkpoint, whole, context, recording, request)
        return whole["state"]


def _send(
    description: TreeDescription, start: Start, agreement: Agreement, interface: str, report: RecoveryReport
) -> None:
    """Send the elements of this process to the processes that lost theirs."""
    rank = agreement.rank
    with agreement.stage("reports", meaning=NOTHING_CHANGED) as stage:
        server = ReplicaServer(interface, bytes.fromhex(start.token), start.lost)
        is_first = any(group[0] == rank for group in start.groups)
        stage.payload = [*server.address, report_of(description) if is_first else None]
    with closing(server):
        encoded, _ = agree_on_state(agreement, start, stage.payloads)
        with agreement.stage("tree", meaning=NOTHING_CHANGED):
            state = JobState.decode(encoded)
            elements = HeldElements(placed_in(description, state.tree))
        with agreement.stage("needs", meaning=NOTHING_CHANGED) as stage:
            pass
        agreed = agree_on_parcels(agreement, state, stage.payloads, elements)
        _report_differing(report, state, agreed)
        held = {number: parcel for number, parcel in enumerate(agreed.parcels) if rank in parcel.holders}
        receivers = {receiver for parcel in held.values() for receiver in parcel.senders}
        server.serve(lambda number: elements.parcel(held[number]), receivers)


class _FromReplicas:
    """The strategy of the load in a process that lost its state: it reads from processes that have theirs."""

    def __init__(
        self,
        agreement: Agreement,
        start: Start,
        state: JobState,
        addresses: Mapping[int, Address],
        report: RecoveryReport,
    ) -> None:
        self._agreement = agreement
        self._token = bytes.fromhex(start.token)
        self._state = state
        self._addresses = addresses
        self._report = report
        self._fetch: Fetch | None = None

    def run(self, load: Load[Any]) -> Any:
        """See `ckptcore.protocols.ReadStrategy`."""
        agreement, state, report = self._agreement, self._state, self._report
        with agreement.stage("needs", meaning=NOTHING_CHANGED) as stage:
            reading = self._plan(load)
            requests = Counter(_requested(reading))
            self._expect_held(list(requests))
            stage.payload = needs_payload(requests)
        agreed = agree_on_parcels(agreement, state, stage.payloads, None)
        _report_differing(report, state, agreed)
        report.bytes_needed = sum([item.box.size * state.dtypes[item.leaf].itemsize for item in requests])
        own = {number: parcel for number, parcel in enumerate(agreed.parcels) if agreement.rank in parcel.senders}
        paths = [format_path(path) for path in state.tree.paths]
        wanted = Wanted(own, agreed.digests, agreed.excluded, requests, state.dtypes, paths)
        self._fetch = fetch = Fetch(agreement.rank, wanted, self._addresses, self._token)
        try:
            load.begin(reading)
            load.read(reading)
            result = load.build(reading)
        except BaseException as error:
            fetch.close(error)
            raise
        finally:
            report.bytes_moved, report.received, report.replaced = fetch.moved, fetch.received, fetch.failed
        fetch.close(None)
        return result

    def _plan(self, load: Load[Any]) -> TreeRead:
        """Match the lost state with that of the other processes.

        Raises:
            NoReplicaError: the lost state has values that no other process has.
            TreeMismatchError: they have different structures.
        """
        checkpoint: Checkpoint = load.open().reading_through(self._read)
        try:
            return load.plan(checkpoint)
        except TreeMismatchError as error:
            paths = self._state.lacking_values(self._agreement.rank)
            lacking = [path for path in paths if any(line.startswith(f"{path}:") for line in error.differences)]
            if not lacking:
                raise
            raise NoReplicaError(
                f"{_listed(lacking)}: in PerProcess(...), so only this process had the value. Load a checkpoint; or "
                "put PLACEHOLDER in its place and create it again. Nothing was changed"
            ) from error

    def _read(
        self, content_id: str | None, plan: ReadPlan, buffers: Sequence[HostArray], read_stored: ReadBoxes
    ) -> Iterator[int]:
        """See `ckptcore.protocols.ReadThrough`."""
        assert self._fetch is not None  # the load reads after it was planned
        return self._fetch.read(plan, buffers)

    def _expect_held(self, items: Sequence[ReadItem]) -> None:
        paths = self._state.tree.paths
        missing = [
            f"{format_path(paths[item.leaf])}[{', '.join(f'{a}:{b}' for a, b in zip(*item.box, strict=True))}]"
            for item in missing_boxes(items, self._state.held)
        ]
        if missing:
            raise NoReplicaError(
                f"{_listed(missing)}: no process that has its state holds these elements. Load a checkpoint. Nothing "
                "was changed"
            )


def _requested(reading: TreeRead) -> list[ReadItem]:
    """Return the boxes that a load reads, each as often as it is read."""
    assert reading.checkpoint.derived is None  # the load casts and changes nothing
    parts = [reading] if reading.first is None else [reading.first, reading]
    return [
        ReadItem(leaf_read.leaf, box)
        for part in parts
        for leaf_read in part.leaf_reads
        if leaf_read.array is None
        for box in leaf_read.boxes
    ]


def _report_differing(report: RecoveryReport, state: JobState, agreed: Agreed) -> None:
    """Name the processes that differ from the majority."""
    differing: dict[int, dict[str, None]] = {}
    for number, ranks in agreed.excluded.items():
        for rank in ranks:
            differing.setdefault(rank, {}).update(dict.fromkeys(paths_of(state, agreed.parcels[number])))
    report.differing = {rank: list(paths) for rank, paths in sorted(differing.items())}
    for rank, paths in report.differing.items():
        logger.error("rank %d differs from the majority in %s: its memory may be corrupt", rank, _listed(paths))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
