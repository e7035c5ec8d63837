"""recover: processes that lost their state get it from processes of the running job that hold replicas of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckptcore.context import Context, default_context
from ckptcore.errors import TreeMismatchError
from ckptcore.events import logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.loading.in_place import load_into_target
from ckptcore.loading.load import Load, LoadRequest, recorded_load
from ckptcore.loading.reading import TreeRead
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.protocols import ReadBoxes
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import TreeDescription
from ckptcore_recovery.replicas.agreeing import (
    NOTHING_CHANGED,
    Agreed,
    Reports,
    Start,
    agree_on_parcels,
    agree_on_start,
    agree_on_tree,
    listed,
    needs_payload,
)
from ckptcore_recovery.replicas.fetching import Fetch, Holders, Wanted
from ckptcore_recovery.replicas.job_state import (
    PLACE,
    NoReplicaError,
    as_checkpoint,
    describe_state,
    dtypes_of,
    lacking_values,
    placed_in,
    report_digest,
    report_of,
)
from ckptcore_recovery.replicas.sending import HeldElements, ReplicaServer

logger = logger_named("ckptcore.recovery")


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
        NoReplicaError: on all ranks, if no process holds a part of a lost state; lists the parts. Nothing was changed.
            Also on a rank that lost its state, if all holders of a part have failed.
        ReplicasDifferError: on all ranks, if processes that have their state hold different elements or values, and
            there is no majority. Nothing was changed.
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
        reports = agree_on_tree(agreement, start, stage.payloads)
        with agreement.stage("decoded", meaning=NOTHING_CHANGED):
            tree = TreeMetadata.from_json(json.loads(reports.tree))
            checkpoint = as_checkpoint(tree, context)
        request = LoadRequest(strategy=_FromReplicas(agreement, start, reports, tree, report))
        load_into_target(checkpoint, whole, context, recording, request)
        return whole["state"]


def _send(
    description: TreeDescription, start: Start, agreement: Agreement, interface: str, report: RecoveryReport
) -> None:
    """Send the elements of this process to the processes that lost theirs."""
    rank = agreement.rank
    with ExitStack() as closing_server:
        with agreement.stage("reports", meaning=NOTHING_CHANGED) as stage:
            server = ReplicaServer(interface, bytes.fromhex(start.token), start.lost)
            closing_server.callback(server.close)
            is_first = any(group[0] == rank for group in start.groups)
            stage.payload = [*server.address, report_of(description) if is_first else None]
        reports = agree_on_tree(agreement, start, stage.payloads)
        with agreement.stage("decoded", meaning=NOTHING_CHANGED):
            tree = TreeMetadata.from_json(json.loads(reports.tree))
            elements = HeldElements(placed_in(description, tree))
        with agreement.stage("needs", meaning=NOTHING_CHANGED) as stage:
            pass
        agreed = agree_on_parcels(agreement, tree, reports, stage.payloads, elements)
        _report_differing(report, agreed)
        held = {number: parcel for number, parcel in enumerate(agreed.parcels) if rank in parcel.holders}
        receivers = {receiver for parcel in held.values() for receiver in parcel.senders}
        receivers -= {receiver for receiver, holders in agreed.unreached.items() if rank in holders}
        server.serve(lambda number: elements.parcel(held[number]), receivers)


class _FromReplicas:
    """The strategy of the load in a process that lost its state: it reads from processes that have theirs."""

    def __init__(
        self, agreement: Agreement, start: Start, reports: Reports, tree: TreeMetadata, report: RecoveryReport
    ) -> None:
        self._agreement = agreement
        self._token = bytes.fromhex(start.token)
        self._reports = reports
        self._tree = tree
        self._report = report
        self._fetch: Fetch | None = None

    def run(self, load: Load[Any]) -> Any:
        """See `ckptcore.protocols.ReadStrategy`."""
        agreement, tree, report = self._agreement, self._tree, self._report
        requests: Counter[ReadItem] = Counter()
        with agreement.stage("needs", meaning=NOTHING_CHANGED) as stage:
            checkpoint: Checkpoint = load.open().reading_through(self._read)
            try:
                reading = load.plan(checkpoint)
            except TreeMismatchError as error:
                stage.payload = self._explain(error)
            else:
                requests.update(_requested(reading))
                stage.payload = needs_payload(requests)
        holders = Holders({}, {})
        with closing(holders):
            agreed = agree_on_parcels(
                agreement, tree, self._reports, stage.payloads, partial(holders.connect, agreement.rank, self._token)
            )
            _report_differing(report, agreed)
            dtypes = dtypes_of(tree)
            report.bytes_needed = sum([item.box.size * dtypes[item.leaf].itemsize for item in requests])
            own = {number: parcel for number, parcel in enumerate(agreed.parcels) if agreement.rank in parcel.senders}
            paths = [format_path(path) for path in tree.paths]
            wanted = Wanted(own, agreed.digests, agreed.excluded, requests, dtypes, paths)
            self._fetch = fetch = Fetch(agreement.rank, wanted, holders)
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

    def _explain(self, mismatch: TreeMismatchError) -> str:
        """Return the explanation if the lost state has values that no other process has.

        Raises:
            TreeMismatchError: the lost state has another structure. Its text replaces that of a load.
        """
        paths = lacking_values(self._tree, self._agreement.rank)
        lacking = [path for path in paths if any(line.startswith(f"{path}:") for line in mismatch.differences)]
        if not lacking:
            lines = "\n  ".join(mismatch.differences[:20])
            raise TreeMismatchError(
                f"the lost state (requested) differs from that of the other processes (stored):\n  {lines}\nCreate "
                "it as they did, or put PLACEHOLDER in the place of what is not to be recovered",
                mismatch.differences,
            ) from mismatch
        return (
            f"{listed(lacking)}: in PerProcess(...), so only this process had the value; put PLACEHOLDER in its place "
            "to recover everything else"
        )

    def _read(
        self, content_id: str | None, plan: ReadPlan, buffers: Sequence[HostArray], read_stored: ReadBoxes
    ) -> Iterator[int]:
        """See `ckptcore.protocols.ReadThrough`."""
        assert self._fetch is not None  # the load reads after it was planned
        return self._fetch.read(plan, buffers)


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


def _report_differing(report: RecoveryReport, agreed: Agreed) -> None:
    """Name the processes that differ from the majority."""
    report.differing = agreed.differing
    for rank, paths in agreed.differing.items():
        logger.error("rank %d differs from the majority in %s: its memory may be corrupt", rank, listed(paths))
