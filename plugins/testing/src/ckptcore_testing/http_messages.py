"""HTTP/1.1 messages, read from and written to a connection without changes.

Implements the parts of RFC 9112 that a proxy needs. Only the length of a message is decoded, and headers are kept byte
for byte, so that signatures remain valid. Bodies are kept in memory.
"""

from __future__ import annotations

import re
import select
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

_HEAD_BYTES: Final = 1 << 18
"""Maximum size of a head."""

_RECEIVE_BYTES: Final = 1 << 18
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(?:;.*)?")


class ConnectionLost(OSError):
    """The connection was closed or reset before a message was complete."""


@dataclass(frozen=True, slots=True)
class HTTPHead:
    """The start line and the headers of a message.

    Attributes:
        first: the first line, without line end.
        fields: the header lines in order, without line ends.
    """

    first: bytes
    fields: tuple[bytes, ...]

    def field(self, name: str) -> str | None:
        """Return the value of a header. The first value if it is repeated, None if it is missing."""
        wanted = name.lower().encode("ascii")
        for line in self.fields:
            field, _, value = line.partition(b":")
            if field.strip().lower() == wanted:
                return value.strip().decode("latin-1")
        return None

    def having(self, name: str, value: str) -> HTTPHead:
        """Return the head with one header replaced or added."""
        wanted = name.lower().encode("ascii")
        kept = tuple(line for line in self.fields if line.partition(b":")[0].strip().lower() != wanted)
        return replace(self, fields=(*kept, f"{name}: {value}".encode("latin-1")))

    def encoded(self) -> bytes:
        """Return the bytes, with the empty line at the end."""
        return b"\r\n".join((self.first, *self.fields, b"", b""))

    @property
    def length(self) -> int | None:
        """Bytes of the body according to Content-Length. None without this header.

        Raises:
            ConnectionLost: if the header is not a number, because the connection is then unusable.
        """
        value = self.field("content-length")
        if value is None:
            return None
        if not value.isascii() or not value.isdigit():
            raise ConnectionLost(f"a message has Content-Length {value[:40]!r}, which is no number")
        return int(value)

    @property
    def is_chunked(self) -> bool:
        """True if the body is chunked."""
        return "chunked" in (self.field("transfer-encoding") or "").lower()

    @property
    def closes(self) -> bool:
        """True if the connection ends after this message."""
        return "close" in (self.field("connection") or "").lower() or b"HTTP/1.0" in self.first


@dataclass(frozen=True, slots=True)
class HTTPAnswer:
    """An answer.

    Attributes:
        head: the head.
        body: the body as received: a chunked body contains the sizes of its chunks.
    """

    head: HTTPHead
    body: bytes

    @property
    def status(self) -> int:
        """The status code."""
        return _status(self.head)

    @staticmethod
    def make(status: int, reason: str, content_type: str, body: bytes) -> HTTPAnswer:
        """Create an answer."""
        fields = (f"Content-Type: {content_type}".encode("latin-1"), f"Content-Length: {len(body)}".encode("latin-1"))
        return HTTPAnswer(HTTPHead(f"HTTP/1.1 {status} {reason}".encode("latin-1"), fields), body)

    def to(self, method: str) -> HTTPAnswer:
        """Return the answer to a request with this method: without the body for HEAD."""
        return HTTPAnswer(self.head, b"") if method == "HEAD" else self


class HTTPStream:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        """Take ownership of a connection. End it with `close` or `reset`."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._left = b""

    def send(self, *pieces: bytes | memoryview) -> None:
        """Send bytes.

        Raises:
            ConnectionLost: if the other end has closed or reset the connection.
        """
        try:
            for piece in pieces:
                if piece:
                    self._connection.sendall(piece)
        except OSError as error:
            raise ConnectionLost(f"the other end is gone: {error}") from error

    def read_head(self) -> HTTPHead | None:
        """Read the next head. None if the connection was closed before its first byte.

        Raises:
            ConnectionLost: if the connection ends in the middle of the head, or if the head is too long.
        """
        while (end := self._left.find(b"\r\n\r\n")) < 0:
            if len(self._left) > _HEAD_BYTES:
                raise ConnectionLost(f"a head is longer than {_HEAD_BYTES} bytes")
            more = self._receive()
            if not more and not self._left:
                return None
            if not more:
                raise ConnectionLost("the connection ended in the middle of a head")
            self._left += more
        head, self._left = self._left[:end], self._left[end + 4 :]
        first, *fields = head.split(b"\r\n")
        return HTTPHead(first, tuple(fields))

    def read_request_body(self, head: HTTPHead) -> bytes:
        """Read the body of a request. A chunked body contains the sizes of its chunks.

        Raises:
            ConnectionLost: if the connection ends before the body does, or if a size is invalid.
        """
        return self._read_chunks() if head.is_chunked else self.read(head.length or 0)

    def read_answer(self, method: str) -> HTTPAnswer:
        """Read the answer to a request with this method. Interim answers (100 Continue) are skipped.

        Raises:
            ConnectionLost: if the connection ends before the answer does, or if the answer is invalid.
        """
        while True:
            head = self.read_head()
            if head is None:
                raise ConnectionLost("the connection ended before an answer")
            if _status(head) >= 200:
                break
        if method == "HEAD" or _status(head) in (204, 304):
            return HTTPAnswer(head, b"")
        if head.is_chunked:
            return HTTPAnswer(head, self._read_chunks())
        length = head.length
        if length is not None:
            return HTTPAnswer(head, self.read(length))
        # The end of the connection ends the body. Set its length, because the client's connection stays open.
        body = b"".join(iter(self._receive_left, b""))
        return HTTPAnswer(head.having("Content-Length", str(len(body))), body)

    def read(self, nbytes: int) -> bytes:
        """Read `nbytes` bytes.

        Raises:
            ConnectionLost: if the connection ends before them.
        """
        if nbytes <= len(self._left):
            data, self._left = self._left[:nbytes], self._left[nbytes:]
            return data
        whole = bytearray(nbytes)
        filled = len(self._left)
        whole[:filled] = self._left
        self._left = b""
        with memoryview(whole) as view:
            while filled < nbytes:
                try:
                    count = self._connection.recv_into(view[filled : filled + _RECEIVE_BYTES])
                except OSError as error:
                    raise ConnectionLost(f"the connection broke: {error}") from error
                if not count:
                    raise ConnectionLost(f"the connection ended after {filled} of {nbytes} bytes of a body")
                filled += count
        return bytes(whole)

    def _read_chunks(self) -> bytes:
        pieces: list[bytes] = []
        while True:
            line = self._read_line()
            matched = _CHUNK_SIZE.fullmatch(line)
            if matched is None:
                raise ConnectionLost(f"{line[:40]!r} is no size of a chunk")
            size = int(matched[1], 16)
            pieces += (line, b"\r\n")
            if not size:
                break
            pieces.append(self.read(size + 2))
        while line := self._read_line():  # trailers
            pieces += (line, b"\r\n")
        pieces.append(b"\r\n")
        return b"".join(pieces)

    def _read_line(self) -> bytes:
        while (end := self._left.find(b"\r\n")) < 0:
            more = self._receive()
            if not more or len(self._left) > _HEAD_BYTES:
                raise ConnectionLost("the connection ended in the middle of a line")
            self._left += more
        line, self._left = self._left[:end], self._left[end + 2 :]
        return line

    def _receive_left(self) -> bytes:
        if self._left:
            data, self._left = self._left, b""
            return data
        return self._receive()

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error

    @property
    def has_ended(self) -> bool:
        """True if the other end has closed the idle connection, or sent unexpected data."""
        readable = select.poll()
        readable.register(self._connection, select.POLLIN)
        return bool(self._left or readable.poll(0))

    def interrupt(self) -> None:
        """End the connection for other threads that read from it. Never raises."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already

    def close(self) -> None:
        """Close the connection. The system still delivers data that was sent before."""
        self._connection.close()

    def reset(self) -> None:
        """Reset the connection (RST). The last sent data may be lost."""
        # With SO_LINGER on and a timeout of 0, close() discards unsent data and sends RST instead of FIN.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()


def _status(head: HTTPHead) -> int:
    parts: Iterable[bytes] = head.first.split(b" ", 2)[1:2]
    for part in parts:
        if part.isdigit():
            return int(part)
    raise ConnectionLost(f"an answer begins with {head.first[:80]!r}, which has no status")
