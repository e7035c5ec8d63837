"""Failures of the service. Each raises its own error with a one-line message, and transient ones are retried."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from ckptcore_s3.plugin import S3Plugin

from ckptcore.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ConditionFailedError,
    ObjectNotFoundError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
    WrongRegionError,
)
from ckptcore.model import JSON
from ckptcore.protocols import IF_ABSENT, IfTag, StorageOptions
from plugins.storage_s3.tests.stub_server import Reply, Request, error_reply, stub_server


def open_stub(url: str, **options: JSON):  # type: ignore[no-untyped-def]  # the storage of the plugin, with its limit
    """Open a directory at a stub server."""
    config = {
        "endpoint": url, "region": "us-east-1", "access_key_id": "me", "secret_access_key": "hidden", "retries": 0,
        "first_wait": 0.001, "part_bytes": 5 << 20, **options,
    }  # fmt: skip
    return S3Plugin().open("s3://bucket/run", StorageOptions(config=config))


FAILURES = [
    (403, "InvalidAccessKeyId", StorageCredentialsError, "AWS_ACCESS_KEY_ID"),
    (403, "SignatureDoesNotMatch", StorageCredentialsError, "AWS_SECRET_ACCESS_KEY"),
    (400, "ExpiredToken", StorageCredentialsError, "sign in"),
    (403, "AccessDenied", StoragePermissionError, "s3:PutObject"),
    (404, "NoSuchBucket", BucketNotFoundError, "name of the bucket"),
    (503, "SlowDown", StorageThrottledError, "concurrency"),
    (429, "TooManyRequests", StorageThrottledError, "concurrency"),
    (403, "RequestTimeTooSkewed", ClockSkewError, "clock"),
    (301, "PermanentRedirect", WrongRegionError, "region"),
    (400, "AuthorizationHeaderMalformed", WrongRegionError, "eu-west-1"),
    (400, "RequestTimeout", StorageTimeoutError, "network"),
    (403, "QuotaExceeded", StorageFullError, "quota"),
    (507, "XMinioStorageFull", StorageFullError, "quota"),
    (500, "InternalError", StorageError, "later"),
    (501, "NotImplemented", StorageError, "does not support"),
    (400, "InvalidRequest", StorageError, "endpoint"),
]


@pytest.mark.parametrize(("status", "code", "error", "remedy"), FAILURES, ids=[row[1] for row in FAILURES])
def test_each_failure_has_its_own_error(status: int, code: str, error: type[StorageError], remedy: str) -> None:
    more = "<Region>eu-west-1</Region>" if error is WrongRegionError else ""
    with stub_server(lambda request: error_reply(status, code, more=more)) as stub:
        storage = open_stub(stub.url)
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: storage.get("a"),
            "get_with_tag": lambda: storage.get_with_tag("a"),
            "get_into": lambda: storage.get_into("a", [(0, memoryview(bytearray(3)))]),
            "size": lambda: storage.size("a"),
            "put": lambda: storage.put("a", b"1"),
            "a put of a key that obstore has no name for": lambda: storage.put("a\tb", b"1"),
            "write": lambda: storage.open_writer("a", 6 << 20).write_at(0, bytes(5 << 20)),
            "list": lambda: list(storage.list()),
            "names": lambda: storage.list_names(),
            "delete": lambda: storage.delete(["a"]),
            "uploads": lambda: storage.abort_uploads(),
        }
        for operation, call in calls.items():
            if operation == "uploads" and code in ("AccessDenied", "NotImplemented"):
                call()  # a save does not need these requests
                continue
            with pytest.raises(StorageError) as caught:
                call()
            text = str(caught.value)
            if operation == "size" and status == 404:  # an answer to HEAD has no body, so it does not name the bucket
                assert type(caught.value) is ObjectNotFoundError
                continue
            assert type(caught.value) is error, (operation, text)
            assert code in text and remedy in text, (operation, text)
            assert "s3://bucket/run" in text, (operation, text)
            assert "\n" not in text and "Debug" not in text and "Retry" not in text and len(text) < 1000, (
                operation,
                text,
            )
            assert "hidden" not in text


def test_a_refused_connection_is_an_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        storage = open_stub(f"http://127.0.0.1:{closed.getsockname()[1]}")
        for call in (lambda: storage.get("a"), lambda: list(storage.list())):
            with pytest.raises(StorageError, match="connection failed.*efused.*endpoint") as caught:
                call()
            assert type(caught.value) is StorageError
            assert "\n" not in str(caught.value)


def test_a_request_without_an_answer_times_out() -> None:
    released = threading.Event()

    def wait(request: Request) -> Reply:
        released.wait(60)
        return Reply()

    with stub_server(wait) as stub:
        storage = open_stub(stub.url, timeout=0.1)
        try:
            for call in (lambda: storage.get("a"), lambda: list(storage.list())):
                with pytest.raises(StorageTimeoutError, match="the request timed out"):
                    call()
        finally:
            released.set()


@pytest.mark.parametrize(
    "failure", [error_reply(503, "SlowDown"), error_reply(500, "InternalError"), Reply(0), Reply(502)]
)
@pytest.mark.parametrize("operation", ["get", "list"])
def test_transient_failures_are_retried(operation: str, failure: Reply) -> None:
    replies = [failure, failure]

    def answer(request: Request) -> Reply:
        if replies:
            return replies.pop()
        return Reply(
            200, b"<ListBucketResult/>" if operation == "list" else b"data", {"etag": '"1"', "last-modified": DATE}
        )

    with stub_server(answer) as stub:
        storage = open_stub(stub.url, retries=5)
        assert storage.get("a") == b"data" if operation == "get" else list(storage.list()) == []
        assert len(stub.asked) == 3


DATE = "Sat, 21 Nov 2026 21:00:00 GMT"


def test_a_truncated_body_is_read_again() -> None:
    replies = [Reply(200, b"0123456789", {"etag": '"1"', "last-modified": DATE}, cut=cut) for cut in (0, 3, 10)]
    with stub_server(lambda request: replies.pop()) as stub:
        assert open_stub(stub.url, retries=5).get("a") == b"0123456789"
        assert len(stub.asked) == 3


def test_the_number_of_tries_is_limited_and_reported() -> None:
    with stub_server(lambda request: error_reply(503, "SlowDown")) as stub:
        with pytest.raises(StorageThrottledError, match="4 tries in"):
            open_stub(stub.url, retries=3).get("a")
        assert len(stub.asked) == 4
        with pytest.raises((StorageThrottledError, StorageTimeoutError)):  # the deadline may end the last try
            open_stub(stub.url, retries=100_000, deadline=0.1).get("a")


def test_permanent_failures_are_not_retried() -> None:
    with stub_server(lambda request: error_reply(403, "AccessDenied")) as stub:
        with pytest.raises(StoragePermissionError):
            open_stub(stub.url, retries=3).get("a")
        assert len(stub.asked) == 1


def test_fewer_requests_run_concurrently_if_the_service_throttles(caplog: pytest.LogCaptureFixture) -> None:
    """Above its limit of concurrent requests, the service answers SlowDown.

    All requests succeed, and the log has one line.
    """
    under_way = arrived = 0
    lock = threading.Lock()
    three = threading.Barrier(3)

    def answer(request: Request) -> Reply:
        return Reply(200, b"data", {"etag": '"1"', "last-modified": DATE})

    with stub_server(answer) as stub:
        inner = stub.reply

        def reply(request: Request) -> Reply:
            nonlocal under_way, arrived
            with lock:
                under_way += 1
                arrived += 1
                now, is_early = under_way, arrived <= three.parties
            if is_early:
                three.wait(60)  # so that the service gets three requests at once
            with lock:
                under_way -= 1
            return error_reply(503, "SlowDown") if now > 2 else inner(request)

        stub.reply = reply  # type: ignore[method-assign]
        storage = open_stub(stub.url, retries=1000, concurrency=8)
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda _: storage.get("a"), range(40))) == [b"data"] * 40
        assert storage.bucket.limit.cuts >= 1
    assert [record.getMessage() for record in caplog.records if "throttles" in record.getMessage()] == [
        "s3://bucket throttles requests: fewer requests run concurrently for a while"
    ]


def test_all_pages_of_a_list_are_read() -> None:
    pages = {
        "": "<Contents><Key>run/a%09b</Key></Contents><NextContinuationToken>one&amp;two</NextContinuationToken>",
        "one&two": "<Contents><Key>run/c%2525</Key></Contents>",
    }

    def answer(request: Request) -> Reply:
        assert request.query["prefix"] == "run/" and request.query["encoding-type"] == "url"
        token = request.query.get("continuation-token", "")
        more = "<IsTruncated>true</IsTruncated>" if not token else "<IsTruncated>false</IsTruncated>"
        body = (
            f"<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><EncodingType>url</EncodingType>{more}"
        )
        return Reply(200, f"{body}{pages[token]}</ListBucketResult>".encode())

    with stub_server(answer) as stub:
        assert list(open_stub(stub.url).list()) == ["a\tb", "c%25"]
        assert len(stub.asked) == 2


@pytest.mark.parametrize("body", [b"", b"no XML", b"<ListBucketResult>", b"\xff"])
def test_an_answer_that_is_not_xml_is_an_error(body: bytes) -> None:
    with stub_server(lambda request: Reply(200, body)) as stub, pytest.raises(StorageError, match="not XML"):
        list(open_stub(stub.url).list())


def test_one_failed_deletion_of_many_is_an_error() -> None:
    error = b"<Error><Key>run/b</Key><Code>AccessDenied</Code><Message>not yours</Message></Error>"
    body = b"<DeleteResult>" + error + b"</DeleteResult>"
    told = r"AccessDenied: not yours.*s3:DeleteObject"
    with stub_server(lambda request: Reply(200, body)) as stub, pytest.raises(StoragePermissionError, match=told):
        open_stub(stub.url).delete(["a", "b"])


@pytest.mark.parametrize("refusal", [error_reply(501, "NotImplemented"), Reply(405)])
def test_objects_are_deleted_one_by_one_if_batches_are_not_supported(refusal: Reply) -> None:
    with stub_server(lambda request: refusal if request.method == "POST" else Reply(204)) as stub:
        open_stub(stub.url).delete(["a", "b"])
        assert stub.methods() == ["POST", "DELETE", "DELETE"]


def test_repeated_failures_reduce_the_number_of_concurrent_requests() -> None:
    replies = [error_reply(500, "InternalError")] * 2
    with stub_server(lambda request: replies.pop() if replies else error_reply(404, "NoSuchKey")) as stub:
        storage = open_stub(stub.url, retries=3)
        replies.pop()
        with pytest.raises(ObjectNotFoundError):
            storage.get("a")
        assert storage.bucket.limit.cuts == 0, "once is an accident"
        replies += [error_reply(500, "InternalError")] * 2
        with pytest.raises(ObjectNotFoundError):
            storage.get("a")
        assert storage.bucket.limit.cuts == 1


class Objects:
    """A service with one object. It can lose answers, or compare tags without quotation marks."""

    def __init__(self, *, lost: int = 0, bare: bool = False) -> None:
        self.lost = lost
        self.bare = bare
        self.held: tuple[bytes, str, str] | None = None
        self.count = 0

    def answer(self, request: Request) -> Reply:
        if request.method in ("HEAD", "GET"):
            if self.held is None:
                return error_reply(404, "NoSuchKey")
            data, tag, mark = self.held
            headers = {"etag": f'"{tag}"', "last-modified": DATE, "x-amz-meta-ckptcoreput": mark}
            return Reply(200, data, headers)
        assert request.method == "PUT"
        wanted = request.headers.get("if-match")
        current = None if self.held is None else self.held[1] if self.bare else f'"{self.held[1]}"'
        if ("if-none-match" in request.headers and current) or (wanted is not None and wanted != current):
            return error_reply(412, "PreconditionFailed")
        self.count += 1
        self.held = request.body, f"tag-{self.count}", request.headers["x-amz-meta-ckptcoreput"]
        if self.lost:
            self.lost -= 1
            return Reply(0)
        return Reply(200, b"", {"etag": f'"{self.held[1]}"'})


@pytest.mark.parametrize("key", ["a", "tab\tname"])
@pytest.mark.parametrize("conditional", ["absent", "tag"])
def test_a_conditional_put_with_a_lost_answer_succeeds(conditional: str, key: str) -> None:
    objects = Objects()
    with stub_server(objects.answer) as stub:
        storage = open_stub(stub.url, retries=3)
        condition = IF_ABSENT if conditional == "absent" else IfTag(storage.put(key, b"before"))
        objects.lost = 1
        tag = storage.put(key, b"mine", condition=condition)
        assert storage.get_with_tag(key) == (b"mine", tag)
        with pytest.raises(ConditionFailedError):
            storage.put(key, b"mine", condition=condition)


def test_tags_without_quotation_marks() -> None:
    """Ceph RGW 16.2 compares tags in this way."""
    objects = Objects(bare=True)
    with stub_server(objects.answer) as stub:
        storage = open_stub(stub.url)
        first = storage.put("a", b"1")
        second = storage.put("a", b"2", condition=IfTag(first))
        asked = len(stub.asked)
        storage.put("a", b"3", condition=IfTag(second))
        assert len(stub.asked) == asked + 1, "it is learnt once"
        for stale in (first, second):
            with pytest.raises(ConditionFailedError):
                storage.put("a", b"4", condition=IfTag(stale))


class Uploads:
    """A service with one upload. The answer to its completion can be lost, or be an error with status 200."""

    def __init__(self, *, end: str) -> None:
        self.end = end
        self.mark = ""
        self.parts: dict[int, bytes] = {}
        self.done = b""
        self.aborted = 0

    def answer(self, request: Request) -> Reply:
        query = request.query
        if "uploads" in query:
            self.mark = request.headers["x-amz-meta-ckptcoreput"]
            return Reply(200, b"<R><UploadId>u&amp;1</UploadId></R>")
        if "partNumber" in query:
            assert query["uploadId"] == "u&1"
            self.parts[int(query["partNumber"])] = request.body
            return Reply(200, b"", {"etag": f'"{query["partNumber"]}"'})
        if request.method == "DELETE":
            self.aborted += 1
            return Reply(204)
        if request.method == "POST":
            if self.end == "error once":
                self.end = ""
                return Reply(200, b"<Error><Code>InternalError</Code><Message>try again</Message></Error>")
            if self.end == "error":
                return Reply(200, b"<Error><Code>InvalidPart</Code><Message>no such part</Message></Error>")
            if self.done or self.end == "gone":
                return error_reply(404, "NoSuchUpload")
            self.done = b"".join(self.parts[number] for number in sorted(self.parts))
            return Reply(0) if self.end == "lost" else Reply(200, b"<CompleteMultipartUploadResult/>")
        if request.method == "HEAD" and self.done:
            return Reply(200, b"", {"etag": '"x"', "last-modified": DATE, "x-amz-meta-ckptcoreput": self.mark})
        return error_reply(404, "NoSuchKey")


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("end", ["", "lost", "error once", "error", "gone"])
def test_answers_to_the_completion_of_an_upload(end: str, new: bool) -> None:
    uploads = Uploads(end=end)
    data = bytes(range(256)) * (13 << 12)
    with stub_server(uploads.answer) as stub:
        storage = open_stub(stub.url, retries=3)
        writer = (storage.open_new if new else storage.open_writer)("a", len(data))
        writer.write_at(0, data)
        if end in ("error", "gone"):
            with pytest.raises(StorageError, match="InvalidPart|NoSuchUpload") as caught:
                writer.finish()
            assert not isinstance(caught.value, ConditionFailedError)
            writer.abort()
            assert uploads.aborted == 1
        else:
            writer.finish()
            assert uploads.done == data
            assert [len(part) for _, part in sorted(uploads.parts.items())] == [5 << 20, 5 << 20, 3 << 20]
            writer.abort()
            assert uploads.aborted == 0
