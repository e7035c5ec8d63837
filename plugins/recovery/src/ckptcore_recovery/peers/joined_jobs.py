"""The jobs whose memory this process uses."""

from __future__ import annotations

import os
from typing import Final

from ckptcore.errors import StorageError
from ckptcore.io.threads import reset_in_children
from ckptcore_recovery.peers.connections import Pace, ServerConnections, ServerLostError
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE, find_server, server_directory
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
        StorageError: this host has no memory server of the job, or it does not answer. So its steps are unknown.
    """
    joined = JOINED.find(job)
    if joined is not None:
        return joined
    local = find_server(job)
    if local is None:
        raise StorageError(
            f"host {os.uname().nodename} has no memory server of job {job} in {server_directory(job).parent}: run this "
            f"on a host of the job, with the {DIRECTORY_VARIABLE} of the job"
        )
    try:
        with ServerConnections(local.interface, local.port, local.token) as server:
            _, encoded = server.call({"op": "view"})
    except ServerLostError as error:
        raise ServerLostError(
            f"the memory server of job {job} on host {os.uname().nodename} has ended; its steps are still in "
            f"{local.directory}: start the job again, or its server: python -m ckptcore_recovery.peers.server "
            f"{local.directory} --limit BYTES --interface {local.interface} ({error})"
        ) from error
    session = Session(job, local, View.decode(bytes(encoded)), local.token, Pace(None))
    reset_in_children(session)
    return session
