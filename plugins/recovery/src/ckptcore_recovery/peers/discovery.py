"""Discovery: the memory servers that a job which starts can reach, and the newest view that one of them has.

A host that returns after a while knows only the members of its time. They, or the members that they know, have a newer
view. So the leader asks on, until the members of the newest view are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.io.threads import IOThreads, map_ordered
from ckptcore_recovery.peers.connections import ServerConnections
from ckptcore_recovery.peers.views import Member, View

logger = logger_named("ckptcore.recovery")

_THREADS: Final = 32
_REACH_SECONDS: Final = 1.5
"""A host that left the job counts as lost if it cannot be reached in this time. The system tries twice."""


class Server(NamedTuple):
    """A memory server that answers.

    Attributes:
        member: the server.
        epoch: the last incarnation of the job that fenced it.
        view: the incarnation whose view it has; 0 for none.
        next: the incarnation whose view it has received and has not installed; 0 for none.
        token: its token.
        offered: the failure domain that the launcher names; None if it names none, or the user another one.
    """

    member: Member
    epoch: int
    view: int
    next: int
    token: bytes
    offered: str | None = None

    def connect(self) -> ServerConnections:
        """Return connections to it."""
        return ServerConnections(self.member.host, self.member.port, self.token)


def discover(reported: Mapping[str, Server]) -> tuple[dict[str, Server], View | None]:
    """Return all servers that can be found, by id, and the newest view that may have been used; None if there is none.

    Args:
        reported: the servers of the job's own hosts.

    Raises:
        StorageError: a server that has a view does not answer any more.
    """
    servers = dict(reported)
    lost: set[str] = set()
    given_up: set[int] = set()
    views: dict[str, View] = {}
    while True:
        newest = max(servers.values(), key=lambda server: 0 if server.view in given_up else server.view)
        if not newest.view or newest.view in given_up:
            return servers, None
        if (name := newest.member.id) not in views:
            with newest.connect() as connections:
                _, encoded = connections.call({"op": "view"})
            views[name] = View.decode(bytes(encoded))
        view = views[name]
        unknown = [member for member in view.members if member.id not in servers and member.id not in lost]
        if not unknown:
            if _may_be_used(view, servers):
                return servers, view
            given_up.add(newest.view)
        asked = map_ordered(IOThreads(min(len(unknown), _THREADS) or 1), unknown, partial(_ask, token=newest.token))
        for member, server in zip(unknown, asked, strict=True):
            if server is None:
                lost.add(member.id)
            else:
                servers[member.id] = server


def _may_be_used(view: View, servers: Mapping[str, Server]) -> bool:
    """Return False if the incarnation of a view has not written anything.

    It writes once all its members have installed the view. A member that will not do so any more has entries of the
    incarnation before, which count.
    """
    found = [servers[member.id] for member in view.writers if member.id in servers]
    return all(server.view >= view.epoch or server.next == view.epoch for server in found)


def _ask(member: Member, token: bytes) -> Server | None:
    """Return the server of a host that is not in the job; None if it is lost."""
    try:
        with ServerConnections(member.host, member.port, token, connect_seconds=_REACH_SECONDS) as connections:
            status, _ = connections.call({"op": "status"})
    except StorageError as error:
        logger.warning("the memory of a host that left the job is lost: %s", error)
        return None
    if status["id"] != member.id:
        return None  # another server has its address now
    return Server(member, status["epoch"], status["view"], status["next"], token)
