"""A job that starts takes over the newest memory, wherever the previous incarnation or an earlier start stopped."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from ckptcore_recovery.peers import host_memory, messages
from ckptcore_recovery.peers.host_memory import Entry, HostMemory
from ckptcore_recovery.peers.memory_files import write_at
from ckptcore_recovery.peers.server import MemoryServer
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.starting import LocalServer, ensure_server
from ckptcore_recovery.peers.storage import PeerStorage
from ckptcore_recovery.peers.views import Member, View

from ckptcore.errors import ConditionFailedError, SaveLostError
from plugins.recovery.tests.job_hosts import Hosts, connect

pytestmark = pytest.mark.system

LARGE = bytes(range(256)) * (1 << 12)


def storage(session: Session) -> PeerStorage:
    """Return the whole memory of a job as one of its processes uses it."""
    return PeerStorage(session.job, "", session)


def write(session: Session, key: str) -> None:
    """Write an object that is a blob, and a small one."""
    writer = storage(session).open_writer(f"large {key}", len(LARGE))
    writer.write_at(0, LARGE)
    writer.finish()
    storage(session).put(f"small {key}", key.encode())


def expect(session: Session, *keys: str) -> None:
    """Check that exactly these objects exist."""
    assert sorted(storage(session).list()) == sorted([f"{kind} {key}" for key in keys for kind in ("large", "small")])
    for key in keys:
        assert storage(session).get(f"large {key}") == LARGE
        assert storage(session).get(f"small {key}") == key.encode()


@contextmanager
def stopped_before(message: int) -> Iterator[threading.Event]:
    """Stop this process before it sends a message to a memory server. Sets the event if it came so far.

    Does not count the messages that look for the servers, which are tried again for a while.
    """
    stopped = threading.Event()
    lock = threading.Lock()
    sent = 0
    send = messages.Connection.send

    def count(self: messages.Connection, header: messages.Header, payload: memoryview | bytes = b"") -> None:
        nonlocal sent
        if header["op"] == "status":
            return send(self, header, payload)
        with lock:
            sent += 1
            if sent >= message:
                stopped.set()
        if stopped.is_set():
            raise ConnectionError("the process was killed")
        return send(self, header, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages.Connection, "send", count)
        yield stopped


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_start_that_is_killed_before_any_message_loses_nothing(hosts: Hosts, step: int) -> None:
    for session, key in zip(hosts.join("a", "b", "c"), "abc", strict=True):
        write(session, key)
    hosts.lose("b")
    for message in range(1, 1000, step):
        with stopped_before(message) as stopped:
            try:
                hosts.join("c", "spare", "a")
            except ExceptionGroup:
                assert stopped.is_set()
        hosts.forget()
        if not stopped.is_set():
            break
    assert message > 20, "the start sends more messages than that"
    hosts.lose("c")
    for session in hosts.join("a", "spare"):
        expect(session, *"abc")


def test_a_host_that_returns_with_an_old_memory_learns_of_the_new_one(hosts: Hosts) -> None:
    first, *_ = hosts.join("a", "b", "c")
    write(first, "old")
    (session, _) = hosts.join("a", "b")
    storage(session).delete(["large old", "small old"])
    write(session, "new")
    for session in hosts.join("c", "d"):  # c does not know of the last incarnation, but a and b do
        expect(session, "new")


def test_a_host_with_an_old_memory_is_not_asked(hosts: Hosts) -> None:
    first, *_ = hosts.join("a", "b", "c")
    write(first, "old")
    for number in range(3):
        session, _ = hosts.join("a", "b")
        write(session, f"{number}")
    storage(session).delete(["large old", "small old"])
    for session in hosts.join("c", "a", "d"):
        expect(session, "0", "1", "2")


def test_hosts_of_a_job_that_went_on_elsewhere_have_an_old_memory(hosts: Hosts) -> None:
    for number in range(1, 4):
        session, _ = hosts.join("a", "b", least=number)
    write(session, "old")
    session, _ = hosts.join("c", "d", least=4)  # none of them knows of a and b
    write(session, "new")
    for session in hosts.join("a", "c", "b", "d", least=5):
        expect(session, "new")


def test_a_host_that_was_fenced_by_failed_starts_does_not_have_the_newest_memory(hosts: Hosts) -> None:
    first, *_ = hosts.join("a", "b", "c")
    write(first, "old")
    session, _ = hosts.join("a", "b")
    write(session, "new")
    hosts.kill("a")
    hosts.kill("b")
    for _ in range(5):  # a and b cannot be reached, and c alone has none of the entries
        with stopped_before(4), pytest.raises(ExceptionGroup):  # both are fenced, and nothing else was done
            hosts.join("c", "d")
        hosts.forget()
    for session in hosts.join("d", "c", "b", "a"):
        expect(session, "new", "old")


def test_a_fence_waits_for_writes_that_have_begun(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path, 1 << 20)
    memory.fence(1)
    began, ended = threading.Event(), threading.Event()

    def fence() -> None:
        began.set()
        memory.fence(2)
        assert ended.is_set()

    with memory.writing(1):
        thread = threading.Thread(target=fence)
        thread.start()
        began.wait()
        memory.apply("key", Entry(1, 1, b"1"))
        ended.set()
    thread.join()
    with pytest.raises(SaveLostError), memory.writing(1):
        pass


def test_a_put_that_took_too_long_does_not_win_over_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(tmp_path, 1 << 20)
    monkeypatch.setattr("ckptcore_recovery.peers.host_memory._PENDING_SECONDS", 0.0)
    slow, _ = memory.reserve("key", "")
    quick, _ = memory.reserve("key", "")
    with pytest.raises(ConditionFailedError, match="under way"):
        memory.apply("key", Entry(slow, 1, b"s"))
    memory.apply("key", Entry(quick, 1, b"q"))
    assert memory.find("key").data == b"q"


def test_versions_of_a_server_that_was_started_again_are_higher(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path, 1 << 20)
    memory.fence(1)
    version, _ = memory.reserve("key", "")  # another server stored it, and this one was killed before
    again = HostMemory(tmp_path, 1 << 20)
    later, _ = again.reserve("key", "")
    assert later > version


def test_the_version_of_an_object_that_was_deleted_twice_is_kept_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(tmp_path, 1 << 20)
    changes = [(0, Entry(2, is_deleted=True)), (1, Entry(3, 1, b"3")), (299, Entry(4, is_deleted=True))]
    for now, entry in changes:
        monkeypatch.setattr("ckptcore_recovery.peers.host_memory.time.monotonic", lambda now=now: now)
        memory.apply("key", entry)
    monkeypatch.setattr("ckptcore_recovery.peers.host_memory.time.monotonic", lambda: 301)
    memory.apply("another", Entry(5, is_deleted=True))  # forgets what was deleted 300 s ago
    with pytest.raises(ConditionFailedError, match="later version"):
        memory.apply("key", Entry(3, 1, b"3"))


def test_a_piece_of_a_blob_that_was_given_up_is_not_written_to_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(tmp_path, 1 << 20)
    memory.begin_blob("0" * 32, "old", 5, owner=1)
    later: list[Path] = []

    def write(descriptor: int, offset: int, data: memoryview) -> None:
        memory.fence(1)
        later.append(memory.begin_blob("1" * 32, "new", 5, owner=2))
        write_at(descriptor, offset, data)

    monkeypatch.setattr(host_memory, "write_at", write)
    for block in memory.receive_piece("0" * 32, 0, 5):
        block[:] = b"stale"
    (path,) = later
    assert path.read_bytes() == bytes(5)


@pytest.mark.parametrize("is_fenced", [False, True])
def test_memory_that_is_being_freed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fenced: bool
) -> None:
    memory = HostMemory(tmp_path, len(LARGE) + (1 << 14))  # room for one of two blobs
    memory.begin_blob("0" * 32, "old", len(LARGE), owner=1)
    memory.finish_blob("0" * 32, [0] * (len(LARGE) >> 20))
    may_free = threading.Event()
    free, wait = memory._free, memory._changed.wait

    def wait_for_memory(timeout: float | None = None) -> bool:
        if is_fenced:
            memory.fence(1)
        may_free.set()
        return wait(timeout)

    monkeypatch.setattr(memory, "_free", lambda removed: may_free.wait() and free(removed))
    monkeypatch.setattr(memory._changed, "wait", wait_for_memory)
    memory.drop(["0" * 32])
    with pytest.raises(SaveLostError) if is_fenced else nullcontext():
        memory.begin_blob("1" * 32, "new", len(LARGE), owner=1)
    assert memory.blobs() == {}


def test_a_deletion_that_waited_for_a_later_incarnation_is_refused(tmp_path: Path) -> None:
    server = MemoryServer(HostMemory(tmp_path, 1 << 20), "a", b"token", 60.0).handler
    server._view = View(2, [Member("a", "127.0.0.1", 1, "a")], 0)
    with pytest.raises(SaveLostError, match="taken over"):
        server.delete({"epoch": 1}, memoryview(b'["key"]'))


def test_servers_that_are_started_at_the_same_time_are_one(hosts: Hosts, tmp_path: Path) -> None:
    found: list[LocalServer] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        server, _ = ensure_server(hosts.job, limit=1 << 20, interface="127.0.0.1", idle_seconds=60.0, base=str(base))
        found.append(server)

    base = hosts.base("a")
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4


def views(hosts: Hosts, *names: str) -> dict[str, int]:
    """Return the incarnations whose views the servers of hosts have."""
    found = {}
    for name in names:
        server = hosts.server(name)
        assert server is not None
        with connect(server) as connections:
            found[name] = connections.call({"op": "status"})[0]["view"]
    return found


def with_newest_view(hosts: Hosts, *names: str) -> list[str]:
    """Return the hosts with the newest view."""
    found = views(hosts, *names)
    return [name for name, view in found.items() if view == max(found.values())]


def test_a_host_that_alone_completed_a_start_does_not_have_the_newest_memory(hosts: Hosts) -> None:
    session, *_ = hosts.join(*"abcd")
    keys = [f"{number}" for number in range(20)]
    for key in keys:
        write(session, key)
    for message in itertools.cycle(range(10, 30)):
        with stopped_before(message), pytest.raises(ExceptionGroup):
            hosts.join(*"dcba")
        hosts.forget()
        if len(with_newest_view(hosts, *"abcd")) == 1:
            break
    (first,) = with_newest_view(hosts, *"abcd")
    others = sorted(set("abcd") - {first})
    hosts.kill(first)  # it cannot be reached for a while
    with stopped_before(7), pytest.raises(ExceptionGroup):
        hosts.join(*others)  # gives the earlier start up, and has not installed its own view
    hosts.forget()
    assert len(with_newest_view(hosts, *others)) == 3
    for session in hosts.join(first, *others):
        expect(session, *keys)
