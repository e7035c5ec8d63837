"""Batches of the JSON API: several requests in one (https://cloud.google.com/storage/docs/batch)."""

from __future__ import annotations

import email.parser
import email.policy
from collections.abc import Callable
from email.message import Message
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from ckptcore_gcs_server.messages import Request, Response
from ckptcore_gcs_server.refusals import invalid

_MAX_REQUESTS: Final = 100
_BOUNDARY: Final = "batch_of_the_fake"


def answer_batch(request: Request, answer_one: Callable[[Request], Response]) -> Response:
    """Answer each request of a batch, in order. An error affects only its own request."""
    content_type = request.headers.get("content-type", "")
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(
        b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n" + request.body
    )
    parts = list(message.iter_parts()) if message.is_multipart() else []
    if not parts:
        raise invalid("Failed to parse batch request, error: the body has no parts")
    if len(parts) > _MAX_REQUESTS:
        raise invalid(f"The batch request has {len(parts)} calls, but at most {_MAX_REQUESTS} are allowed")
    pieces: list[bytes] = []
    for part in parts:
        response = answer_one(_inner(part))
        id = str(part.get("Content-ID", "")).strip()
        named = f"Content-ID: <response-{id.removeprefix('<').removesuffix('>')}>\r\n" if id else ""
        head = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
        body = bytes(response.body)
        pieces.append(
            f"--{_BOUNDARY}\r\nContent-Type: application/http\r\n{named}\r\n"
            f"HTTP/1.1 {response.status} Answer\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
            + body
            + b"\r\n"
        )
    return Response(
        200,
        {"Content-Type": f"multipart/mixed; boundary={_BOUNDARY}"},
        b"".join(pieces) + f"--{_BOUNDARY}--\r\n".encode(),
    )


def _inner(part: Message) -> Request:
    """Parse a part of a batch. Its target can be a path or a full URL."""
    text = part.get_payload()
    if not isinstance(text, str):
        raise invalid("Failed to parse batch request, error: a part is not a request")
    line, _, rest = text.lstrip().replace("\r\n", "\n").partition("\n")
    method, _, target = line.partition(" ")
    head, _, body = rest.partition("\n\n")
    headers = email.parser.HeaderParser().parsestr(head)
    url = urlsplit(target.removesuffix(" HTTP/1.1").strip())
    return Request(
        method,
        url.path,
        dict(parse_qsl(url.query, keep_blank_values=True)),
        {name.lower(): value for name, value in headers.items()},
        body.rstrip("\n").encode(),
    )
