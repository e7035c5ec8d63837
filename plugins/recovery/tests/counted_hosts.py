"""A job whose hosts are threads, with memory servers in this process: messages and bytes of each host are counted."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import pytest
from ckptcore_recovery.peers import discovery, joining, session
from ckptcore_recovery.peers.connections import ServerLostError
from ckptcore_recovery.peers.host_memory import HostMemory
from ckptcore_recovery.peers.joining import MemoryOptions, join_job
from ckptcore_recovery.peers.messages import Header, PayloadError, Place, checksums_of, raise_error
from ckptcore_recovery.peers.request_handler import RequestHandler
from ckptcore_recovery.peers.server import MemoryServer
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.starting import LocalServer
from ckptcore_recovery.peers.storage import PeerStorage
from ckptcore_recovery.peers.views import Member
from ckptcore_testing.thread_coordinator import ThreadJob

import ckptcore
from ckptcore.context import JobOptions, PluginOptions
from ckptcore.hookspecs import hookimpl
from ckptcore.job.agreement import Agreement
from ckptcore.protocols import Coordinator, StorageBackend, StorageOpener, StorageOptions

T = TypeVar("T")

TOKEN = b"t" * 32


class CountedHosts:
    """Hosts with a memory server each, in this process.

    Attributes:
        messages: the requests that processes and servers of a host sent or received, by host.
        nbytes: the bytes of the requests and of their answers, by host.
        servers: the servers by host; one that is removed is lost.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the connections to servers."""
        self.messages: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.servers: dict[str, RequestHandler] = {}
        self._directory = directory
        self._lock = threading.Lock()
        self._joined = 0

        def ensure(job: str, *, limit: int, base: str, **options: object) -> tuple[LocalServer, CountedConnections]:
            with self._lock:
                if base not in self.servers:
                    at = directory / base / job
                    at.mkdir(parents=True)
                    self.servers[base] = MemoryServer(HostMemory(at, limit), f"id of {base}", TOKEN, 900).handler
            local = LocalServer(directory / base / job, f"id of {base}", base, 1, TOKEN)
            return local, CountedConnections(self, base, base)

        def server(user: Session, member: Member) -> CountedConnections:
            sender = None if user.local is None else user.local.id.removeprefix("id of ")
            return CountedConnections(self, sender, member.host)

        def connect(host: str, port: int, token: bytes, **options: object) -> CountedConnections:
            return CountedConnections(self, host, host)

        monkeypatch.setattr(joining, "ensure_server", ensure)
        for module in (joining, discovery):
            monkeypatch.setattr(module, "ServerConnections", connect)
        monkeypatch.setattr(session.Session, "server", server)

    def join(
        self, *hosts: str, options: MemoryOptions, domains: Mapping[str, str] = MappingProxyType({})
    ) -> list[Session]:
        """Start the job with one process on each host. Return the session of each.

        Args:
            hosts: the host of each process.
            options: the options of each host's memory.
            domains: the failure domain of each host; a host without one is a domain by itself.
        """
        self._joined += 1

        def join(coordinator: Coordinator) -> Session:
            host = hosts[coordinator.rank]
            own = replace(options, base=host, domain=domains.get(host))
            return join_job("job", Agreement(coordinator, f"join {self._joined}"), own)

        sessions = list(ThreadJob(len(hosts)).run(join))
        for joined in sessions:
            joined.wait_for_copies()
        return sessions

    def run(self, hosts: Sequence[str], job: Callable[[int, ckptcore.Context], T], options: MemoryOptions) -> list[T]:
        """Start a job with one process on each host: a function of the rank and of a Context that has its memory.

        Its steps have the scheme ``counted``.
        """
        sessions = self.join(*hosts, options=options)

        def run(coordinator: Coordinator) -> T:
            plugins = PluginOptions(extra=(_Plugin(sessions[coordinator.rank]),))
            return job(coordinator.rank, ckptcore.Context(job=JobOptions(coordinator=coordinator), plugins=plugins))

        return list(ThreadJob(len(hosts)).run(run))

    def most(self) -> tuple[int, int]:
        """Return the most messages and bytes of a host since the last call."""
        with self._lock:
            most = max(self.messages.values()), max(self.nbytes.values())
            self.messages.clear()
            self.nbytes.clear()
        return most

    def count(self, sender: str | None, receiver: str, nbytes: int) -> None:
        """Count a request with its answer."""
        with self._lock:
            for host in {sender, receiver}:
                if host is not None:
                    self.messages[host] += 1
                    self.nbytes[host] += nbytes


def _received(payload: memoryview | bytes, place: Place | None, header: Header) -> memoryview:
    """Return a payload as `Connection.receive` does."""
    if header.get("checksums", checksums_of(memoryview(payload))) != checksums_of(memoryview(payload)):
        raise PayloadError("the payload was changed before it was sent")
    blocks = None if place is None or not len(payload) else place(header, len(payload))
    if blocks is None:
        return memoryview(bytearray(payload))
    begin = 0
    for block in blocks:
        block[:] = payload[begin : begin + len(block)]
        begin += len(block)
    assert begin == len(payload)
    return memoryview(b"")


class _Plugin:
    """Opens the memory of a job as one process uses it."""

    def __init__(self, joined: Session) -> None:
        self._session = joined

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Openers by scheme."""
        return {"counted": self._open}

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return PeerStorage("job", url.partition("://")[2] + "/", self._session)


class CountedConnections:
    """Connections to a server of `CountedHosts`, with the methods of `ServerConnections`."""

    def __init__(self, hosts: CountedHosts, sender: str | None, receiver: str) -> None:
        self.place = receiver
        self._hosts = hosts
        self._sender = sender

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(
        self,
        header: Header,
        payload: memoryview | bytes = b"",
        place: Place | None = None,
    ) -> tuple[dict[str, Any], memoryview]:
        """See `ServerConnections.call`."""
        server = self._hosts.servers.get(self.place)
        if server is None:
            raise ServerLostError(f"host {self.place} is lost")
        sent = json.dumps(dict(header)).encode()
        request = json.loads(sent)
        answer, data = server.answer(1, request, _received(payload, server.place, request))
        answered = json.dumps(dict(answer)).encode()
        self._hosts.count(self._sender, self.place, len(sent) + len(payload) + len(answered) + len(data))
        raise_error(answer, self.place)
        return json.loads(answered), _received(data, place, answer)

    def adopt(self, other: CountedConnections) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
