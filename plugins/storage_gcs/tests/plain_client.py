"""A plain HTTP client, to send requests as the documentation of GCS shows them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a server. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body, parsed as JSON."""
        return json.loads(self.body)


def ask(url: str, method: str, target: str, body: bytes = b"", **headers: str) -> Reply:
    """Send one request. Keyword arguments are headers, with ``_`` for ``-``."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request(
            method, target, body or None, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def in_two_parts(resource: Mapping[str, Any], data: bytes) -> tuple[bytes, str]:
    """Return the body and the media type of an upload with ``uploadType=multipart``."""
    head = b"--mark\r\nContent-Type: application/json\r\n\r\n" + json.dumps(resource).encode()
    body = head + b"\r\n--mark\r\nContent-Type: text/plain\r\n\r\n" + data + b"\r\n--mark--"
    return body, "multipart/related; boundary=mark"
