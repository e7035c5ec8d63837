"""Messages between processes and memory servers: frames with a header and a payload, on an authenticated connection.

Both sides prove that they know the token of the job, without sending it. A connection has a key that is derived from
the token and from random numbers of both sides. Each header has a number and a code that is made with that key, so that
a recorded message is refused on another connection, and also if it is repeated on the same one. Payloads have
checksums. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import xxhash

from ckptcore.errors import (
    CheckpointError,
    ConditionFailedError,
    InvalidLocationError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    StorageFullError,
)

Header: TypeAlias = Mapping[str, Any]

PIECE_BYTES: Final = 1 << 22
"""The maximum bytes of a payload. Objects are sent in pieces of this size."""

BLOCK_BYTES: Final = 1 << 20
"""The bytes that a checksum covers."""

_HEADER_BYTES: Final = 1 << 20
_NONCE_BYTES: Final = 32
_CODE_BYTES: Final = 16
_GREETING: Final = b"ckptcore peer 1\n"
_FRAME: Final = struct.Struct("<III")
"""The number of the message, the bytes of the header, and the bytes of the payload."""

HANDSHAKE_SECONDS: Final = 10.0

_ERRORS: Final[Mapping[str, type[CheckpointError]]] = {
    "missing": ObjectNotFoundError,
    "condition": ConditionFailedError,
    "full": StorageFullError,
    "fenced": SaveLostError,
    "key": InvalidLocationError,
    "storage": StorageError,
}
"""The errors of a server that a client raises again, by the name in the header."""


class MessageError(StorageError):
    """The other side is no memory server of this job, or broke the protocol. The connection is closed."""


class PayloadError(MessageError):
    """A payload does not have its checksums: it was changed on its way, or in the memory that it was read from."""


Place: TypeAlias = Callable[[Header, int], Iterable[memoryview] | None]
"""Returns the memory for each block of a payload, given the header and the bytes of the payload; None: new memory.

A block has been received and verified when the next one is asked for.
"""


def blocks_of(payload: memoryview) -> list[memoryview]:
    """Return the blocks of `BLOCK_BYTES` of a payload. The last one may be shorter."""
    return [payload[offset : offset + BLOCK_BYTES] for offset in range(0, len(payload), BLOCK_BYTES)]


def checksums_of(payload: memoryview) -> list[int]:
    """Return the checksum of each block of a payload."""
    return [xxhash.xxh3_64_intdigest(block) for block in blocks_of(payload)]


class Channel(Protocol):
    """One side of a connection between two that know the token of the job. Used by one thread at a time.

    `Connection` implements it over TCP. Another transport, such as one that moves payloads by RDMA, implements it and
    inherits `ckptcore_testing.ChannelTests`; `ServerConnections` and `MemoryServer.serve_channel` use it.
    """

    def set_timeout(self, seconds: float | None) -> None:
        """Set the maximum time to wait for each part of a message; None for no limit."""
        ...

    def send(self, header: Header, payload: memoryview | bytes = b"") -> None:
        """Send a message. Afterwards the memory of the payload may change.

        Args:
            header: JSON of at most 1 MiB. If it has ``checksums``, they are those of the payload.
            payload: at most `PIECE_BYTES`.

        Raises:
            ValueError: the message is too large. Nothing was sent.
            OSError: the connection failed.
        """
        ...

    def receive(self, place: Place | None = None) -> tuple[Header, memoryview]:
        """Receive the next message. Its header has ``checksums``, that of each block of its payload (XXH3).

        Args:
            place: see `Place`. Not called without a payload.

        Returns:
            The header, and the payload; an empty one if `place` took it.

        Raises:
            MessageError: the message is invalid.
            PayloadError: the payload is damaged.
            OSError: the connection failed, the other side closed it, or the time is over.
        """
        ...

    def close(self) -> None:
        """Close the connection. A thread that waits for a message gets an error, on both sides."""
        ...


class Connection:
    """The `Channel` over TCP."""

    def __init__(self, connected: socket.socket, token: bytes, *, is_server: bool) -> None:
        """Prove to each other that both sides know the token.

        Args:
            connected: the connected socket.
            token: the secret of the job.
            is_server: True on the side that accepted the connection.

        Raises:
            MessageError: the other side does not know the token.
            OSError: the connection failed, or took too long.
        """
        self._socket = connected
        self._token = token
        connected.settimeout(HANDSHAKE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished closes nothing
        for option, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        own = os.urandom(_NONCE_BYTES)
        connected.sendall(_GREETING + own)
        greeting = self._receive_exactly(len(_GREETING) + _NONCE_BYTES)
        other = greeting[len(_GREETING) :]
        if not greeting.startswith(_GREETING):
            raise MessageError("the other side does not speak the protocol of memory servers")
        nonces = other + own if is_server else own + other  # the client's first
        if is_server:
            self._expect_proof(b"client", nonces)
            self._send_proof(b"server", nonces)
        else:
            self._send_proof(b"client", nonces)
            self._expect_proof(b"server", nonces)
        self._key = hmac.digest(token, b"key" + nonces, "sha256")
        self._names = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent = 0
        self._received = 0
        self.set_timeout(None)

    def set_timeout(self, seconds: float | None) -> None:
        """See `Channel`."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """See `Channel`."""
        with contextlib.suppress(OSError):  # the other side has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _proof(self, name: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self._token, name + nonces, "sha256")

    def _send_proof(self, name: bytes, nonces: bytes) -> None:
        self._socket.sendall(self._proof(name, nonces))

    def _expect_proof(self, name: bytes, nonces: bytes) -> None:
        proof = self._receive_exactly(hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, self._proof(name, nonces)):
            raise MessageError("the other side does not know the token of this job")

    def _code(self, name: bytes, frame: bytes, header: bytes) -> bytes:
        return hashlib.blake2b(name + frame + header, key=self._key, digest_size=_CODE_BYTES).digest()

    def send(self, header: Header, payload: memoryview | bytes = b"") -> None:
        """See `Channel`."""
        if len(payload) and "checksums" not in header:
            header = {**header, "checksums": checksums_of(memoryview(payload))}
        encoded = json.dumps(header).encode("ascii")
        if len(encoded) > _HEADER_BYTES or len(payload) > PIECE_BYTES:
            raise ValueError(f"a message of {len(encoded)} and {len(payload)} bytes is too large")
        frame = _FRAME.pack(self._sent, len(encoded), len(payload))
        self._sent += 1
        self._socket.sendall(frame + self._code(self._names[0], frame, encoded) + encoded)
        if len(payload):
            self._socket.sendall(payload)

    def receive(self, place: Place | None = None) -> tuple[Header, memoryview]:
        """See `Channel`. Allocates nothing before the header was authenticated."""
        start = self._receive_exactly(_FRAME.size + _CODE_BYTES)
        frame, code = start[: _FRAME.size], start[_FRAME.size :]
        number, header_bytes, payload_bytes = _FRAME.unpack(frame)
        if number != self._received or header_bytes > _HEADER_BYTES or payload_bytes > PIECE_BYTES:
            raise MessageError(f"invalid message {number} with {header_bytes} and {payload_bytes} bytes")
        encoded = self._receive_exactly(header_bytes)
        if not hmac.compare_digest(code, self._code(self._names[1], frame, encoded)):
            raise MessageError(f"message {number} was not sent by the other side of this connection")
        self._received += 1
        header = json.loads(encoded)
        if not isinstance(header, dict):
            raise MessageError(f"the header of message {number} is a {type(header).__name__} instead of an object")
        if not payload_bytes:
            return header, memoryview(b"")
        payload = memoryview(b"")
        blocks = None if place is None else place(header, payload_bytes)
        if blocks is None:
            payload = memoryview(bytearray(payload_bytes))
            blocks = blocks_of(payload)
        checksums = header.get("checksums")
        if not isinstance(checksums, list) or len(checksums) != -(-payload_bytes // BLOCK_BYTES):
            raise MessageError(f"message {number} has no checksum for each block of its payload")
        # `zip` asks for one block more than there are. So `place` hears that the last one has been verified.
        for block, checksum in zip(blocks, checksums, strict=True):
            self._receive_into(block)
            if xxhash.xxh3_64_intdigest(block) != checksum:
                raise PayloadError(f"the payload of message {number} was changed on its way, or before it was sent")
        return header, payload

    def _receive_exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._receive_into(memoryview(data))
        return bytes(data)

    def _receive_into(self, buffer: memoryview) -> None:
        while len(buffer):
            received = self._socket.recv_into(buffer)
            if not received:
                raise ConnectionResetError("the other side closed the connection")
            buffer = buffer[received:]


def error_header(error: Exception) -> Header:
    """Return the header that reports an error to the other side."""
    for name, kind in _ERRORS.items():
        if type(error) is kind:
            return {"error": name, "message": str(error)}
    return {"error": "storage", "message": f"{type(error).__name__}: {error}"}


def raise_error(header: Header, place: str) -> None:
    """Raise the error that a header reports, if it reports one.

    Args:
        header: the answer of a server.
        place: the server, for errors.
    """
    if (name := header.get("error")) is not None:
        raise _ERRORS.get(str(name), StorageError)(f"{header.get('message')} [{place}]")
