"""A job joins its memory: its processes start the servers of their hosts, fence the previous incarnation, and agree.

Copies protect against the loss of as many hosts as there are copies. A job that starts again finds the servers that are
left: those of the hosts of its processes, and those of hosts that left the job. It takes over what they know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ckptcore.commit.locks import OWNER
from ckptcore.events import logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore_recovery.peers.connections import Pace, ServerConnections, ServerLostError
from ckptcore_recovery.peers.copies import restore_copies
from ckptcore_recovery.peers.discovery import Server, discover
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.session import JOINED, Session
from ckptcore_recovery.peers.starting import LocalServer, ensure_server
from ckptcore_recovery.peers.views import Member, View, place_copies

logger = logger_named("ckptcore.recovery")

_PAGE_BYTES: Final = 1 << 20
_THREADS: Final = 32


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
        member = Member(local.id, local.interface, local.port, domain)
        stage.payload = [list(member), status["epoch"], status["view"], local.token.hex()]
    takeover = _Takeover(stage.payloads or [stage.payload], options.copies)  # used on the leader
    plan: Any = agreement.lead("plan", takeover.plan)
    epoch, is_first = plan["epoch"], plan["firsts"][local.id] == agreement.rank
    with agreement.stage("fence"), own:
        if is_first:
            own.call({"op": "fence", "epoch": epoch})
    encoded: Any = agreement.lead("view", partial(takeover.run, epoch))
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


class _Takeover:
    """The leader's part of a start: takes over what the previous incarnation left."""

    def __init__(self, reports: Sequence[Any], copies: int) -> None:
        """Take the report of each rank."""
        self._reported = [
            Server(Member(*member), epoch, view, bytes.fromhex(token)) for member, epoch, view, token in reports
        ]
        self._copies = copies
        self._found: Mapping[str, Server] = {}
        self._before: View | None = None

    @property
    def _own(self) -> Mapping[str, Server]:
        """The servers of the job's hosts, by id."""
        return {server.member.id: server for server in self._reported}

    def plan(self) -> JSON:
        """Return the number of the incarnation, and for each server the rank that acts for it."""
        firsts: dict[str, JSON] = {}
        for rank, server in enumerate(self._reported):
            firsts.setdefault(server.member.id, rank)
        self._found, self._before = discover(self._own)
        return {"epoch": max(server.epoch for server in self._found.values()) + 1, "firsts": firsts}

    def run(self, epoch: int) -> JSON:
        """Fence the servers of hosts that left the job, and bring the entries to their new members.

        All servers of the job's hosts are fenced already.
        """
        own, before = self._own, self._before
        left = [self._found[member.id] for member in before.members if member.id in self._found] if before else []
        others = [server for server in left if server.member.id not in own]
        with ThreadPoolExecutor(_THREADS) as threads:
            fenced = list(threads.map(partial(_fence, epoch=epoch), others))
        readers = [server for server, is_fenced in zip(others, fenced, strict=True) if is_fenced]
        members = [server.member for server in own.values()]
        domains = len({member.domain for member in members})
        if domains <= self._copies:
            logger.warning(
                "steps in memory have fewer than %d copies: the job has hosts in %d failure domains",
                self._copies, domains,
            )  # fmt: skip
        leading = self._reported[0].member.id
        everyone = [*members, *[server.member._replace(is_reader=True) for server in readers]]
        view = View(epoch, everyone, self._copies, place_copies(members, self._copies)[leading])
        known = {**own, **{server.member.id: server for server in readers}}
        entries = {} if before is None else _collect([known[name] for name in before.home if name in known])
        for name in view.home:
            _load(own[name], entries, epoch)
        token = max(self._found.values(), key=lambda server: server.view).token
        return {"view": view.encode(), "token": token.hex()}


def _fence(server: Server, epoch: int) -> bool:
    """Fence the server of a host that left the job. Return False if it is lost."""
    try:
        with server.connect() as connections:
            connections.call({"op": "fence", "epoch": epoch})
    except ServerLostError as error:
        logger.warning("the memory of a host that left the job is lost: %s", error)
        return False
    return True


def _collect(home: Sequence[Server]) -> Mapping[str, Entry]:
    """Return the newest entry of each key from the members of the previous view that held the entries.

    Leaves out the leases of the previous owner of a directory, which is fenced.
    """
    entries: dict[str, Entry] = {}
    sources = 0
    for member in home:
        try:
            with member.connect() as server:
                dumped = _dump(server)
        except ServerLostError as error:
            logger.warning("cannot read what a memory server knows: %s", error)
            continue
        for key, entry in dumped:
            present = entries.get(key)
            if present is None or present.version < entry.version:
                entries[key] = entry
        sources += 1
    if not sources:
        logger.warning("the steps in memory are lost: none of the hosts that know them is left")
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


def _load(server: Server, entries: Mapping[str, Entry], epoch: int) -> None:
    """Replace the entries of a member, once it has received all."""
    page: list[JSON] = []
    nbytes = 0
    is_first = True

    def send(*, is_last: bool) -> None:
        nonlocal page, nbytes, is_first
        header = {"op": "load", "epoch": epoch, "is_first": is_first, "is_last": is_last}
        connections.call(header, json.dumps(page).encode("ascii"))
        page, nbytes, is_first = [], 0, False

    with server.connect() as connections:
        for key, entry in entries.items():
            page.append([key, entry.encode()])
            nbytes += len(key) * 6 + len(entry.data or b"") * 4 // 3 + 300
            if nbytes > _PAGE_BYTES:
                send(is_last=False)
        send(is_last=True)


def _sweep(session: Session, local: LocalServer) -> None:
    """Free the blobs of this host that no object refers to: those of saves that were killed."""
    answer, _ = session.ask_home({"op": "blobs", "holder": local.id})
    member = session.view.by_id[local.id]
    session.server(member).call({"op": "keep", "epoch": session.view.epoch, "blobs": answer["blobs"]})
