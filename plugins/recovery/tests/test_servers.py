"""Servers outlive the processes that start them, and those of another session or container; one is started by hand."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from ckptcore_recovery.peers import PeerMemory, starting
from ckptcore_recovery.peers.connections import Pace, ServerConnections
from ckptcore_recovery.peers.host_memory import HostMemory
from ckptcore_recovery.peers.joining import MemoryOptions
from ckptcore_recovery.peers.messages import Channel, Connection, Header
from ckptcore_recovery.peers.request_handler import RequestHandler
from ckptcore_recovery.peers.server import MemoryServer
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import sizes_below, spread
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE, LocalServer, ensure_server, find_server
from ckptcore_recovery.peers.views import Member, View
from ckptcore_testing.thread_coordinator import ThreadJob

from ckptcore import Checkpointer, Context
from ckptcore.context import JobOptions
from ckptcore.errors import StorageError
from ckptcore.policies import SpecificSteps
from ckptcore.protocols import Coordinator
from plugins.recovery.tests.counted_hosts import CountedHosts
from plugins.recovery.tests.host_directories import is_running, kill_servers, server_pid

pytestmark = pytest.mark.system

JOB: Final = "servers"
_CONTAINER: Final = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """Return the directory of a host's memory. Its server is killed at the end."""
    yield tmp_path / "host"
    kill_servers(tmp_path)


def saving(directory: Path, steps: int, end: str) -> list[str]:
    """Return the command of a program that saves steps."""
    return [sys.executable, "-m", "plugins.recovery.tests.saving_program", str(directory), JOB, str(steps), end]


def serving(host: Path) -> list[str]:
    """Return the command that starts a server by hand."""
    return [sys.executable, "-m", "ckptcore_recovery.peers.server", str(host / JOB), "--limit", str(1 << 26)]


def test_a_server_survives_the_kill_of_all_processes_of_the_session_that_started_it(host: Path) -> None:
    with subprocess.Popen(
        saving(host.parent, 1, "wait"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, DIRECTORY_VARIABLE: str(host)},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"0\n"
        server = server_pid(host, JOB)
        sessions = {os.getsid(pid) for pid in (process.pid, server)}
        assert sessions == {process.pid, server}, "each has a session of its own"
        os.killpg(process.pid, signal.SIGKILL)
    assert is_running(server)
    assert ensure_server(JOB, limit=1, interface="127.0.0.1", idle_seconds=60.0, base=str(host))
    assert server_pid(host, JOB) == server, "it still answers"


def test_the_leader_ends_the_servers_and_other_processes_do_not(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(host))
    ended: list[int] = []
    has_closed = threading.Event()
    end = RequestHandler.end.__name__
    send = Connection.send

    def record(self: Connection, header: Header, payload: memoryview | bytes = b"") -> None:
        if end in (header.get("op"), header.get("request", {}).get("op")):
            ended.append(int(threading.current_thread().name))
        send(self, header, payload)

    def run(coordinator: Coordinator) -> None:
        threading.current_thread().name = str(coordinator.rank)
        context = Context(job=JobOptions(coordinator=coordinator))
        memory = PeerMemory(tmp_path / "run", job=JOB, memory_bytes=1 << 26, copies=0, upload_policy=SpecificSteps([1]))
        with Checkpointer(memory, context=context) as opened:
            opened.save(1, {"step": 1})
            if coordinator.rank == 0:
                assert has_closed.wait(60)
        has_closed.set()

    monkeypatch.setattr(Connection, "send", record)
    ThreadJob(2).run(run)
    assert ended == [0]


def test_all_servers_of_a_job_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = CountedHosts(tmp_path, monkeypatch)
    leader, *_ = hosts.join("a", "b", "c", options=MemoryOptions(1 << 20))
    spread(leader, {"op": "end", "epoch": leader.view.epoch}, b"")
    assert [server._is_ending for server in hosts.servers.values()] == [True] * 3


@contextlib.contextmanager
def served(monkeypatch: pytest.MonkeyPatch, *servers: MemoryServer) -> Iterator[list[int]]:
    """Serve on threads of this process, and yield the ports. All servers end at the end."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in servers]
    threads = [
        threading.Thread(target=server.serve, args=(at,), daemon=True)
        for server, at in zip(servers, listening, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield [at.getsockname()[1] for at in listening]
    finally:
        monkeypatch.setattr(MemoryServer, "_is_over", lambda server: True)
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def test_members_that_are_known_as_lost_are_asked_last() -> None:
    members = [Member(name, "127.0.0.1", 1, name) for name in "abcd"]
    view = View(1, members, copies=3)
    with Session("job", None, view, b"token", Pace(None), lost={"a", "c"}) as session:
        assert all({member.id for member in [*session.home(key)][2:]} == {"a", "c"} for key in "xyz")


def test_servers_keep_their_connections_while_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request to all members opened a connection for each of its messages. They are closed when all is quiet."""
    accepted: list[MemoryServer] = []
    serve_channel = MemoryServer.serve_channel

    def count(server: MemoryServer, begin: Callable[[bytes], Channel]) -> None:
        accepted.append(server)
        serve_channel(server, begin)

    monkeypatch.setattr(MemoryServer, "serve_channel", count)
    names = ("a", "b", "c", "d")
    for name in names:
        (tmp_path / name).mkdir()
    servers = [MemoryServer(HostMemory(tmp_path / name, 1 << 20), name, b"token", 900.0) for name in names]
    with served(monkeypatch, *servers) as ports:
        members = [Member(name, "127.0.0.1", port, name) for name, port in zip(names, ports, strict=True)]
        view = View(1, members, copies=1)
        with Session("job", None, view, b"token", Pace(None)) as session:
            with monkeypatch.context() as counting:
                counting.setattr(Session, "close_idle", lambda session: None)  # all may be quiet between two requests
                for member in members:
                    session.server(member).call({"op": "fence", "epoch": 1, "before": 0, "rank": 0})
                spread(session, {"op": "prepare", "epoch": 1}, view.encode())
                for member in members:
                    session.server(member).call({"op": "install", "epoch": 1})
                for _ in range(5):
                    assert sizes_below(session, "") == {}
            assert len(accepted) <= len(members) + len(members) * (len(members) - 1)
        deadline = time.monotonic() + 60
        while any(server._connections for server in servers):  # they would keep each other from ending
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_server_goes_on_if_a_start_of_the_job_forgets_its_session_meanwhile(tmp_path: Path) -> None:
    class Forgetting(RequestHandler):
        """Its session is forgotten whenever it was read."""

        _kept: Session | None = None

        @property
        def _others(self) -> Session | None:
            session, self._kept = self._kept, None
            return session

        @_others.setter
        def _others(self, session: Session | None) -> None:
            self._kept = session

    server = MemoryServer(HostMemory(tmp_path, 1 << 20), "a", b"token", 0.1)
    server.handler = handler = Forgetting(server.handler.memory, "a", b"token", server.listen_on)
    handler._others = Session("job", None, View(1, [Member("a", "127.0.0.1", 1, "a")], copies=0), b"token", Pace(None))
    server.serve(socket.create_server(("127.0.0.1", 0)))
    assert handler._kept is None


def test_a_server_outlives_a_lack_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = MemoryServer(HostMemory(tmp_path, 1 << 20), "a", b"token", 900.0)
    start = threading.Thread.start
    failed: list[threading.Thread] = []

    def fail_once(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) == server._serve_connection and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with served(monkeypatch, server) as (port,):
        monkeypatch.setattr(threading.Thread, "start", fail_once)
        with socket.create_connection(("127.0.0.1", port)) as refused:
            refused.settimeout(60)
            assert refused.recv(1) == b"", "it is closed"
        with ServerConnections("127.0.0.1", port, b"token") as connections:
            connections.call({"op": "status"})
            assert len(server._connections) == len(failed) == 1


def test_a_server_listens_on_another_address_once_it_has_described_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MemoryServer(HostMemory(tmp_path, 1 << 20), "a", b"token", 900.0)
    described = tmp_path / "server.json"
    described.write_text('["torn')
    with served(monkeypatch, server) as (port,), ServerConnections("127.0.0.1", port, b"token") as connections:

        def listen(interface: str) -> int:
            answer, _ = connections.call({"op": "listen", "interface": interface})
            return int(answer["port"])

        for _ in range(2):
            with pytest.raises(StorageError, match="is damaged"):
                listen("127.0.0.2")
        described.write_text(json.dumps({"id": "a", "interface": "127.0.0.1", "port": port}))
        other = listen("127.0.0.2")
        assert json.loads(described.read_bytes()) == {"id": "a", "interface": "127.0.0.2", "port": other}
        ServerConnections("127.0.0.2", other, b"token").call({"op": "status"})
        assert listen("127.0.0.2") == other and listen("localhost") == port, "it listens there already"
        for interface in ("", "0.0.0.0", "0", "::"):
            with pytest.raises(StorageError, match="other hosts cannot connect to it. Pass interface="):
                listen(interface)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", other))


@pytest.mark.parametrize("belongs", [True, False])
def test_a_killed_server_is_started_again_on_the_address_that_the_view_names(host: Path, belongs: bool) -> None:
    """Processes with the default interface use a server that listens elsewhere, and start it there again."""

    def ensure(interface: str) -> LocalServer:
        local, own = ensure_server(JOB, limit=1, interface=interface, idle_seconds=60.0, base=str(host))
        own.close()
        return local

    first = ensure("127.0.0.2")
    os.kill(server_pid(host, JOB), signal.SIGKILL)
    if not belongs:
        described = host / JOB / "server.json"
        described.write_text(json.dumps({**json.loads(described.read_bytes()), "interface": "192.0.2.1"}))
    again = ensure("127.0.0.1")
    assert again.interface == ("127.0.0.2" if belongs else "127.0.0.1")
    assert (again.id, again.port) == (first.id, first.port)


def test_a_server_that_ends_leaves_nothing(host: Path) -> None:
    ensure_server(JOB, limit=1, interface="127.0.0.1", idle_seconds=0.1, base=str(host))
    while list(host.iterdir()):
        time.sleep(0.02)


def test_processes_use_a_server_that_was_started_by_hand(host: Path) -> None:
    with subprocess.Popen(serving(host), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        for _ in range(2):
            found, _ = ensure_server(JOB, limit=1, interface="127.0.0.1", idle_seconds=60.0, base=str(host))
            assert server_pid(host, JOB) == server.pid
        second = subprocess.run(serving(host), capture_output=True, text=True, check=True, timeout=300)
        assert second.stdout == "already running\n"
        server.terminate()
        assert server.wait(60) == 0
    again, _ = ensure_server(JOB, limit=1, interface="127.0.0.1", idle_seconds=60.0, base=str(host))
    assert again.id == found.id, "the next server takes over the memory"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_cannot_read_the_memory(host: Path) -> None:
    ensure_server(JOB, limit=1, interface="127.0.0.1", idle_seconds=60.0, base=str(host))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as reachable:
        os.chmod(reachable, 0o755)
        shutil.copytree(host, f"{reachable}/host")
        os.chmod(f"{reachable}/host", 0o755)
        for base in (str(host), f"{reachable}/host"):
            if (child := os.fork()) == 0:
                os.setuid(65534)
                try:
                    find_server(JOB, base)
                except StorageError as error:
                    os._exit("by its user alone" in str(error))
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_no_memory_is_kept_in_a_directory_of_another_user(tmp_path: Path) -> None:
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    base.mkdir()
    (base / f"{JOB}.log").symlink_to(elsewhere)
    os.chown(base, 65534, 65534)
    with pytest.raises(StorageError, match=f"base belongs to another user.*set {DIRECTORY_VARIABLE}"):
        ensure_server(JOB, limit=1, interface="127.0.0.1", idle_seconds=60.0, base=str(base))
    assert not elsewhere.exists()


def test_a_server_that_ends_as_soon_as_it_is_ready_is_not_started_for_ever(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = tmp_path / "errors"
    errors.write_text("MemoryError: no more\n")
    monkeypatch.setattr(starting, "_START_SECONDS", 0.5)
    monkeypatch.setattr(starting, "_start_server", lambda *arguments: ("ready", errors))
    with pytest.raises(StorageError, match="cannot be started: MemoryError: no more"):
        ensure_server(JOB, limit=1, interface="127.0.0.1", idle_seconds=60.0, base=str(host))


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("{}/file", "it is no directory"),
        ("{}/file/below", "may write"),
        ("/proc/nothing", "may write"),
        ("below", "absolute path"),
    ],
)
def test_a_place_that_cannot_have_the_memory_is_named(
    base: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(DIRECTORY_VARIABLE, base.format(tmp_path))
    with pytest.raises(StorageError, match=reason) as error:
        ensure_server(JOB, limit=1, interface="127.0.0.1", idle_seconds=60.0)
    assert DIRECTORY_VARIABLE in str(error.value) and base.format(tmp_path) in str(error.value)


# --- containers: namespaces of processes and of mounts, with one memory file system that both mount ------------------


@pytest.fixture
def volume() -> Iterator[Path]:
    """Return a memory file system, as an ``emptyDir`` with ``medium: Memory``.

    Its servers end with their containers. Their process ids mean other processes here.
    """
    # Not in `tmp_path`, which can be in /dev/shm: each container has a /dev/shm of its own.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        host = Path(directory) / "host"
        host.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(host)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount, and to make namespaces")
        yield host
        subprocess.run(["umount", "--lazy", str(host)], check=True)


def in_container(command: list[str]) -> list[str]:
    """Return a command in a container of its own: if its first process ends, all its processes end."""
    namespaces = ["unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child", "--propagation", "private"]
    return [*namespaces, "sh", "-c", _CONTAINER, "sh", *command]


def train(volume: Path, steps: int) -> str:
    """Save steps in a container that is killed. Return the step that it found."""
    environment = {**os.environ, DIRECTORY_VARIABLE: str(volume)}
    ended = subprocess.run(
        in_container(saving(volume.parent, steps, "die")),
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ended.stdout, ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
def test_memory_outlives_a_container_if_a_volume_has_it(volume: Path) -> None:
    assert [train(volume, 2), train(volume, 1), train(volume, 1)] == ["0", "2", "3"]


def test_a_server_in_a_sidecar_outlives_the_containers_that_use_it(volume: Path) -> None:
    with subprocess.Popen(in_container(serving(volume)), stdout=subprocess.PIPE, text=True) as sidecar:
        assert sidecar.stdout is not None and sidecar.stdout.readline() == "ready\n"
        described = (volume / JOB / "server.json").read_text()
        assert [train(volume, 2), train(volume, 1)] == ["0", "2"]
        assert (volume / JOB / "server.json").read_text() == described, "no other server was started"
        (server,) = Path(f"/proc/{sidecar.pid}/task/{sidecar.pid}/children").read_text().split()
        os.kill(int(server), signal.SIGTERM)  # the first process of its container
        assert sidecar.wait(60) == 0
