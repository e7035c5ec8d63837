"""Listener: accepts connections of processes that know a token."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore_recovery.peers.messages import Connection, Header, MessageError, blocks_of

logger = logger_named("ckptcore.recovery")

_MOST: Final = 4096
"""Maximum number of connections, with those of strangers, which are closed after the handshake."""


class Listener:
    """Accepts connections of processes that know a token, and serves each on its own thread."""

    def __init__(self, interface: str, token: bytes, serve: Callable[[Connection], None]) -> None:
        """Listen at any port, and begin to accept connections.

        Args:
            interface: the IP address of this host to listen on.
            token: the secret that both sides know.
            serve: serves a connection, which is closed when it returns or raises an error.

        Raises:
            StorageError: the address does not belong to this host.
        """
        try:
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            self._listening = socket.create_server((interface, 0), family=family, backlog=1024)
        except OSError as error:
            raise StorageError(
                f"cannot listen on {interface!r}: {error}. Pass interface= with an IP address of this host that the "
                "other hosts of the job reach"
            ) from error
        self.address: Final = (interface, int(self._listening.getsockname()[1]))
        """The address and the port."""
        self._token = token
        self._serve = serve
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._room = threading.BoundedSemaphore(_MOST)
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="ckptcore-listen", daemon=True)
        self._thread.start()

    def close(self, *, wait: bool = True) -> None:
        """Stop to listen, and close all connections.

        Args:
            wait: True to wait until the thread that accepts connections has ended.
        """
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in connections:
            connection.close()
        if wait:
            self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                if self._is_closed:
                    return
                raise
            if not self._room.acquire(blocking=False):
                accepted.close()
                continue
            threading.Thread(target=self._run, args=(accepted,), name="ckptcore-serve", daemon=True).start()

    def _run(self, accepted: socket.socket) -> None:
        connection = None
        try:
            connection = Connection(accepted, self._token, is_server=True)
            with self._lock:
                self._connections.add(connection)
            if not self._is_closed:
                self._serve(connection)
        except (OSError, ValueError) as error:
            if not self._is_closed:
                logger.warning("a connection to %s:%d ended: %s", *self.address, error)
        finally:
            if connection is None:
                accepted.close()
            else:
                connection.close()
                with self._lock:
                    self._connections.discard(connection)
            self._room.release()


def no_payload(header: Any, nbytes: int) -> None:
    """Refuse the payload of a message that has none; see `Place`."""
    raise MessageError(f"received {nbytes} bytes where none are expected")


def receive_into(connection: Connection, memory: memoryview) -> tuple[Header, memoryview]:
    """Receive a message whose payload goes to the start of the given memory. Return its header and its payload.

    Raises:
        MessageError: the message is invalid, or its payload is larger than the memory.
        OSError: the connection failed.
    """
    payload = memory[:0]

    def place(header: Header, nbytes: int) -> list[memoryview]:
        nonlocal payload
        if nbytes > len(memory):
            raise MessageError(f"received {nbytes} bytes where at most {len(memory)} are expected")
        payload = memory[:nbytes]
        return blocks_of(payload)

    header, _ = connection.receive(place)
    return header, payload
