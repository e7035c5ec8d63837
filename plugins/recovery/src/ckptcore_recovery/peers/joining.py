"""A job joins its memory: its processes start the servers of their hosts, fence the previous incarnation, and agree.

A job that starts again finds the servers that are left: those of the hosts of its processes, and those of hosts that
left the job. They hand over their entries to the members that hold them in the new view. The leader only decides about
the view; hosts do everything else at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.job.agreement import Agreement, Stage
from ckptcore.model.tree import JSON
from ckptcore_recovery.peers.connections import Pace, ServerConnections
from ckptcore_recovery.peers.copies import missing_blobs, restore_blobs
from ckptcore_recovery.peers.joined_jobs import JOINED
from ckptcore_recovery.peers.messages import Header
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import spread
from ckptcore_recovery.peers.starting import ensure_server
from ckptcore_recovery.peers.views import Member, View

logger = logger_named("ckptcore.recovery")

_REACH_SECONDS: Final = 1.5
"""A host that left the job counts as lost if it cannot be reached in this time. The system tries twice."""

_FENCES: Final = 32
"""The maximum number of hosts that a process tries to reach at a time."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of the memory of a host.

    Attributes:
        limit: the maximum bytes in memory.
        copies: the number of failure domains that may be lost.
        needed: see `View.needed`.
        interface: the address on which the server of this host listens, and at which other hosts reach it.
        domain: what fails together with this host; None: the host alone.
        idle_seconds: the server ends after this time without a process of the job.
        bytes_per_second: the maximum rate of each process; None for no limit.
        base: the directory of all memory servers of this host; None: the default.
    """

    limit: int
    copies: int = 1
    needed: int = 1
    interface: str = "127.0.0.1"
    domain: str | None = None
    idle_seconds: float = 900.0
    bytes_per_second: float | None = None
    base: str | None = None


class Report(NamedTuple):
    """What a process reports about the server of its host, before the job has a view.

    Attributes:
        id, host, port, domain: see `Member`.
        epoch: the last incarnation that fenced the server.
        view: the incarnation whose view the server has; 0 for none.
        token: its token, in hexadecimal digits.
    """

    id: str
    host: str
    port: int
    domain: str
    epoch: int
    view: int
    token: str

    @property
    def member(self) -> Member:
        """The server as a member."""
        return Member(self.id, self.host, self.port, self.domain)


def join_job(job: str, agreement: Agreement, options: MemoryOptions) -> Session:
    """Join the memory of a job as a new incarnation. Called on every rank; later calls of this process use the result.

    Args:
        job: the name of the job.
        agreement: an exchange between its processes.
        options: the options; those of rank 0 count for `copies` and `needed`.

    Raises:
        StorageError: the server of this host cannot be started, or there are too few failure domains for fragments.
        RankFailedError: another process failed.
    """
    start = partial(
        ensure_server,
        job,
        limit=options.limit,
        interface=options.interface,
        idle_seconds=options.idle_seconds,
        base=options.base,
    )
    with agreement.stage("servers") as stage:
        local = start()
        with ServerConnections(local.interface, local.port, local.token) as own:
            status, _ = own.call({"op": "status"})
        domain = options.domain or local.id
        report = Report(
            local.id, local.interface, local.port, domain, status["epoch"], status["view"], local.token.hex()
        )
        stage.payload = list(report)
    reports = [Report(*payload) for payload in _gathered(stage)]
    plan: Any = agreement.lead("plan", lambda: plan_takeover(reports))
    epoch, token = plan["epoch"], bytes.fromhex(plan["token"])
    fence = {"op": "fence", "epoch": epoch, "before": plan["before"], "rank": agreement.rank, "token": plan["token"]}
    with agreement.stage("fence") as stage, own:
        answer, _ = own.call(fence)
        acts = answer["acts"]
        left = [Member(*member) for member in plan["left"][agreement.rank :: agreement.size]]
        with ThreadPoolExecutor(min(len(left), _FENCES) or 1) as threads:
            fenced = list(threads.map(lambda member: _is_fenced(member, token, fence), left))
        readers = [member for member, is_fenced in zip(left, fenced, strict=True) if is_fenced]
        stage.payload = [list(member) for member in readers]
    reached = [Member(*member) for members in _gathered(stage) for member in members]
    local = local._replace(token=token)

    def prepare() -> None:
        view = make_view(epoch, reports, reached, options)
        with Session(job, local, view, token, Pace(None), start) as leading:
            spread(leading, {"op": "prepare", "epoch": epoch}, view.encode())

    agreement.lead("view", prepare)
    with ServerConnections(local.interface, local.port, token) as own:
        _, encoded = own.call({"op": "view", "next": True})
        session = Session(job, local, View.decode(bytes(encoded)), token, Pace(options.bytes_per_second), start)
        with agreement.stage("entries"):
            if acts:
                own.call({"op": "hand_over", "epoch": epoch})
            for member in readers:
                session.server(member).call({"op": "hand_over", "epoch": epoch}, encoded)
        with agreement.stage("install") as stage:  # all entries are where the new view expects them
            if acts:
                own.call({"op": "install", "epoch": epoch})
                own.call({"op": "sweep", "epoch": epoch})
                stage.payload = missing_blobs(session)
    restore_blobs(session, agreement, _gathered(stage), acts=acts)
    JOINED.join(session)
    return session


def _gathered(stage: Stage) -> Sequence[Any]:
    """Return the payloads of all processes on the leader, and only that of this process on others."""
    return stage.payloads or [stage.payload]


def plan_takeover(reports: Sequence[Report]) -> JSON:
    """On the leader, return what the processes have to do: the new incarnation, and the servers that left the job.

    The newest view is that of the last incarnation that has completed its start.
    """
    newest = max(reports, key=lambda report: report.view)
    members: list[JSON] = []
    if newest.view:
        with ServerConnections(newest.host, newest.port, bytes.fromhex(newest.token)) as server:
            _, encoded = server.call({"op": "view"})
        present = {report.id for report in reports}
        members = [list(member) for member in View.decode(bytes(encoded)).members if member.id not in present]
    epoch = max(report.epoch for report in reports) + 1
    return {"epoch": epoch, "before": newest.view, "token": newest.token, "left": members}


def _is_fenced(member: Member, token: bytes, fence: Header) -> bool:
    """Fence a server that left the job. Return False if it is lost."""
    try:
        with ServerConnections(member.host, member.port, token, connect_seconds=_REACH_SECONDS) as server:
            status, _ = server.call({"op": "status"})
            if status["id"] == member.id:  # otherwise another server has its address now
                server.call(fence)
                return True
    except StorageError as error:
        logger.warning("the memory of a host that left the job is lost: %s", error)
    return False


def make_view(epoch: int, reports: Sequence[Report], left: Sequence[Member], options: MemoryOptions) -> View:
    """Return the view of a new incarnation.

    Args:
        epoch: its number.
        reports: the reports of its processes.
        left: the servers on hosts that left the job.
        options: the options of the leader.

    Raises:
        StorageError: the fragments of an object need more failure domains.
    """
    members = {report.id: report.member for report in reversed(reports)}
    ordered = [members.pop(report.id) for report in reports if report.id in members]
    domains, wanted = len({member.domain for member in ordered}), options.needed + options.copies
    if domains < wanted and options.needed > 1:
        raise StorageError(
            f"ErasureCode(data={options.needed}, parity={options.copies}) needs {wanted} failure domains, and the job "
            f"has hosts in {domains}. Use more hosts, pass domain= with names that differ, or use fewer fragments, or "
            "copies="
        )
    if domains < wanted:
        logger.warning(
            "steps in memory have fewer than %d copies: the job has hosts in %d failure domains",
            options.copies, domains,
        )  # fmt: skip
    readers = [member._replace(is_reader=True) for member in left]
    return View(epoch, [*ordered, *readers], options.copies, options.needed)
