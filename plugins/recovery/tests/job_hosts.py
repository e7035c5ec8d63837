"""A job whose hosts are threads of this process, each with a memory server of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ckptcore_recovery.peers.connections import ServerConnections
from ckptcore_recovery.peers.joining import MemoryOptions, join_job
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.starting import LocalServer, find_server
from ckptcore_testing.thread_coordinator import ThreadJob

from ckptcore.job.agreement import Agreement
from ckptcore.protocols import Coordinator


class Hosts:
    """A job whose hosts are threads of this process, each with a memory server of its own.

    Attributes:
        job: the name of the job.
        options: the options of each host's memory.
    """

    def __init__(self, directory: Path, options: MemoryOptions) -> None:
        self.job = f"test-{uuid.uuid4().hex[:12]}"
        self.options = options
        self._directory = directory
        self._joined = 0
        self._sessions: list[Session] = []

    def base(self, host: str) -> str:
        """Return the directory of a host's memory servers."""
        return str(self._directory / host)

    def join(self, *hosts: str, domains: Mapping[str, str] = MappingProxyType({}), least: int = 1) -> Sequence[Session]:
        """Start the job, and wait until lost copies have been made again. See `start`."""
        sessions = self.start(*hosts, domains=domains, least=least)
        for session in sessions:
            session.wait_for_copies()
        return sessions

    def start(
        self, *hosts: str, domains: Mapping[str, str] = MappingProxyType({}), least: int = 1
    ) -> Sequence[Session]:
        """Start the job on some hosts, with one process on each. Return the session of each process.

        Args:
            hosts: the host of each process.
            domains: the failure domain of each host; a host without one is a domain by itself.
            least: see `join_job`.
        """
        self._joined += 1
        threads = ThreadJob(len(hosts))

        def join(coordinator: Coordinator) -> Session:
            host = hosts[coordinator.rank]
            options = replace(self.options, base=self.base(host), domain=domains.get(host))
            return join_job(self.job, Agreement(coordinator, f"join {self._joined}"), options, least=lambda: least)

        sessions = threads.run(join)
        self._sessions.extend(sessions)
        return sessions

    def server(self, host: str) -> LocalServer | None:
        """Return the server of a host; None if it was not started."""
        return find_server(self.job, self.base(host))

    def member(self, host: str) -> str:
        """Return the id of the memory of a host."""
        server = self.server(host)
        assert server is not None
        return server.id

    def kill(self, host: str) -> None:
        """Kill the server of a host. Its files stay, as after a kill of the process."""
        (pid,) = self.pids(host)
        os.kill(pid, signal.SIGKILL)

    def lose(self, host: str) -> None:
        """Lose a host: its server and its memory."""
        self.kill(host)
        os.rename(self.base(host), f"{self.base(host)}.lost-{uuid.uuid4().hex[:8]}")

    def pids(self, host: str) -> list[int]:
        """Return the process of a host's server, if there is one."""
        server = self.server(host)
        return [] if server is None else [_pid(server.directory / "server.json")]

    def forget(self) -> None:
        """Close the connections of all sessions, as if their processes were killed."""
        for session in self._sessions:
            session.close()
        self._sessions.clear()

    def close(self) -> None:
        """Kill all servers that this object started, and close the connections to them."""
        self.forget()
        for path in self._directory.glob("*/*/server.json"):
            with contextlib.suppress(ProcessLookupError):  # it was killed before, or has ended
                os.kill(_pid(path), signal.SIGKILL)


def _pid(path: Path) -> int:
    return int(json.loads(path.read_bytes())["pid"])


def connect(server: LocalServer) -> ServerConnections:
    """Connect to a server as a process of its host."""
    return ServerConnections(server.interface, server.port, server.token)
