"""A simulated job of 100,000 hosts with steps in their memory: the work of the leader and of its memory server.

The real code agrees, fences, makes the view, hands over entries, finds what lost hosts held, lists and deletes. The
messages of other processes are made by the real code as well, and go through a dictionary. The servers of other hosts
are simulated: they answer for all members to which they would pass a request on. The time of others is not counted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Self
from unittest.mock import patch

from ckptcore_recovery.peers import discovery, joining, spreading
from ckptcore_recovery.peers.connections import ServerLostError
from ckptcore_recovery.peers.copies import repairs
from ckptcore_recovery.peers.host_memory import Entry, HostMemory
from ckptcore_recovery.peers.joining import MemoryOptions, join_job
from ckptcore_recovery.peers.messages import PIECE_BYTES, Header, raise_error
from ckptcore_recovery.peers.server import MemoryServer
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import Part, Reached
from ckptcore_recovery.peers.starting import LocalServer
from ckptcore_recovery.peers.views import Member, View

from benchmarks.scale_transport import SimulatedCoordinator, Wire
from ckptcore.errors import ObjectNotFoundError
from ckptcore.job.agreement import Agreement, Stage, encode_outcome
from ckptcore.job.gathering import Gathering
from ckptcore.model.tree import JSON

_TOKEN: Final = b"t" * 32
_BYTES: Final = 1 << 20
"""The size of the object that each process saves."""


class MemoryJob:
    """A simulated job with one process on each host. Some hosts were lost, and others are in their place.

    Attributes:
        size: the number of hosts.
        seconds: CPU seconds of the leader and its server, by what they did.
        messages: requests that they sent, by what they did.
        nbytes: the bytes of these requests and their answers.
    """

    def __init__(self, size: int, lost: int, directory: Path) -> None:
        """Save a step in the earlier incarnation.

        Args:
            size: the number of hosts.
            lost: the number of hosts that were lost. Not the leader's.
            directory: an empty directory.
        """
        self.size = size
        self.seconds: dict[str, float] = {}
        self.messages: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self._what = "start"
        self._others = 0.0
        self._wire = Wire()
        members = [_member(number) for number in range(size)]
        self._before = View(1, members, copies=1)
        replaced = range(1, size, max(1, size // lost))
        self._members = [_member(size + n) if n in replaced and n // replaced.step < lost else _member(n)
                         for n in range(size)]  # fmt: skip
        self._lost = {member.host for member in members}.difference([member.host for member in self._members])
        self._entries = {
            f"steps/100/shard-{number + 1:06}-model-00001-of-00001.safetensors": Entry(
                1 << 40, _BYTES, None, f"{number:032x}", self._before.holders(member.id)
            )
            for number, member in enumerate(members)
        }
        own = directory / "job"
        own.mkdir()
        (own / "view").write_bytes(self._before.encode())
        memory = HostMemory(own, 1 << 30)
        memory.fence(1)
        memory.merge({key: entry for key, entry in self._entries.items() if members[0].id in self._before.home(key)})
        self._server = MemoryServer(memory, members[0].id, _TOKEN, 900).handler
        self._local = LocalServer(own, members[0].id, members[0].host, members[0].port, _TOKEN)

    @cached_property
    def _view(self) -> View:
        """The view of the new incarnation, as other processes have it."""
        return View(2, self._members, copies=1)

    @cached_property
    def _by_number(self) -> Sequence[Sequence[tuple[str, int]]]:
        """The keys with sizes that each member decides about."""
        keys: list[list[tuple[str, int]]] = [[] for _ in range(self.size)]
        for key, entry in self._entries.items():
            keys[self._view.home_number(key)].append((key, entry.size))
        return keys

    @cached_property
    def _missing(self) -> Mapping[str, Mapping[str, JSON]]:
        """The blobs that the process on each host finds missing, by the id of its server."""
        missing: dict[str, dict[str, list[JSON]]] = {}
        for key, entry in self._entries.items():
            for repair in repairs(self._view, key, entry):
                of_host = missing.setdefault(self._view.home(key)[0], {})
                of_host.setdefault(repair.member_id, []).append([key, repair.place])
        return {name: dict(plan) for name, plan in missing.items()}

    def run(self) -> None:
        """Start the job, list the steps, and delete one."""
        with ExitStack() as stack:
            connect = partial(_Server, self)
            own = self._local, connect(self._local.interface)
            stack.enter_context(patch.object(joining, "ensure_server", lambda *names, **options: own))
            stack.enter_context(patch.object(joining, "ServerConnections", connect))
            stack.enter_context(patch.object(discovery, "ServerConnections", connect))
            stack.enter_context(patch.object(Session, "server", lambda session, member: connect(member.host)))
            agreement = _LeaderAgreement(SimulatedCoordinator(self._wire, range(self.size), 0), "join", self)
            with self._timed("start"):
                session = join_job("job", agreement, MemoryOptions(1 << 30))
            with self._timed("list"):
                sizes = spreading.sizes_below(session, "steps/")
            if sizes != {key: entry.size for key, entry in self._entries.items()}:
                raise AssertionError(f"{len(sizes)} of {self.size} objects are listed")
            with self._timed("delete"):
                spreading.delete(session, list(sizes))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        self._what, self._others, start = what, 0.0, time.process_time()
        yield
        self.seconds[what] = time.process_time() - start - self._others

    @contextmanager
    def elsewhere(self, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
        """Do in the body what other hosts do: its time is not counted."""
        start = clock()
        try:
            yield
        finally:
            self._others += clock() - start

    def say(self, key: str, stage: str, *, tokens: bool) -> None:
        """Send the messages of all other processes in a stage; the first process of each block is the last."""
        for block in Gathering(SimulatedCoordinator(self._wire, range(self.size), 0)).blocks:
            for rank in reversed(block):
                if rank:
                    coordinator = SimulatedCoordinator(self._wire, range(self.size), rank)
                    outcome = encode_outcome(f"{rank:016x}" if tokens else None, self._payload(stage, rank))
                    Gathering(coordinator).gather(key, outcome)

    def _payload(self, stage: str, rank: int) -> JSON:
        member = self._members[rank]
        if stage == "servers":
            is_spare = member.id not in self._before.by_id
            number = 0 if is_spare else 1  # of the incarnation that fenced it, and whose view it has
            return [list(member), number, number, 0, _TOKEN.hex(), None]
        if stage == "fence":
            return []
        return dict(self._missing.get(member.id, {})) if stage == "install" else None

    def answer(self, host: str, header: Header, payload: bytes) -> tuple[Header, bytes]:
        """Answer a request to the server of a host."""
        if host == self._local.interface:
            answer, data = self._server.answer(1, header, memoryview(payload))
            return answer, bytes(data)
        if host in self._lost:
            raise ServerLostError(f"{host} is lost")
        with self.elsewhere():
            operation = header["op"]
            if operation == "spread":
                return {}, self._spread(header["request"], payload, Part(header["first"], header["count"])).encode()
            if operation == "find":
                if header["key"] not in self._entries:
                    raise ObjectNotFoundError(header["key"])
                return {"entry": self._entries[header["key"]].encode()}, b""
            if operation == "reserve":
                present = self._entries.pop(header["key"], None)
                return {"version": 1 << 42, "present": None if present is None else present.encode()}, b""
            return {}, b""

    def _spread(self, request: Header, payload: bytes, part: Part) -> Reached:
        numbers = [number % self.size for number in range(part.first, part.first + part.size)]
        if request["op"] == "delete":
            for key in json.loads(payload):
                if (self._view.home_number(key) - part.first) % self.size >= part.size:
                    raise AssertionError(f"{key} belongs to another member")
                del self._entries[key]
        if request["op"] != "sizes":
            return Reached()
        after = request["after"] or ""
        return spreading.page_of(sorted([item for n in numbers for item in self._by_number[n] if item[0] > after]))

    def count(self, nbytes: int) -> None:
        """Count a request with its answer."""
        self.messages[self._what] += 1
        self.nbytes[self._what] += nbytes


class _Server:
    """Connections to a server, with the methods of `ServerConnections`."""

    def __init__(self, job: MemoryJob, host: str, port: int = 0, token: bytes = b"", **options: object) -> None:
        self.place = host
        self._job = job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def adopt(self, other: _Server) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def call(
        self, header: Header, payload: memoryview | bytes = b"", place: Callable[..., memoryview] | None = None
    ) -> tuple[Mapping[str, Any], memoryview]:
        """See `ServerConnections.call`."""
        request = json.dumps(dict(header))
        answer, data = self._job.answer(self.place, json.loads(request), bytes(payload))
        encoded = json.dumps(dict(answer))
        raise_error(answer, self.place)
        if max(len(payload), len(data)) > PIECE_BYTES:
            raise AssertionError(f"a message of {len(payload)} and {len(data)} bytes is too large")
        self._job.count(len(request) + len(payload) + len(encoded) + len(data))
        return json.loads(encoded), memoryview(data)


class _LeaderAgreement(Agreement):
    """The exchanges of the leader. The other processes send their messages when the leader waits for them."""

    def __init__(self, coordinator: SimulatedCoordinator, key: str, job: MemoryJob) -> None:
        super().__init__(coordinator, key)
        self._job = job

    def _exchange(
        self, name: str, outcome: bytes, token: str | None, stage: Stage, decide: Callable[[], JSON] | None
    ) -> Any:
        with self._job.elsewhere(time.process_time):  # it starts threads, and nothing else runs
            self._job.say(f"{self._key}/{name}", name, tokens=token is not None)
        return super()._exchange(name, outcome, token, stage, decide)


def _member(number: int) -> Member:
    name = hashlib.sha256(number.to_bytes(8, "big")).hexdigest()[:16]
    host = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    return Member(name, host, 20000 + int(name[:3], 16), name)


def main(arguments: Sequence[str]) -> None:
    """Simulate a job, and write its measurements."""
    size, output = arguments
    directory = Path(tempfile.mkdtemp(prefix="scale-memory-"))
    try:
        job = MemoryJob(int(size), max(1, int(size) // 1000), directory)
        job.run()
    finally:
        shutil.rmtree(directory)
    measured = {"seconds": job.seconds, "messages": job.messages, "nbytes": job.nbytes}
    Path(output).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
