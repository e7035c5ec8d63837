"""A job joins its memory: its processes start the servers of their hosts, fence the previous incarnation, and agree.

Copies protect against the loss of as many hosts as there are copies. A job that starts again finds the servers that are
left: those of the hosts of its processes, and those of hosts that left the job. It takes over what they know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ckptcore.commit.locks import OWNER
from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore_recovery.peers.connections import Pace, ServerConnections, ServerLostError
from ckptcore_recovery.peers.copies import restore_copies
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.session import JOINED, Session
from ckptcore_recovery.peers.starting import LocalServer, ensure_server
from ckptcore_recovery.peers.views import Member, View, place_copies

logger = logger_named("ckptcore.recovery")

_PAGE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of the memory of a host.

    Attributes:
        limit: the maximum bytes in memory.
        copies: the number of copies on other hosts.
        interface: the address on which the server of this host listens, and at which other hosts reach it.
        domain: what fails together with this host; None: the host alone.
        idle_seconds: the server ends after this time without a process of the job.
        bytes_per_second: the maximum rate of each process; None for no limit.
        base: the directory of all memory servers of this host; None: the default.
    """

    limit: int
    copies: int = 1
    interface: str = "127.0.0.1"
    domain: str | None = None
    idle_seconds: float = 900.0
    bytes_per_second: float | None = None
    base: str | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A server that a process of the job reported.

    Attributes:
        member: the server.
        epoch: the last incarnation that fenced it.
        token: its token.
    """

    member: Member
    epoch: int
    token: bytes

    def connect(self) -> ServerConnections:
        return ServerConnections(self.member.host, self.member.port, self.token)


def join_job(job: str, agreement: Agreement, options: MemoryOptions) -> Session:
    """Join the memory of a job as a new incarnation. Called on every rank; later calls of this process use the result.

    Args:
        job: the name of the job.
        agreement: an exchange between its processes.
        options: the options; those of rank 0 count for `copies`.

    Raises:
        StorageError: the server of this host cannot be started.
        RankFailedError: that of another host cannot be started.
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
        stage.payload = [local.id, local.interface, local.port, domain, status["epoch"], local.token.hex()]
    reports = stage.payloads or [stage.payload]
    plan: Any = agreement.lead("plan", lambda: _plan(reports))
    epoch, is_first = plan["epoch"], plan["firsts"][local.id] == agreement.rank
    with agreement.stage("fence"), own:
        if is_first:
            own.call({"op": "fence", "epoch": epoch})
    encoded: Any = agreement.lead("view", lambda: _take_over(reports, epoch, options.copies))
    view, token = View.decode(encoded["view"]), bytes.fromhex(encoded["token"])
    with agreement.stage("install"), own:
        if is_first:
            own.call({"op": "install", "view": view.encode(), "token": token.hex()})
    local = local._replace(token=token)
    session = Session(job, local, view, token, Pace(options.bytes_per_second), start)
    with agreement.stage("sweep"):
        if is_first:
            _sweep(session, local)
    restore_copies(session, agreement, is_first=is_first)
    JOINED.join(session)
    return session


def _reported(reports: Sequence[Any]) -> Mapping[str, _Found]:
    """Return the servers that the processes of the job reported, by id."""
    return {
        name: _Found(Member(name, host, port, domain), epoch, bytes.fromhex(token))
        for name, host, port, domain, epoch, token in reports
    }


def _plan(reports: Sequence[Any]) -> JSON:
    """Return the number of the incarnation, and for each server the rank that acts for it."""
    firsts: dict[str, JSON] = {}
    for rank, report in enumerate(reports):
        firsts.setdefault(report[0], rank)
    return {"epoch": max(found.epoch for found in _reported(reports).values()) + 1, "firsts": firsts}


def _take_over(reports: Sequence[Any], epoch: int, copies: int) -> JSON:
    """On the leader, fence the servers of hosts that left the job, and bring the entries to their new members.

    All servers of the job's hosts are fenced already.
    """
    found = _reported(reports)
    newest = max(found.values(), key=lambda server: server.epoch)
    with newest.connect() as server:
        answer, _ = server.call({"op": "view"})
    before = View.decode(answer["view"]) if answer["view"] else None
    readers = [] if before is None else _fence_others(before, found, newest.token, epoch)
    members = [server.member for server in found.values()]
    placed = place_copies(members, copies)
    if copies and len({member.domain for member in members}) <= copies:
        logger.warning(
            "steps in memory have fewer than %d copies: the job has hosts in %d failure domains",
            copies, len({member.domain for member in members}),
        )  # fmt: skip
    leading = reports[0][0]
    view = View(epoch, [*members, *readers], copies, placed[leading])
    entries = {} if before is None else _collect(before, found, readers, newest.token)
    for name in view.home:
        _load(found[name], entries, epoch)
    return {"view": view.encode(), "token": newest.token.hex()}


def _fence_others(before: View, found: Mapping[str, _Found], token: bytes, epoch: int) -> list[Member]:
    """Fence the members of the previous view that no process reported. Return those that answer, as readers."""
    readers: list[Member] = []
    for member in before.members:
        if member.id in found:
            continue
        try:
            with ServerConnections(member.host, member.port, token) as server:
                status, _ = server.call({"op": "status"})
                if status["id"] != member.id:
                    continue  # another server has its address now
                server.call({"op": "fence", "epoch": epoch})
        except StorageError as error:
            logger.warning("the memory of a host that left the job is lost: %s", error)
            continue
        readers.append(member._replace(is_reader=True))
    return readers


def _collect(before: View, found: Mapping[str, _Found], readers: Sequence[Member], token: bytes) -> Mapping[str, Entry]:
    """Return the newest entry of each key from the members of the previous view that held the entries.

    Leaves out the leases of the previous owner of a directory, which is fenced.
    """
    reachable = {name: server.connect() for name, server in found.items()}
    reachable.update({member.id: ServerConnections(member.host, member.port, token) for member in readers})
    entries: dict[str, Entry] = {}
    sources = 0
    for name in before.home:
        if name not in reachable:
            continue
        try:
            with reachable[name] as server:
                dumped = _dump(server)
            for key, entry in dumped:
                present = entries.get(key)
                if present is None or present.version < entry.version:
                    entries[key] = entry
            sources += 1
        except ServerLostError as error:
            logger.warning("cannot read what the memory server %s knows: %s", name, error)
    if not sources:
        logger.warning("the steps in memory are lost: none of the %d hosts that know them is left", len(before.home))
    return {key: entry for key, entry in entries.items() if not entry.is_deleted and not _is_lease_of_owner(key)}


def _is_lease_of_owner(key: str) -> bool:
    return f"/{OWNER}" in f"/{key}"


def _dump(server: ServerConnections) -> list[tuple[str, Entry]]:
    entries: list[tuple[str, Entry]] = []
    while True:
        answer, payload = server.call({"op": "dump", "after": entries[-1][0] if entries else None})
        entries.extend([(key, Entry.decode(encoded)) for key, encoded in json.loads(bytes(payload))])
        if not answer["more"]:
            return entries


def _load(server: _Found, entries: Mapping[str, Entry], epoch: int) -> None:
    """Replace the entries of a member."""
    page: list[JSON] = []
    nbytes = 0
    is_first = True

    def send() -> None:
        nonlocal page, nbytes, is_first
        connections.call({"op": "load", "epoch": epoch, "is_first": is_first}, json.dumps(page).encode("ascii"))
        page, nbytes, is_first = [], 0, False

    with server.connect() as connections:
        for key, entry in entries.items():
            page.append([key, entry.encode()])
            nbytes += len(key) * 6 + len(entry.data or b"") * 4 // 3 + 300
            if nbytes > _PAGE_BYTES:
                send()
        send()


def _sweep(session: Session, local: LocalServer) -> None:
    """Free the blobs of this host that no object refers to: those of saves that were killed."""
    answer, _ = session.ask_home({"op": "blobs", "holder": local.id})
    member = session.view.by_id[local.id]
    session.server(member).call({"op": "keep", "epoch": session.view.epoch, "blobs": answer["blobs"]})
