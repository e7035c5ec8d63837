"""Peers that do not belong to the job, or send what no peer would send, are refused before anything is allocated."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from ckptcore_recovery.peers.connections import ServerConnections, ServerLostError
from ckptcore_recovery.peers.joined_jobs import session_of
from ckptcore_recovery.peers.messages import PIECE_BYTES, Connection, MessageError
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.starting import LocalServer, find_server, server_directory
from ckptcore_recovery.peers.storage import PeerStorage, open_storage

from ckptcore.errors import CheckpointError, InvalidLocationError, ObjectNotFoundError, SaveLostError, StorageError
from ckptcore.protocols import StorageOptions
from plugins.recovery.tests.job_hosts import connect

pytestmark = pytest.mark.system


@pytest.fixture
def session(three_hosts: Session) -> Session:
    """Return a process of a job."""
    return three_hosts


@pytest.fixture
def server(session: Session) -> LocalServer:
    """Return the server of its host."""
    assert session.local is not None
    return session.local


@pytest.fixture
def connected(server: LocalServer) -> Iterator[socket.socket]:
    """Return a connection to the server that is not authenticated."""
    with socket.create_connection((server.interface, server.port), timeout=30) as connected:
        yield connected


def memory_of(server: LocalServer) -> int:
    """Return the bytes in memory of a server's process."""
    pid = json.loads((server.directory / "server.json").read_bytes())["pid"]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def still_serves(session: Session) -> bool:
    """Return True if the server answers the job."""
    storage = PeerStorage(session.job, "", session)
    storage.put("alive", b"1")
    return storage.get("alive") == b"1"


def test_a_wrong_token_is_refused(session: Session, server: LocalServer) -> None:
    wrong = ServerConnections(server.interface, server.port, b"x" * 32)
    with wrong, pytest.raises((MessageError, ServerLostError)):
        wrong.call({"op": "status"})
    assert still_serves(session)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 200, b"ckptcore peer 1\n" + b"\0" * 32 + b"\0" * 32],
    ids=["nothing", "http", "ones", "no proof"],
)
def test_a_stranger_is_refused(session: Session, connected: socket.socket, sent: bytes) -> None:
    received = b""
    with contextlib.suppress(OSError):  # the server closed it before it had read everything
        connected.sendall(sent)
        connected.shutdown(socket.SHUT_WR)
        while data := connected.recv(1 << 16):
            received += data
    assert len(received) <= 48, "a greeting and a random number, nothing else"
    assert still_serves(session)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<III", 0, 0xFFFFFFFF, 0),
        struct.pack("<III", 0, 10, 0xFFFFFFFF),
        struct.pack("<III", 7, 10, 0),
        struct.pack("<III", 0, 10, PIECE_BYTES),
    ],
    ids=["header", "payload", "number", "code"],
)
def test_a_member_with_oversized_messages_is_refused(
    session: Session, server: LocalServer, connected: socket.socket, frame: bytes
) -> None:
    before = memory_of(server)
    Connection(connected, server.token, is_server=False)
    connected.settimeout(30)
    connected.sendall(frame + b"\0" * 16 + b"{" * 10)
    assert connected.recv(1) == b"", "the connection is closed"
    assert memory_of(server) - before < 1 << 24
    assert still_serves(session)


def test_a_repeated_message_is_refused(session: Session, server: LocalServer, connected: socket.socket) -> None:
    sent: list[bytes] = []

    class Recorder:
        """A socket that records what is sent."""

        def __getattr__(self, name: str) -> object:
            return getattr(connected, name)

        def sendall(self, data: bytes) -> None:
            sent.append(bytes(data))
            connected.sendall(data)

    connection = Connection(Recorder(), server.token, is_server=False)  # type: ignore[arg-type]
    connection.send({"op": "status"})
    connection.receive()
    connected.settimeout(30)
    connected.sendall(sent[-1])
    assert connected.recv(1) == b"", "the connection is closed"
    # On another connection the same bytes have another key.
    with socket.create_connection((server.interface, server.port), timeout=30) as other:
        Connection(other, server.token, is_server=False)
        other.settimeout(30)
        other.sendall(sent[-1])
        assert other.recv(1) == b""
    assert still_serves(session)


def test_a_server_without_the_token_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.sendall(b"ckptcore peer 1\n" + b"n" * 32)
                accepted.recv(80)
                accepted.sendall(b"p" * 32)

        thread = threading.Thread(target=pretend)
        thread.start()
        client = ServerConnections("127.0.0.1", listening.getsockname()[1], b"t" * 32)
        with client, pytest.raises(MessageError, match="token"):
            client.call({"op": "status"})
        thread.join()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", "x" * 32, "0" * 31, "0" * 33, "..", 5, None])
@pytest.mark.parametrize("operation", ["begin", "finish", "drop", "read", "piece"])
def test_names_of_blobs_are_no_paths(
    session: Session, server: LocalServer, operation: str, name: object, tmp_path: Path
) -> None:
    before = sorted(server.directory.rglob("*"))
    header = {
        "op": operation, "epoch": session.view.epoch, "blob": name, "blobs": [name], "key": "k", "size": 1, "offset": 0,
        "nbytes": 1,
    }  # fmt: skip
    with connect(server) as connections, pytest.raises(CheckpointError):
        connections.call(header)
    assert sorted(server.directory.rglob("*")) == before


@pytest.mark.parametrize("size", [-1, 1 << 40, 1 << 62, "many", None, 1.5])
def test_sizes_are_checked(session: Session, server: LocalServer, size: object) -> None:
    with connect(server) as connections:
        with pytest.raises(CheckpointError):
            connections.call({"op": "begin", "epoch": session.view.epoch, "blob": "0" * 32, "key": "k", "size": size})
        status, _ = connections.call({"op": "status"})
    assert status["used"] < 1 << 20


@pytest.mark.parametrize("offset", [-PIECE_BYTES, 1, PIECE_BYTES, 1 << 60, "x"])
def test_pieces_stay_in_their_blob(session: Session, server: LocalServer, offset: object) -> None:
    epoch = session.view.epoch
    with connect(server) as connections:
        connections.call({"op": "begin", "epoch": epoch, "blob": "0" * 32, "key": "k", "size": 100})
        with pytest.raises(CheckpointError):
            connections.call({"op": "piece", "epoch": epoch, "blob": "0" * 32, "offset": offset}, b"a" * 100)
        with pytest.raises(StorageError, match="lacks"):
            connections.call({"op": "finish", "epoch": epoch, "blob": "0" * 32})


@pytest.mark.parametrize(
    "header",
    [
        {"op": "no such"}, {}, {"op": "apply"}, {"op": "apply", "entry": [1]}, {"op": "apply", "entry": "x"},
        {"op": "prepare"}, {"op": "load"}, {"op": "find"}, {"op": "sizes"}, {"op": "hand_over"}, {"op": "decided"},
        {"op": "fence", "epoch": "x"}, {"op": "fence", "epoch": 0}, {"op": "reserve", "key": "k"}, {"op": "delete"},
        {"op": "spread"}, {"op": "spread", "request": {"op": "drop"}}, {"op": "spread", "request": {"op": "sizes"}},
        {"op": "spread", "request": {"op": "delete", "epoch": 1}, "first": 0, "count": 9},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_requests_are_errors(session: Session, server: LocalServer, header: dict[str, object]) -> None:
    with connect(server) as connections, pytest.raises((CheckpointError, ServerLostError)):
        connections.call({"epoch": session.view.epoch, **header}, b"[1, 2]")
    assert still_serves(session)


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ({"op": "piece", "offset": -PIECE_BYTES, "checksums": [1]}, b""),
        ({"op": "piece", "offset": 0, "checksums": [1, 2]}, b""),
        ({"op": "piece", "offset": 0, "checksums": []}, b""),
        ({"op": "piece", "offset": PIECE_BYTES, "checksums": [1]}, b""),
        ({"op": "piece", "offset": 0, "checksums": 7}, b""),
        ({"op": "finish"}, b"abc"),
        ({"op": "finish"}, b"12345678" * 2),
        ({"op": "apply", "key": "k", "entry": [1, float("inf"), None, "", [], False, 1]}, b""),
        ({"op": "prepare"}, zlib.compress(b"[" * 100_000)),
        ({"op": "prepare"}, zlib.compress(b'{"epoch": 1, "members": [], "copies": 1, "needed": 1}')),
        ({"op": "prepare"}, zlib.compress(b'{"epoch": 1e999, "members": [["a", "b", 1, "c", 0]], "copies": 1}')),
        ({"op": "drop", "blobs": [[]]}, b""),
        ({"op": "spread", "request": "delete"}, b""),
        ({"op": []}, b""),
    ],
    ids=str,
)
def test_what_no_peer_would_send_gets_an_error_as_the_answer(
    session: Session, server: LocalServer, header: dict[str, object], payload: bytes
) -> None:
    epoch = session.view.epoch
    with connect(server) as connections:
        connections.call({"op": "begin", "epoch": epoch, "blob": "0" * 32, "key": "k", "size": 100})
        with pytest.raises(StorageError) as caught:
            connections.call({"epoch": epoch, "blob": "0" * 32, **header}, payload)
        assert not isinstance(caught.value, ServerLostError), "the connection is kept"
        with pytest.raises(StorageError, match="lacks 1 of its blocks"):
            connections.call({"op": "finish", "epoch": epoch, "blob": "0" * 32})


@pytest.mark.parametrize(("offset", "nbytes"), [(-(2 << 20), 1 << 20), (0, -1), (-(1 << 62), 1 << 62), (1 << 62, 1)])
def test_no_bytes_outside_of_a_blob_are_read(session: Session, server: LocalServer, offset: int, nbytes: int) -> None:
    epoch = session.view.epoch
    with connect(server) as connections:
        path = connections.call({"op": "begin", "epoch": epoch, "blob": "2" * 32, "key": "k", "size": 2 << 20})[0][
            "path"
        ]
        Path(path).write_bytes(bytes(2 << 20))
        packed = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(1 << 20))) * 2
        connections.call({"op": "finish", "epoch": epoch, "blob": "2" * 32}, packed)
        received = b""
        with contextlib.suppress(StorageError):
            received = bytes(connections.call({"op": "read", "blob": "2" * 32, "offset": offset, "nbytes": nbytes})[1])
        connections.call({"op": "drop", "epoch": epoch, "blobs": ["2" * 32]})
    assert received == b""


def test_an_old_incarnation_and_a_future_one_are_refused(session: Session, server: LocalServer) -> None:
    with connect(server) as connections:
        for epoch in (session.view.epoch - 1, session.view.epoch + 1):
            with pytest.raises(SaveLostError):
                connections.call({"op": "begin", "epoch": epoch, "blob": "0" * 32, "key": "k", "size": 1})


@pytest.mark.parametrize("job", ["..", "a/b", "", "/tmp", ".hidden", "a b", "x" * 101, "nul\0"])
def test_names_of_jobs_are_no_paths(job: str) -> None:
    for use in (server_directory, find_server, session_of):
        with pytest.raises((StorageError, ObjectNotFoundError)):
            use(job)


@pytest.mark.parametrize("url", ["peers://", "peers:///x", "peers://job/../x", "peers://job/a//b"])
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(InvalidLocationError):
        open_storage(url, StorageOptions())


def test_files_of_a_server_are_private(session: Session, server: LocalServer) -> None:
    writer = PeerStorage(session.job, "", session).open_writer("data", 10)
    writer.write_at(0, b"0123456789")
    writer.finish()
    for path in [server.directory, *server.directory.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
