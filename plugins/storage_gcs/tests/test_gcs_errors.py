"""Errors of the service in both APIs.

Each raises its own type, with a one-line message that has the location and advice.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import numpy as np
import pytest
import urllib3
from ckptcore_gcs.plugin import GcsPlugin
from ckptcore_gcs_server import Request, Response, StrictGcs
from ckptcore_gcs_server.conditions import Conditions

import ckptcore
from ckptcore.errors import (
    BucketNotFoundError,
    InvalidLocationError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
)
from ckptcore.model import JSON
from ckptcore.protocols import StorageBackend, StorageOptions


def _open(gcs: StrictGcs, url: str = "gs://bucket/run", **config: JSON) -> StorageBackend:
    options = {"endpoint": gcs.url, "anonymous": True, "retries": 0, **config}
    return GcsPlugin().open(url, StorageOptions(config=options))


def _xml(status: int, code: str, message: str = "words") -> Response:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Response(status, {"Content-Type": "application/xml"}, body.encode())


def _json(status: int, reason: str, message: str = "words") -> Response:
    error = {"code": status, "message": message, "errors": [{"domain": "global", "reason": reason, "message": message}]}
    return Response(status, {"Content-Type": "application/json"}, json.dumps({"error": error}, indent=1).encode())


Case = tuple[Response, type[StorageError], str]

CASES: dict[str, Case] = {
    "xml 401": (_xml(401, "AuthenticationRequired"), StorageCredentialsError, "401 AuthenticationRequired: words"),
    "json 401": (_json(401, "authError"), StorageCredentialsError, "401 authError: words"),
    "xml 403": (_xml(403, "AccessDenied"), StoragePermissionError, "Storage Object User"),
    "json 403": (_json(403, "forbidden"), StoragePermissionError, "403 forbidden: words"),
    "xml 404": (_xml(404, "NoSuchBucket"), BucketNotFoundError, "404 NoSuchBucket"),
    "json 404": (_json(404, "notFound", "The specified bucket does not exist."), BucketNotFoundError, "create it"),
    "xml 429": (_xml(429, "SlowDown"), StorageThrottledError, "once a second"),
    "json 429": (_json(429, "rateLimitExceeded"), StorageThrottledError, "429 rateLimitExceeded"),
    "json 403 of a quota": (_json(403, "userRateLimitExceeded"), StorageThrottledError, "403 userRateLimitExceeded"),
    "xml 503": (_xml(503, "ServiceUnavailable"), StorageThrottledError, "503"),
    "xml 507": (_xml(507, "QuotaExceeded"), StorageFullError, "quota"),
    "json 500": (_json(500, "backendError"), StorageError, "Try again later"),
    "xml 400": (_xml(400, "UserProjectMissing"), StorageError, "option 'user_project'"),
    "xml 501": (_xml(501, "NotImplemented"), StorageError, "option 'uploads' to 'composite'"),
    "no words at all": (Response(403), StoragePermissionError, "403"),
    "words of another kind": (Response(502, {}, b"<html>Bad Gateway</html>"), StorageError, "502"),
}


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
@pytest.mark.parametrize("way", ["put", "put as JSON", "get", "list", "write", "delete"])
def test_each_failure_has_its_own_error(gcs: StrictGcs, case: str, way: str) -> None:
    answer, expected, words = CASES[case]
    gcs.intercept = lambda request, serve: answer
    storage = _open(gcs, part_bytes=5 << 20, uploads="composite" if way == "put as JSON" else "parts")

    def write() -> None:
        writer = storage.open_writer("a", 11 << 20)
        writer.write_at(0, bytes(11 << 20))

    ways: dict[str, Callable[[], object]] = {
        "put": lambda: storage.put("a", b"1"),
        "put as JSON": lambda: storage.put("a", b"1"),
        "get": lambda: storage.get("a"),
        "list": lambda: list(storage.list()),
        "write": write,
        "delete": lambda: storage.delete(["a", "b"]),
    }
    with pytest.raises(expected) as caught:
        ways[way]()
    text = str(caught.value)
    assert type(caught.value) is expected
    assert "gs://bucket/run/" in text
    assert words in text
    assert "\n" not in text
    assert "Debug" not in text


def test_the_error_for_a_missing_bucket(gcs: StrictGcs) -> None:
    storage = _open(gcs, "gs://other/run")
    for work in (lambda: storage.put("a", b""), lambda: storage.get("a"), lambda: list(storage.list())):
        with pytest.raises(BucketNotFoundError, match="gs://other/run/.*NoSuchBucket"):
            work()


def test_the_remedy_for_a_missing_bucket(gcs: StrictGcs) -> None:
    context = ckptcore.Context(storage={"gs": {"endpoint": gcs.url, "anonymous": True, "retries": 0}})

    def save(bucket: str) -> None:
        ckptcore.save(f"gs://{bucket}/run", {"w": np.ones(3)}, context=context)

    with pytest.raises(BucketNotFoundError, match="gs://other/run/.*Check the name of the bucket, or create it"):
        save("other")
    save("bucket")
    assert urllib3.request("POST", f"{gcs.url}/storage/v1/b?project=testing", json={"name": "other"}).status == 200
    save("other")
    for bucket in ("bucket", "other"):
        assert ckptcore.load(f"gs://{bucket}/run", context=context)["w"].tolist() == [1] * 3


def test_locations_that_are_not_valid_unicode(gcs: StrictGcs) -> None:
    context = ckptcore.Context(storage={"gs": {"endpoint": gcs.url, "anonymous": True}})
    with pytest.raises(
        InvalidLocationError, match="invalid key 'run.*keys in UTF-8; use another name for the location"
    ):
        ckptcore.save("gs://bucket/run\udc80", {"w": np.ones(3)}, context=context)
    ckptcore.save("gs://bucket/run\u0080", {"w\udc80": np.ones(3)}, context=context)
    assert ckptcore.load("gs://bucket/run\u0080", context=context)["w\udc80"].tolist() == [1] * 3


def test_a_refused_connection_is_an_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        config = {"endpoint": url, "anonymous": True, "retries": 0}
        storage = GcsPlugin().open("gs://bucket/run", StorageOptions(config=config))
        for work in (lambda: storage.put("a", b""), lambda: storage.delete(["a"]), lambda: list(storage.list())):
            with pytest.raises(StorageError, match="the connection failed"):
                work()


def test_a_request_without_an_answer_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = {"endpoint": url, "anonymous": True, "retries": 0, "timeout": 0.2}
        storage = GcsPlugin().open("gs://bucket/run", StorageOptions(config=config))
        for work in (lambda: storage.put("a", b""), lambda: storage.delete(["a"])):
            with pytest.raises(StorageTimeoutError, match="option 'timeout'"):
                work()


def test_one_refused_deletion_of_a_batch(gcs: StrictGcs) -> None:
    """The other objects are deleted, and the refusal raises an error."""
    storage = _open(gcs)
    for name in ("a", "b", "c"):
        storage.put(name, b"1")

    def refuse(request: Request, serve: Callable[[Request], Response]) -> Response:
        answer = serve(request)
        if not request.path.startswith("/batch"):
            return answer
        refusal = _json(403, "forbidden")
        told = b"HTTP/1.1 403 Forbidden\r\n\r\n" + bytes(refusal.body) + b"\r\n"
        first, separator, rest = bytes(answer.body).partition(b"HTTP/1.1 204 Answer\r\nContent-Length: 0\r\n\r\n\r\n")
        assert separator
        return Response(200, answer.headers, first + told + rest)

    gcs.intercept = refuse
    with pytest.raises(StoragePermissionError, match="403 forbidden"):
        storage.delete(["a", "b", "c"])
    gcs.intercept = None
    assert list(storage.list()) == []


def test_answers_of_a_batch_can_have_any_order(gcs: StrictGcs) -> None:
    """Each answer names its request. Transient failures are retried."""
    storage = _open(gcs, retries=3, first_wait=0.001)
    for name in ("a", "b", "c"):
        storage.put(name, b"1")
    left: list[int] = []

    def turn_round(request: Request, serve: Callable[[Request], Response]) -> Response:
        if not request.path.startswith("/batch"):
            return serve(request)
        left.append(request.body.count(b"DELETE /storage"))
        if len(left) > 1:
            return serve(request)
        gcs.service.buckets.delete("bucket", "run/a", Conditions())
        gcs.service.buckets.delete("bucket", "run/b", Conditions())
        busy = b"HTTP/1.1 503 Busy\r\n\r\n"
        parts = [b"<response-2>\r\n\r\n" + busy, b"<response-0>\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"]
        parts.append(b"<response-1>\r\n\r\nHTTP/1.1 404 Not Found\r\n\r\n")
        body = b"".join(b"--m\r\nContent-Type: application/http\r\nContent-ID: " + part + b"\r\n" for part in parts)
        return Response(200, {"Content-Type": "multipart/mixed; boundary=m"}, body + b"--m--\r\n")

    gcs.intercept = turn_round
    storage.delete(["a", "b", "c"])
    assert list(storage.list()) == []
    assert gcs.requests[-2] == "DELETE /storage/v1/b/bucket/o/run%2Fc", "only the one that failed is sent again"


def test_invalid_options_are_refused(gcs: StrictGcs) -> None:
    with pytest.raises(ValueError, match="credentials_file: file of credentials"):
        _open(gcs, credential_file="x")
    with pytest.raises(ValueError, match="expected one of 'parts', 'composite', found 'resumable'"):
        _open(gcs, uploads="resumable")
    for uploads in ("parts", "composite"):
        storage = _open(gcs, uploads=uploads)
        storage.put(uploads, b"123")
        assert storage.get(uploads) == b"123"
    with pytest.raises(InvalidLocationError, match="not a service URL"):
        _open(gcs, endpoint="storage.googleapis.com")
