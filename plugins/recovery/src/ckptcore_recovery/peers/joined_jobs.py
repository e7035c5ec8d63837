"""The jobs whose memory this process uses."""

from __future__ import annotations

import os
from typing import Final

from ckptcore.errors import ObjectNotFoundError
from ckptcore.io.threads import reset_in_children
from ckptcore_recovery.peers.connections import Pace, ServerConnections
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.starting import find_server
from ckptcore_recovery.peers.views import View


class JoinedJobs:
    """The sessions of this process, by the name of the job that it joined. Thread-safe."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def join(self, session: Session) -> None:
        """Use a session for all later operations of this process, and of its children, on its job."""
        reset_in_children(session)
        self._sessions[session.job] = session

    def find(self, job: str) -> Session | None:
        """Return the session of a job that this process joined, or None."""
        return self._sessions.get(job)


JOINED: Final = JoinedJobs()
"""The jobs of this process."""


def session_of(job: str) -> Session:
    """Return the session of a job: the one that this process joined, or one to read with the view of this host.

    Raises:
        ObjectNotFoundError: this host has no memory server of the job.
        StorageError: the server of this host does not answer.
    """
    joined = JOINED.find(job)
    if joined is not None:
        return joined
    local = find_server(job)
    if local is None:
        raise ObjectNotFoundError(f"host {os.uname().nodename} has no memory server of job {job}; read it on its hosts")
    with ServerConnections(local.interface, local.port, local.token) as server:
        _, encoded = server.call({"op": "view"})
    session = Session(job, local, View.decode(bytes(encoded)), local.token, Pace(None))
    reset_in_children(session)
    return session
