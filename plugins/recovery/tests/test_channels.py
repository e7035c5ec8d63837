"""Connections to memory servers: over TCP, and over a second transport, in one process."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from ckptcore_recovery.peers.connections import ServerConnections
from ckptcore_recovery.peers.host_memory import HostMemory
from ckptcore_recovery.peers.messages import PIECE_BYTES, Channel, Connection, Header, PayloadError, Place, checksums_of
from ckptcore_recovery.peers.server import MemoryServer
from ckptcore_testing import ChannelTests

from ckptcore.errors import ObjectNotFoundError

_TOKEN: Final = b"t" * 32


class QueueChannel:
    """One side of a connection within a process. None in a queue: it was closed."""

    def __init__(self, sent: queue.Queue[Any], received: queue.Queue[Any]) -> None:
        self._sent = sent
        self._received = received
        self._seconds: float | None = None
        self._is_closed = False

    @classmethod
    def pair(cls) -> tuple[QueueChannel, QueueChannel]:
        """Return both sides of a connection."""
        one: queue.Queue[Any] = queue.Queue()
        other: queue.Queue[Any] = queue.Queue()
        return cls(one, other), cls(other, one)

    def set_timeout(self, seconds: float | None) -> None:
        """See `Channel`."""
        self._seconds = seconds

    def send(self, header: Header, payload: memoryview | bytes = b"") -> None:
        """See `Channel`."""
        if len(payload) and "checksums" not in header:
            header = {**header, "checksums": checksums_of(memoryview(payload))}
        encoded = json.dumps(header)
        if len(encoded) > 1 << 20 or len(payload) > PIECE_BYTES:
            raise ValueError("the message is too large")
        if self._is_closed:
            raise BrokenPipeError("closed")
        self._sent.put((encoded, bytes(payload)))

    def receive(self, place: Place | None = None) -> tuple[Header, memoryview]:
        """See `Channel`."""
        try:
            message = self._received.get(timeout=self._seconds)
        except queue.Empty as error:
            raise TimeoutError("no message") from error
        if message is None:
            self._received.put(None)
            raise ConnectionResetError("closed")
        header, payload = json.loads(message[0]), message[1]
        blocks = place(header, len(payload)) if payload and place is not None else None
        if payload and header["checksums"] != checksums_of(memoryview(payload)):
            raise PayloadError("the payload is damaged")
        if blocks is None:
            return header, memoryview(payload)
        offset = 0
        for block in blocks:
            block[:] = payload[offset : offset + len(block)]
            offset += len(block)
        return header, memoryview(b"")

    def close(self) -> None:
        """See `Channel`."""
        self._is_closed = True
        self._sent.put(None)
        self._received.put(None)


class TestTCP(ChannelTests):
    """Connections over TCP."""

    piece_bytes = PIECE_BYTES

    @contextmanager
    def connect(self) -> Iterator[tuple[Channel, Channel]]:
        """Return two sides that have proved to each other that they know the token."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            connected = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
        sides: queue.Queue[Channel] = queue.Queue()
        thread = threading.Thread(target=lambda: sides.put(Connection(accepted, _TOKEN, is_server=True)))
        thread.start()
        client = Connection(connected, _TOKEN, is_server=False)
        thread.join()
        server = sides.get()
        yield client, server
        client.close()
        server.close()


class TestQueues(ChannelTests):
    """Connections within a process."""

    piece_bytes = PIECE_BYTES

    @contextmanager
    def connect(self) -> Iterator[tuple[Channel, Channel]]:
        """Return two sides."""
        client, server = QueueChannel.pair()
        yield client, server
        client.close()


def test_a_server_and_its_clients_work_over_another_transport(tmp_path: Path) -> None:
    tokens: list[bytes] = []
    server = MemoryServer(HostMemory(tmp_path, 1 << 24), "member", _TOKEN, 60.0)

    def connect(host: str, port: int, token: bytes, seconds: float) -> Channel:
        client, other = QueueChannel.pair()

        def begin(token: bytes) -> Channel:
            tokens.append(token)
            return other

        server.serve_channel(begin)
        return client

    piece = b"x" * 1000
    with ServerConnections("nowhere", 0, _TOKEN, connect=connect) as connections:
        connections.call({"op": "begin", "epoch": 0, "key": "data", "blob": "0" * 32, "size": len(piece)})
        connections.call({"op": "piece", "epoch": 0, "blob": "0" * 32, "offset": 0}, piece)
        connections.call({"op": "finish", "epoch": 0, "blob": "0" * 32})
        _, data = connections.call({"op": "read", "blob": "0" * 32, "offset": 10, "nbytes": 100})
        assert bytes(data) == piece[10:110]
        with pytest.raises(ObjectNotFoundError):
            connections.call({"op": "read", "blob": "1" * 32, "offset": 0, "nbytes": 1})
    assert tokens == [_TOKEN]
