"""Web servers for tests. Each runs in a thread of this process.

One supports ranges, and one has an index page for each directory.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class PlainHandler(SimpleHTTPRequestHandler):
    """Python's own server. It does not support ranges, but has an index page for each directory.

    The server records the requests.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))  # type: ignore[attr-defined]
        super().do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class RangesHandler(PlainHandler):
    """A server of objects with ranges and versions, but without index pages."""

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))  # type: ignore[attr-defined]
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self._answer(404, b"nothing here")
            return
        data = path.read_bytes()
        version = f'"{hash(data):x}"'
        expected = self.headers.get("If-Match")
        if expected not in (None, version):
            self._answer(412, b"changed")
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, data, ETag=version)
            return
        start, stop = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else len(data), len(data))
        if start >= len(data):
            self._answer(416, b"", **{"Content-Range": f"bytes */{len(data)}"})
            return
        self._answer(
            206, data[start:stop], **{"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "ETag": version}
        )

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.requests: list[tuple[str, str | None]] = []


@contextmanager
def serve_directory(
    directory: Path, handler: type[SimpleHTTPRequestHandler]
) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Serve a directory. Yields its URL, and the list of requests, with path and range."""
    server = _Server(partial(handler, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
