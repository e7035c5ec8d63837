"""Uploads of the JSON API: media (only the bytes), multipart (properties and bytes), and resumable."""

from __future__ import annotations

import email.parser
import email.policy
import json
import re
from typing import Any, Final
from urllib.parse import unquote

from ckptcore_gcs_server.buckets import Buckets
from ckptcore_gcs_server.conditions import Conditions, json_conditions
from ckptcore_gcs_server.json_api import properties_of
from ckptcore_gcs_server.messages import Request, Response, json_response
from ckptcore_gcs_server.objects import Properties, crc32c, md5
from ckptcore_gcs_server.refusals import Refusal, invalid, no_upload, not_implemented
from ckptcore_gcs_server.uploads import ResumableSession

_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(?:(\d+)|\*)")


class JsonUploads:
    """Answers requests to ``/upload/storage/v1``."""

    def __init__(self, buckets: Buckets, base: str) -> None:
        self._buckets = buckets
        self._base = base

    def answer(self, request: Request) -> Response:
        """Answer a request.

        Raises:
            Refusal: if the request is invalid, names a missing bucket or upload, or fails a precondition.
        """
        parts = [unquote(part) for part in request.path.removeprefix("/upload/storage/v1/").split("/")]
        if len(parts) != 3 or parts[0] != "b" or parts[2] != "o":
            raise not_implemented(f"the fake does not know {request.method} {request.path}")
        bucket = parts[1]
        self._buckets.require(bucket)
        if "upload_id" in request.query:
            return self._resume(request, request.query["upload_id"])
        if request.method not in ("POST", "PUT"):
            raise not_implemented(f"the fake does not know {request.method} {request.path}")
        match request.query.get("uploadType"):
            case "media":
                properties = Properties(request.headers.get("content-type", "application/octet-stream"))
                name = self._name(request, {})
                return self._put(bucket, name, request.body, properties, json_conditions(request))
            case "multipart":
                resource, content_type, data = _two_parts(request)
                _check_sums(resource, data)
                properties = properties_of({"contentType": content_type} | resource)
                return self._put(bucket, self._name(request, resource), data, properties, json_conditions(request))
            case "resumable":
                return self._begin(request, bucket)
            case other:
                raise invalid(f"Invalid value for uploadType: {other!r}")

    def _begin(self, request: Request, bucket: str) -> Response:
        resource = request.json()
        content_type = request.headers.get("x-upload-content-type", "application/octet-stream")
        session = ResumableSession(
            self._buckets.new_id("resumable"),
            bucket,
            self._name(request, resource),
            properties_of({"contentType": content_type} | resource),
            json_conditions(request),
        )
        self._buckets.sessions[session.id] = session
        url = f"{self._base}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={session.id}"
        return Response(200, {"Location": url, "X-GUploader-UploadID": session.id})

    def _resume(self, request: Request, upload: str) -> Response:
        session = self._buckets.sessions.get(upload)
        if session is None:
            raise no_upload(upload)
        with session.lock:
            if request.method == "DELETE":
                # "499 Client Closed Request": the service's response to a cancelled session.
                del self._buckets.sessions[upload]
                return Response(499)
            if session.done:
                return json_response(self._buckets.get(session.bucket, session.name).resource(self._base))
            text = request.headers.get("content-range")
            if text is None:
                complete = session.add(0, request.body, len(request.body))
            else:
                complete = self._take(session, text, request.body)
            if not complete:
                came = len(session.data)
                return Response(308, {"Range": f"bytes=0-{came - 1}"} if came else {})
            response = self._put(
                session.bucket, session.name, bytes(session.data), session.properties, session.conditions
            )
            session.done = True
            session.data.clear()
        return response

    def _take(self, session: ResumableSession, text: str, body: bytes) -> bool:
        match = _CONTENT_RANGE.fullmatch(text.strip())
        if match is None:
            raise invalid(f"Invalid Content-Range: {text!r}")
        first, last, total = (None if number is None else int(number) for number in match.groups())
        if first is None or last is None:
            # ``bytes */N`` asks for the number of received bytes. It completes the upload if this number is N.
            return total == len(session.data)
        if last - first + 1 != len(body):
            raise invalid(f"Content-Range {text!r} does not fit a body of {len(body)} bytes")
        return session.add(first, body, total)

    def _put(self, bucket: str, name: str, data: bytes, properties: Properties, conditions: Conditions) -> Response:
        stored = self._buckets.put(bucket, name, data, properties, conditions)
        headers = {"ETag": stored.etag, "x-goog-generation": str(stored.generation)}
        return json_response(stored.resource(self._base), headers=headers)

    def _name(self, request: Request, resource: dict[str, Any]) -> str:
        name = request.query.get("name") or resource.get("name")
        if not isinstance(name, str):
            raise invalid("Required parameter: name")
        return name


def _check_sums(resource: dict[str, Any], data: bytes) -> None:
    for name, actual in (("crc32c", crc32c(data)), ("md5Hash", md5(data))):
        if resource.get(name) not in (None, actual):
            raise Refusal(400, "invalid", "BadDigest", f"Provided {name} {resource[name]!r} doesn't match {actual!r}")


def _two_parts(request: Request) -> tuple[dict[str, Any], str, bytes]:
    """Parse a body of two parts (RFC 2387): the resource, the media type and the bytes."""
    content_type = request.headers.get("content-type", "")
    header = email.parser.BytesHeaderParser(policy=email.policy.HTTP).parsebytes(
        b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n"
    )
    boundary = header.get_boundary()
    if not boundary:
        raise invalid(f"Content-Type {content_type!r} names no boundary")
    mark = b"--" + boundary.encode("latin-1")
    # Split the body by hand, because a parser of email messages would change line ends in the data.
    start = request.body.find(mark)
    middle = request.body.find(b"\n" + mark, start + len(mark))
    end = request.body.rfind(b"\n" + mark + b"--")
    if start < 0 or middle < 0 or end < middle:
        raise invalid("Malformed multipart body.")
    _, resource = _headers_and_body(request.body[start + len(mark) : middle])
    headers, data = _headers_and_body(request.body[middle + 1 + len(mark) : end])
    try:
        parsed = json.loads(resource or b"{}")
    except ValueError as error:
        raise invalid(f"Parse Error: {error}") from error
    return parsed, str(headers.get("Content-Type", "application/octet-stream")), data.removesuffix(b"\r")


def _headers_and_body(part: bytes) -> tuple[Any, bytes]:
    part = part.removeprefix(b"\r").removeprefix(b"\n")
    head, separator, body = part.partition(b"\r\n\r\n")
    if not separator:
        head, separator, body = part.partition(b"\n\n")
    return email.parser.BytesHeaderParser().parsebytes(head + b"\r\n\r\n"), body
