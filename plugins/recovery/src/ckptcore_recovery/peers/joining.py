"""A job joins its memory: its processes start the servers of their hosts, fence the previous incarnation, and agree.

A job that starts again finds the servers that are left: those of the hosts of its processes, and those of hosts that
left the job. They hand over their entries to the members that hold them in the new view. The leader only decides about
the view; hosts do everything else at the same time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ckptcore.errors import StorageError, StorageFullError
from ckptcore.events import logger_named
from ckptcore.io.threads import IOThreads, map_ordered
from ckptcore.job.agreement import Agreement, Stage
from ckptcore.model.tree import JSON
from ckptcore_recovery.peers.connections import Pace, ServerConnections, ServerLostError
from ckptcore_recovery.peers.copies import install_view, merge_plans, restore_blobs
from ckptcore_recovery.peers.discovery import Server, discover
from ckptcore_recovery.peers.joined_jobs import JOINED
from ckptcore_recovery.peers.launcher_domains import launcher_domain
from ckptcore_recovery.peers.lost_steps import LostMembers
from ckptcore_recovery.peers.messages import Header
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import spread
from ckptcore_recovery.peers.starting import ensure_server
from ckptcore_recovery.peers.views import Member, View, place

logger = logger_named("ckptcore.recovery")

_FENCES: Final = 32
"""The maximum number of hosts that a process fences at a time."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of the memory of a host.

    Attributes:
        limit: the maximum bytes in memory.
        copies: the number of failure domains that may be lost.
        needed: see `View.needed`.
        interface: the address on which the server of this host listens, and at which other hosts reach it.
        domain: what fails together with this host; None: what the launcher names, or the host alone.
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


def join_job(
    job: str,
    agreement: Agreement,
    options: MemoryOptions,
    *,
    run: str = "",
    least: Callable[[], int] = lambda: 1,
    allow: Callable[[LostMembers], object] = bool,
) -> Session:
    """Join the memory of a job as a new incarnation. Called on every rank; later calls of this process use the result.

    Args:
        job: the name of the job.
        agreement: an exchange between its processes.
        options: the options; those of rank 0 count for `copies` and `needed`.
        run: the location of the run, without secrets. Memory with steps of another run is refused.
        least: called on the leader, while other processes start their servers. Returns the lowest number that the
            incarnation may get, or raises an error if the job may not start.
        allow: called on the leader, before anything is changed, if objects may be lost with the hosts that do not
            answer. Raises an error if the job may not start without them.

    Raises:
        StorageError: the server of this host cannot be started or has the memory of another run, or there are too few
            failure domains for fragments.
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
        number = least() if agreement.rank == 0 else 0

        def decide() -> JSON:
            found, before = discover(read_reports(stage.payloads))
            if before is not None and not before.keeps_all_without(lost := before.by_id.keys() - found):
                token = next(server.token for server in found.values() if server.view == before.epoch)
                with Session(job, local, before, token, Pace(None), lost=lost) as last:
                    allow(LostMembers(last, lost))
            return plan_takeover(read_reports(stage.payloads), found, before, number)

        stage.decide = decide
        local, own = start()
        status, _ = own.call({"op": "status"})
        if run and status["run"] not in ("", run):
            raise StorageError(
                f"{local.directory} has steps of the run in {status['run']}, and not of {run}. If that run was moved "
                f"to here, remove {local.directory / 'run'} on each host, and start the job again: it keeps the steps. "
                "If it is another run, pass another job= to PeerMemory, or wait: its memory is freed a minute after it "
                f"has closed. If its steps are not needed, end their memory server (process {status['pid']}), and "
                "remove this directory"
            )
        member = Member(local.id, local.interface, local.port, options.domain or local.id)
        offered = launcher_domain(os.environ) if options.domain is None else None
        stage.payload = [list(member), status["epoch"], status["view"], status["next"], local.token.hex(), offered]
    with own:  # kept for all requests: another process of this host may change the token for new connections
        reported, plan = read_reports(_gathered(stage)), stage.decision
        epoch, token = plan["epoch"], bytes.fromhex(plan["token"])
        fence = {"op": "fence", "epoch": epoch, "before": plan["before"], "rank": agreement.rank}
        local = local._replace(token=token)
        pace = Pace(options.bytes_per_second)

        def prepare() -> None:
            reached = [Member(*member) for members in _gathered(stage) for member in members]
            with Session(job, local, make_view(epoch, reported, reached, options), token, Pace(None)) as leading:
                spread(leading, {"op": "prepare", "epoch": epoch}, leading.view.encode())

        with agreement.stage("fence") as stage:
            stage.decide = prepare
            answer, _ = own.call({**fence, "token": plan["token"], "limit": options.limit, "run": run})
            acts = answer["acts"]
            left = [Member(*member) for member in plan["left"][agreement.rank :: agreement.size]]
            threads = IOThreads(min(len(left), _FENCES) or 1)
            fenced = map_ordered(threads, left, lambda member: _is_fenced(member, token, fence))
            readers = [member for member, is_fenced in zip(left, fenced, strict=True) if is_fenced]
            stage.payload = [list(member) for member in readers]
        with agreement.stage("entries"):
            # With the next view as answer.
            _, encoded = own.call({"op": "hand_over", "epoch": epoch} if acts else {"op": "view", "next": True})
            session = Session(job, local, View.decode(bytes(encoded)), token, pace, start)
            session.server(session.view.by_id[local.id]).adopt(own)
            for member in readers:
                _hand_over(session, member, bytes(encoded))
    with agreement.stage("install") as stage:  # all entries are where the new view expects them
        stage.decide = lambda: merge_plans(stage.payloads)
        stage.payload = install_view(session) if acts else None
    restore_blobs(session, stage.decision, acts=acts)
    JOINED.join(session)
    return session


def _gathered(stage: Stage) -> Sequence[Any]:
    """Return the payloads of all processes on the leader, and only that of this process on others."""
    return stage.payloads or [stage.payload]


def read_reports(payloads: Sequence[Any]) -> Mapping[str, Server]:
    """Return the servers that processes reported, by id, in the order of their first ranks."""
    return {
        member[0]: Server(Member(*member), epoch, view, following, bytes.fromhex(token), offered)
        for member, epoch, view, following, token, offered in payloads
    }


def plan_takeover(reported: Mapping[str, Server], found: Mapping[str, Server], before: View | None, least: int) -> JSON:
    """On the leader, return what the processes have to do: the new incarnation, and the servers that left the job.

    Args:
        reported: the servers of the job's hosts.
        found, before: see `discover`.
        least: the lowest number that the incarnation may get.
    """
    servers = found.values()
    having = [server for server in servers if before is None or server.view == before.epoch]
    members = [] if before is None else before.members
    return {
        "epoch": max(least, *[server.epoch + 1 for server in servers]),
        "before": 0 if before is None else before.epoch,
        "token": having[0].token.hex(),
        "left": [list(member) for member in members if member.id in found and member.id not in reported],
    }


def _is_fenced(member: Member, token: bytes, fence: Header) -> bool:
    """Fence a server that left the job. Return False if it is lost."""
    try:
        with ServerConnections(member.host, member.port, token) as server:
            server.call(fence)
    except ServerLostError as error:
        logger.warning("the memory of a host that left the job is lost: %s", error)
        return False
    return True


def _hand_over(session: Session, member: Member, encoded: bytes) -> None:
    """Make the server of a host that left the job hand over its entries. It counts as lost if it cannot.

    Raises:
        StorageFullError: they do not fit on a host of the job.
    """
    try:
        session.server(member).call({"op": "hand_over", "epoch": session.view.epoch}, encoded)
    except StorageFullError:
        raise  # it does not concern that host, which may be the last to know some of the entries
    except StorageError as error:
        logger.warning("a host that left the job cannot hand over what it knows: %s", error)


def make_view(epoch: int, reported: Mapping[str, Server], left: Sequence[Member], options: MemoryOptions) -> View:
    """Return the view of a new incarnation.

    Args:
        epoch: its number.
        reported: the servers of its hosts.
        left: the servers on hosts that left the job.
        options: the options of the leader.

    Raises:
        StorageError: the fragments of an object need more failure domains.
    """
    wanted = options.needed + options.copies
    members = members_in_domains(list(reported.values()), wanted)
    domains = len({member.domain for member in members})
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
    return View(epoch, [*members, *readers], options.copies, options.needed)


def members_in_domains(servers: Sequence[Server], wanted: int) -> Sequence[Member]:
    """Return the members of the job's hosts, in the failure domains that the launcher names, or each host in its own.

    Domains of the launcher are used if objects can be in as many of them as they need, and if no host has to hold much
    more than others then: a switch with one host could not hold copies of all others.

    Args:
        servers: the servers of the hosts.
        wanted: the number of domains that each object needs.
    """
    hosts = [server.member for server in servers]
    if not any(server.offered for server in servers):
        return hosts
    members = [server.member._replace(domain=server.offered or server.member.domain) for server in servers]
    domains = len({member.domain for member in members})
    held = Counter([name for holders in place(members, wanted).values() for name in holders])
    is_used = domains >= wanted and max(held.values()) <= wanted + 1
    logger.info(
        "failure domains of steps in memory: %s; the launcher names %d, each object needs %d, and a host would hold "
        "parts of up to %d",
        "those of the launcher" if is_used else "each host", domains, wanted, max(held.values()),
    )  # fmt: skip
    return members if is_used else hosts
