"""A server whose answers a test defines. It simulates failures that no real server produces on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the client.

    Attributes:
        method: the HTTP method.
        path: the path without escapes.
        query: the parameters of the URL.
        headers: the headers, with names in lower case.
        body: the whole body.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to the client.

    Attributes:
        status: 0 to close the connection without an answer.
        body: the body of the answer.
        headers: the headers of the answer.
        cut: number of announced bytes that are not sent.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int = 0


def error_reply(status: int, code: str, message: str = "told by the service", more: str = "") -> Reply:
    """Return an error in the format of S3."""
    body = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>'
    return Reply(status, body.encode(), {"content-type": "application/xml"})


class StubServer:
    """A server that answers with a function, and records the requests."""

    def __init__(self, answer: Callable[[Request], Reply]) -> None:
        self.answer = answer
        self.asked: list[Request] = []
        self.url = ""
        self._lock = threading.Lock()

    def reply(self, request: Request) -> Reply:
        """Return the answer to a request."""
        with self._lock:
            self.asked.append(request)
            return self.answer(request)

    def methods(self) -> Sequence[str]:
        """Return the methods of the requests so far."""
        return [request.method for request in self.asked]


@contextmanager
def stub_server(answer: Callable[[Request], Reply]) -> Iterator[StubServer]:
    """Run a local server in threads of this process."""
    stub = StubServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
            reply = stub.reply(Request(self.command, unquote(parts.path), query, headers, body))
            if not reply.status:
                self.close_connection = True
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            length = {name.lower(): value for name, value in reply.headers.items()}.get("content-length")
            if length is None:
                self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body[: len(reply.body) - reply.cut])
            if reply.cut:
                self.close_connection = True

        do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
