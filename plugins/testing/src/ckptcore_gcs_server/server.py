"""The HTTP/1.1 server of the service, with one thread per connection."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from ckptcore_gcs_server.messages import Intercept, Request, Response
from ckptcore_gcs_server.service import Service


class StrictGcs:
    """A GCS server on 127.0.0.1, in memory and in threads of this process. Use it as a context manager.

    Args:
        buckets: buckets to create.
        port: the port. 0: any free port.
        token: the required token. None: no authorization.
        intercept: called with each request instead of the service. It returns the response for the client. None: the
            service answers. See `Intercept`.

    Attributes:
        url: the endpoint for clients.
        service: the service with its state.
        requests: all requests so far, as ``METHOD target``.
    """

    def __init__(
        self,
        buckets: Sequence[str] = (),
        *,
        port: int = 0,
        token: str | None = None,
        intercept: Intercept | None = None,
    ) -> None:
        self._server = _Server(("127.0.0.1", port), _Connection)
        self._server.gcs = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.service = Service(self.url, token)
        self.intercept = intercept
        self.requests: list[str] = []
        for bucket in buckets:
            self.service.buckets.create_bucket(bucket)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def serve_forever(self) -> None:
        """Serve on this thread until the process ends."""
        self._server.serve_forever()

    def answer(self, request: Request) -> Response | None:
        """Return the response for the client. None closes the connection."""
        if self.intercept is None:
            return self.service.answer(request)
        return self.intercept(request, self.service.answer)


class _Server(ThreadingHTTPServer):
    """The listening server. Closing it also closes all connections and ends their threads."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 256
    gcs: StrictGcs

    def __init__(self, *arguments: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a connection."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """End all connections. Threads that wait for a request wake up."""
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by the client
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the client has disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Connection(BaseHTTPRequestHandler):
    """One connection, which handles requests one after another."""

    protocol_version = "HTTP/1.1"
    server_version = "StrictGcs"
    # A response consists of small writes. With Nagle's algorithm, each would wait for a delayed acknowledgement.
    disable_nagle_algorithm = True
    server: _Server

    def parse_request(self) -> bool:
        """Read the head of a request. All methods are handled by `_do`."""
        good = super().parse_request()
        if good:
            setattr(self, f"do_{self.command}", self._do)
        return good

    def _do(self) -> None:
        url = urlsplit(self.path if self.path.startswith("http") else f"http://-{self.path}")
        request = Request(
            self.command,
            url.path,
            dict(parse_qsl(url.query, keep_blank_values=True)),
            {name.lower(): value for name, value in self.headers.items()},
            self._body(),
        )
        self.server.gcs.requests.append(f"{self.command} {self.path}")
        response = self.server.gcs.answer(request)
        if response is None:
            self.close_connection = True
            return
        body = memoryview(response.body)
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        if response.status not in (204, 304):
            self.send_header("Content-Length", str(len(body) if response.nbytes is None else response.nbytes))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self._exactly(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                continue  # trailers
            return b"".join(pieces)
        return self._exactly(int(self.headers.get("Content-Length") or 0))

    def _exactly(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) != size:
            raise ConnectionResetError("the client disconnected in the middle of a body")
        return data

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing. Tests use `StrictGcs.requests`."""
