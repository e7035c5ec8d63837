"""Discovery: the memory servers that a job which starts can reach, and the newest view, whose entries it takes over.

A host that returns after a while knows only the members of its time. They, or the members that they know, have a newer
view. So the job asks on, until the members of the newest view are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.model.tree import JSON
from ckptcore_recovery.peers.connections import ServerConnections, ServerLostError
from ckptcore_recovery.peers.views import Member, View

logger = logger_named("ckptcore.recovery")


class Report(NamedTuple):
    """What is known about a memory server before the job has a view.

    Attributes:
        id, host, port, domain: see `Member`.
        epoch: the last incarnation that fenced the server.
        view: the incarnation whose view the server has; 0 for none.
        next: the incarnation whose view the server has received and not yet installed; 0 for none.
        token: its token, in hexadecimal digits.
    """

    id: str
    host: str
    port: int
    domain: str
    epoch: int
    view: int
    next: int
    token: str

    @property
    def member(self) -> Member:
        """The server as a member."""
        return Member(self.id, self.host, self.port, self.domain)

    @classmethod
    def ask(cls, member: Member, token: bytes) -> Self | None:
        """Return the report of a server; None if it does not answer.

        Args:
            member: the server; its `is_reader` is ignored.
            token: the secret of the job.
        """
        try:
            with ServerConnections(member.host, member.port, token) as server:
                status, _ = server.call({"op": "status"})
        except StorageError as error:
            logger.warning("the memory of a host that left the job is lost: %s", error)
            return None
        if status["id"] != member.id:
            return None  # another server has its address now
        return cls(*member[:4], status["epoch"], status["view"], status["next"], token.hex())


class Discovery:
    """The leader's search for the newest view.

    Attributes:
        own: the reports of the processes of the job.
    """

    def __init__(self, own: Sequence[Report]) -> None:
        """Take what the processes of the job report about the servers of their hosts."""
        self.own = own
        self._known = {report.id: report for report in own}
        self._asked: set[str] = set()
        self._views: dict[int, View] = {}

    def add(self, reports: Iterable[Report]) -> None:
        """Add the servers that answered."""
        self._known.update({report.id: report for report in reports})

    def plan(self) -> dict[str, JSON]:
        """Return servers to ask for reports; if there are none, the new incarnation and what it takes over.

        Returns:
            "ask": members to ask. "token": the token of the memory. If "ask" is empty, also "epoch": the number of the
            new incarnation; "before": the incarnation of the newest view, or 0; "left": its members on other hosts.

        Raises:
            StorageError: no server with a view answers the leader.
        """
        epoch = max(report.epoch for report in self._known.values()) + 1
        known = {*self._known, *self._asked}
        for before in sorted({report.view for report in self._known.values()} - {0}, reverse=True):
            having = [report for report in self._known.values() if report.view == before]
            view = self._view_of(having)
            others = [member for member in view.members if member.id not in known]
            token = having[0].token
            if others:
                self._asked.update([member.id for member in others])
                return {"ask": [list(member) for member in others], "token": token}
            if self._may_be_complete(view):
                present = {report.id for report in self.own}
                left: list[JSON] = [
                    list(self._known[member.id].member)
                    for member in view.members
                    if member.id in self._known and member.id not in present
                ]
                return {"ask": [], "token": token, "epoch": epoch, "before": before, "left": left}
        return {"ask": [], "token": self.own[0].token, "epoch": epoch, "before": 0, "left": []}

    def _view_of(self, having: Sequence[Report]) -> View:
        """Return the view that some servers have."""
        failure: ServerLostError | None = None
        for report in having:
            if report.view in self._views:
                return self._views[report.view]
            try:
                with ServerConnections(report.host, report.port, bytes.fromhex(report.token)) as server:
                    _, encoded = server.call({"op": "view"})
            except ServerLostError as error:
                failure = error
                continue
            view = View.decode(bytes(encoded))
            self._views[view.epoch] = view
            return view
        raise StorageError(f"the leader does not reach the servers with the newest view of the memory: {failure}")

    def _may_be_complete(self, view: View) -> bool:
        """Return False if the incarnation of a view has not written anything.

        It writes once all its members have installed the view. A member that has given it up has not installed it, and
        other members may have entries of the incarnation before.
        """
        reports = [self._known[member.id] for member in view.writers if member.id in self._known]
        return all(report.view >= view.epoch or report.next == view.epoch for report in reports)
