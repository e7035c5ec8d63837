"""Connections of this process to memory servers, which are kept for later requests."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self

from ckptcore.errors import StorageError
from ckptcore_recovery.peers.messages import Channel, Connection, Header, MessageError, Place, raise_error

_CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 60.0
"""A server answers a request within this time, or counts as lost."""


class ServerLostError(StorageError):
    """A memory server does not answer."""


class Pace:
    """Limits the rate at which this process sends and receives pieces. Thread-safe."""

    def __init__(self, bytes_per_second: float | None) -> None:
        """Set the limit; None for no limit."""
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` may be sent."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
        if begin > now:
            time.sleep(begin - now)


def connect_by_tcp(host: str, port: int, token: bytes, seconds: float) -> Channel:
    """Connect to a memory server.

    Args:
        host: the host name or address of the server.
        port: its port.
        token: the secret of the job.
        seconds: the maximum time to reach the host.

    Raises:
        MessageError: it is no memory server of this job.
        OSError: it does not answer.
    """
    connected = socket.create_connection((host, port), timeout=seconds)
    try:
        return Connection(connected, token, is_server=False)
    except BaseException:
        connected.close()
        raise


class ServerConnections:
    """Connections to one memory server. Thread-safe.

    Attributes:
        place: the server, for errors.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        *,
        connect_seconds: float = _CONNECT_SECONDS,
        start_again: Callable[[], object] | None = None,
        connect: Callable[[str, int, bytes, float], Channel] = connect_by_tcp,
    ) -> None:
        """Connect at the first request.

        Args:
            host: the host name or address of the server.
            port: its port.
            token: the secret of the job.
            connect_seconds: the maximum time to reach the host, in seconds.
            start_again: starts the server again if it does not answer; None if this process cannot.
            connect: makes a connection. See `connect_by_tcp`.
        """
        self.place = f"{host}:{port}"
        self._connect_channel = partial(connect, host, port, token, connect_seconds)
        self._start_again = start_again
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def reset_after_fork(self) -> None:
        """Forget the connections in a forked child, because the parent uses them."""
        self._lock = threading.Lock()
        self._idle.clear()  # closes only the descriptors of the child

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
        """Send a request, and return the answer. A request must have the same effect if it is sent twice.

        Args:
            header: the request.
            payload: its bytes.
            place: see `Place`.

        Raises:
            ServerLostError: the server does not answer.
            MessageError: it refuses this process, or broke the protocol.
            Other errors of `raise_error`.
        """
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._exchange(connection, header, payload, place)
            except ServerLostError:
                self.close()  # the server may have been started again: the other idle connections have ended, too
        try:
            connection = self._connect()
        except ServerLostError:
            if self._start_again is None:
                raise
            self._start_again()
            connection = self._connect()
        return self._exchange(connection, header, payload, place)

    def _connect(self) -> Channel:
        try:
            return self._connect_channel()
        except MessageError:
            raise
        except OSError as error:
            raise ServerLostError(f"cannot connect to the memory server {self.place}: {error}") from error

    def _exchange(
        self,
        connection: Channel,
        header: Header,
        payload: memoryview | bytes,
        place: Place | None,
    ) -> tuple[dict[str, Any], memoryview]:
        try:
            connection.set_timeout(_ANSWER_SECONDS)
            connection.send(header, payload)
            answer, data = connection.receive(place)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise ServerLostError(f"the memory server {self.place} does not answer: {error}") from error
            raise
        with self._lock:
            self._idle.append(connection)
        raise_error(answer, self.place)
        return dict(answer), data

    def adopt(self, other: ServerConnections) -> None:
        """Take over the idle connections of another object to the same server."""
        with self._lock, other._lock:
            self._idle += other._idle
            other._idle.clear()

    def close(self) -> None:
        """Close the idle connections. Later requests connect again."""
        with self._lock:
            _close_all(self._idle)


def _close_all(idle: list[Channel]) -> None:
    while idle:
        idle.pop().close()
