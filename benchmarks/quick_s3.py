"""A small and fast S3 server for uploads and downloads: ``python quick_s3.py PORT``.

Servers for tests read a whole object for each range, which takes longer than any client. This server stores objects in
memory, in the parts that were uploaded, and has a thread for each connection. It checks no signatures, and nothing is
durable.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import urllib.parse
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from io import BufferedReader
from typing import Final

_READ_BYTES: Final = 1 << 20
_MODIFIED: Final = format_datetime(datetime.now(UTC), usegmt=True)


_KEY: Final = re.compile("<Key>(.*?)</Key>")
_NOTHING: Final = memoryview(b"")


@dataclass(slots=True)
class _Objects:
    """Objects and uploads, by key."""

    objects: dict[str, tuple[memoryview, str]] = field(default_factory=dict)
    uploads: dict[str, dict[int, memoryview]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    headers: tuple[str, ...] = ()
    body: memoryview = _NOTHING
    length: int | None = None


def serve_forever(port: int) -> None:
    """Serve until the process ends."""
    state = _Objects()
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve, args=(connection, state), daemon=True).start()


def _serve(connection: socket.socket, state: _Objects) -> None:
    with connection, BufferedReader(connection.makefile("rb", buffering=0), 64 << 10) as reader:
        while line := reader.readline():
            method, target, _ = line.decode("latin-1").split(" ")
            headers = {}
            while header := reader.readline().decode("latin-1").strip():
                name, _, value = header.partition(":")
                headers[name.lower()] = value.strip()
            if headers.get("expect", "").lower() == "100-continue":
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            answer = _answer(state, method, target, headers, _body(reader, int(headers.get("content-length", 0))))
            length = len(answer.body) if answer.length is None else answer.length
            lines = [f"HTTP/1.1 {answer.status}", f"Content-Length: {length}", *answer.headers, "", ""]
            connection.sendall("\r\n".join(lines).encode("latin-1"))
            if answer.body and method != "HEAD":
                connection.sendall(answer.body)


def _body(reader: BufferedReader[socket.SocketIO], nbytes: int) -> memoryview:
    data = memoryview(bytearray(nbytes))
    position = 0
    while position < nbytes:
        count = reader.readinto(data[position : position + _READ_BYTES])
        if not count:
            raise ConnectionError("the client hung up in a body")
        position += count
    return data


def _answer(state: _Objects, method: str, target: str, headers: dict[str, str], body: memoryview) -> _Answer:
    parts = urllib.parse.urlsplit(target)
    key = urllib.parse.unquote(parts.path)
    query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    with state.lock:
        if "uploads" in query:
            upload = uuid.uuid4().hex
            state.uploads[upload] = {}
            return _xml(f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>")
        if "uploadId" in query and query["uploadId"] not in state.uploads:
            return _error("404 Not Found", "NoSuchUpload")
        if method == "PUT" and "partNumber" in query:
            state.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return _Answer("200 OK", (f'ETag: "{uuid.uuid4().hex}"',))
        if method == "DELETE" and "uploadId" in query:
            del state.uploads[query["uploadId"]]
            return _Answer("204 No Content")
        if method == "POST" and "delete" in query:
            names = _KEY.findall(bytes(body).decode())
            for name in names:
                state.objects.pop(f"{key.rstrip('/')}/{name}", None)
            deleted = "".join([f"<Deleted><Key>{name}</Key></Deleted>" for name in names])
            return _xml(f"<DeleteResult>{deleted}</DeleteResult>")
        if method == "POST" and "uploadId" in query:
            pieces = state.uploads.pop(query["uploadId"])
            return _put(state, key, memoryview(b"".join([piece for _, piece in sorted(pieces.items())])), headers)
        if method == "PUT":
            return _put(state, key, body, headers)
        if "list-type" in query or "prefix" in query:
            return _list(state, key.rstrip("/"), query)
        if method == "DELETE":
            state.objects.pop(key, None)
            return _Answer("204 No Content")
        return _get(state, method, key, headers)


def _put(state: _Objects, key: str, data: memoryview, headers: dict[str, str]) -> _Answer:
    stored = state.objects.get(key)
    if headers.get("if-none-match") == "*" and stored is not None:
        return _error("412 Precondition Failed", "PreconditionFailed")
    if "if-match" in headers and (stored is None or stored[1].strip('"') != headers["if-match"].strip('"')):
        return _error("412 Precondition Failed", "PreconditionFailed")
    tag = f'"{uuid.uuid4().hex}"'
    state.objects[key] = (data, tag)
    answer = _xml(f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>")
    return _Answer("200 OK", (f"ETag: {tag}",), answer.body)


def _get(state: _Objects, method: str, key: str, headers: dict[str, str]) -> _Answer:
    stored = state.objects.get(key)
    if stored is None:
        return _error("404 Not Found", "NoSuchKey")
    data, tag = stored
    reply_headers = (f"ETag: {tag}", f"Last-Modified: {_MODIFIED}", "Accept-Ranges: bytes")
    if method == "HEAD":
        return _Answer("200 OK", reply_headers, length=len(data))
    if "range" not in headers:
        return _Answer("200 OK", reply_headers, data)
    first, _, last = headers["range"].removeprefix("bytes=").partition("-")
    start, stop = int(first), min(int(last) + 1, len(data)) if last else len(data)
    if start >= len(data):
        return _error("416 Range Not Satisfiable", "InvalidRange")
    return _Answer(
        "206 Partial Content",
        (*reply_headers, f"Content-Range: bytes {start}-{stop - 1}/{len(data)}"),
        data[start:stop],
    )


def _list(state: _Objects, bucket: str, query: dict[str, str]) -> _Answer:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    keys = sorted(key.removeprefix(f"{bucket}/") for key in state.objects if key.startswith(f"{bucket}/{prefix}"))
    contents, prefixes = [], set()
    for key in keys:
        rest, delimited, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
        if delimited:
            prefixes.add(f"{prefix}{rest}{delimiter}")
            continue
        data, tag = state.objects[f"{bucket}/{key}"]
        contents.append(
            f"<Contents><Key>{key}</Key><Size>{len(data)}</Size><ETag>{tag}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        )
    common = "".join(
        [f"<CommonPrefixes><Prefix>{delimited}</Prefix></CommonPrefixes>" for delimited in sorted(prefixes)]
    )
    count = len(contents) + len(prefixes)
    return _xml(
        f"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>{count}</KeyCount>{''.join(contents)}{common}</ListBucketResult>"
    )


def _xml(text: str) -> _Answer:
    return _Answer("200 OK", ("Content-Type: application/xml",), memoryview(f'<?xml version="1.0"?>{text}'.encode()))


def _error(status: str, code: str) -> _Answer:
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return _Answer(status, ("Content-Type: application/xml",), memoryview(text.encode()))


if __name__ == "__main__":
    serve_forever(int(sys.argv[1]))
