"""The strict GCS server: uploads in pieces, and connections."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from ckptcore_gcs_server import Request, Response, StrictGcs

from plugins.storage_gcs.tests.plain_client import Reply, ask, in_two_parts

RESUMABLE = "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a"
PART = bytes(5 << 20)


def _begin(gcs: StrictGcs, name: str = "a") -> str:
    body = ask(gcs.url, "POST", f"/bucket/{name}?uploads", content_type="text/plain").body.decode()
    return body.partition("<UploadId>")[2].partition("</UploadId>")[0]


def _part(gcs: StrictGcs, upload: str, number: int, data: bytes) -> str:
    reply = ask(gcs.url, "PUT", f"/bucket/a?partNumber={number}&uploadId={upload}", data)
    assert reply.status == 200
    return reply.headers["etag"]


def _complete(gcs: StrictGcs, upload: str, parts: list[tuple[int, str]]) -> Reply:
    named = "".join(f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>" for number, tag in parts)
    body = f"<CompleteMultipartUpload>{named}</CompleteMultipartUpload>".encode()
    return ask(gcs.url, "POST", f"/bucket/a?uploadId={upload}", body)


def test_parts_become_an_object(gcs: StrictGcs) -> None:
    upload = _begin(gcs)
    second, first = _part(gcs, upload, 2, b"end"), _part(gcs, upload, 1, PART)
    assert ask(gcs.url, "GET", "/bucket/a").status == 404
    assert _complete(gcs, upload, [(1, first), (2, second)]).status == 200
    assert ask(gcs.url, "GET", "/bucket/a").body == PART + b"end"
    assert ask(gcs.url, "GET", "/bucket/a").headers["content-type"] == "text/plain"
    # A client that lost the answer repeats the request. By then the upload no longer exists.
    again = _complete(gcs, upload, [(1, first), (2, second)])
    assert (again.status, b"<Code>NoSuchUpload</Code>" in again.body) == (404, True)


def test_invalid_parts_are_refused(gcs: StrictGcs) -> None:
    upload = _begin(gcs)
    small, large = _part(gcs, upload, 1, b"small"), _part(gcs, upload, 2, PART)
    for parts, code in (
        ([(1, small), (2, large)], b"EntityTooSmall"),
        ([(2, large), (1, small)], b"InvalidPartOrder"),
        ([(2, small)], b"InvalidPart"),
        ([(3, large)], b"InvalidPart"),
        ([], b"MalformedXML"),
    ):
        refused = _complete(gcs, upload, parts)
        assert (refused.status, code in refused.body) == (400, True)
    assert ask(gcs.url, "PUT", f"/bucket/a?partNumber=0&uploadId={upload}", b"1").status == 400
    assert ask(gcs.url, "PUT", f"/bucket/other?partNumber=1&uploadId={upload}", b"1").status == 404


def test_uploads_are_listed_and_aborted(gcs: StrictGcs) -> None:
    uploads = [_begin(gcs, name) for name in ("run/a", "run/b%20c", "run/b%20c", "other/d")]
    listed = ask(gcs.url, "GET", "/bucket?uploads&prefix=run/&encoding-type=url&max-uploads=2").body.decode()
    assert listed.count("<Upload>") == 2
    assert "<Key>run/b%20c</Key>" in listed
    assert "<IsTruncated>true</IsTruncated>" in listed
    rest = ask(
        gcs.url, "GET", f"/bucket?uploads&prefix=run/&key-marker=run/b%20c&upload-id-marker={uploads[1]}"
    ).body.decode()
    assert rest.count("<Upload>") == 1
    assert uploads[2] in rest
    assert ask(gcs.url, "DELETE", f"/bucket/run/a?uploadId={uploads[0]}").status == 204
    assert ask(gcs.url, "DELETE", f"/bucket/run/a?uploadId={uploads[0]}").status == 404


def test_a_resumable_upload_reports_the_received_bytes(gcs: StrictGcs) -> None:
    session = ask(gcs.url, "POST", RESUMABLE).headers["location"].removeprefix(gcs.url)
    piece = bytes(256 << 10)
    stop = len(piece) - 1
    assert ask(gcs.url, "PUT", session, content_range="bytes */*").status == 308
    first = ask(gcs.url, "PUT", session, piece, content_range=f"bytes 0-{stop}/*")
    assert (first.status, first.headers["range"]) == (308, f"bytes=0-{stop}")
    # A client that lost the answer sends the same bytes again. They count once.
    assert ask(gcs.url, "PUT", session, piece, content_range=f"bytes 0-{stop}/*").headers["range"] == f"bytes=0-{stop}"
    assert ask(gcs.url, "PUT", session, piece[1:], content_range=f"bytes {stop + 1}-{2 * stop}/*").status == 400
    assert ask(gcs.url, "PUT", session, b"x", content_range=f"bytes {stop + 9}-{stop + 9}/{stop + 10}").status == 503
    last = ask(gcs.url, "PUT", session, b"end", content_range=f"bytes {stop + 1}-{stop + 3}/{stop + 4}")
    assert (last.status, last.json()["size"]) == (200, str(stop + 4))
    assert ask(gcs.url, "PUT", session, content_range=f"bytes */{stop + 4}").json() == last.json()


def test_an_aborted_resumable_upload_no_longer_exists(gcs: StrictGcs) -> None:
    session = ask(gcs.url, "POST", RESUMABLE).headers["location"].removeprefix(gcs.url)
    assert ask(gcs.url, "DELETE", session).status == 499
    assert ask(gcs.url, "PUT", session, b"late").status == 404
    assert ask(gcs.url, "GET", "/bucket/a").status == 404


@pytest.mark.parametrize("data", [b"", b"\r\n", b"\n--mark--\n--mar", bytes(range(256)) * 3, b"ends\r\n"])
def test_an_upload_of_two_parts_keeps_every_byte(gcs: StrictGcs, data: bytes) -> None:
    body, content_type = in_two_parts({"name": "a", "metadata": {"k": "v"}}, data)
    if b"--mark" in data:
        content_type, body = content_type.replace("mark", "mork"), body.replace(b"--mark", b"--mork", 2)
        body = body[: -len(b"--mark--")] + b"--mork--"
    target = "/upload/storage/v1/b/bucket/o?uploadType=multipart"
    assert ask(gcs.url, "POST", target, body, content_type=content_type).status == 200
    reply = ask(gcs.url, "GET", "/bucket/a")
    assert (reply.body, reply.headers["content-type"], reply.headers["x-goog-meta-k"]) == (data, "text/plain", "v")


def test_bytes_with_a_wrong_checksum_are_refused(gcs: StrictGcs) -> None:
    target = "/upload/storage/v1/b/bucket/o?uploadType=multipart"
    body, content_type = in_two_parts({"name": "a", "crc32c": "AAAAAA=="}, b"1")
    assert ask(gcs.url, "POST", target, body, content_type=content_type).status == 400


def test_a_client_may_wait_for_100_continue(gcs: StrictGcs) -> None:
    host = urlsplit(gcs.url)
    with socket.create_connection((host.hostname or "", host.port or 0), timeout=60) as connection:
        connection.sendall(b"PUT /bucket/a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"abc")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert gcs.service.buckets.get("bucket", "a").data == b"abc"


def test_a_chunked_body_is_read(gcs: StrictGcs) -> None:
    host = urlsplit(gcs.url)
    with socket.create_connection((host.hostname or "", host.port or 0), timeout=60) as connection:
        connection.sendall(
            b"PUT /bucket/a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert gcs.service.buckets.get("bucket", "a").data == b"abc"


def test_an_answer_can_be_lost(gcs: StrictGcs) -> None:
    def lose(request: Request, answer: Callable[[Request], Response]) -> Response | None:
        answer(request)
        return None

    gcs.intercept = lose
    with pytest.raises(ConnectionError):
        ask(gcs.url, "PUT", "/bucket/a", b"abc")
    gcs.intercept = None
    assert ask(gcs.url, "GET", "/bucket/a").body == b"abc"


def test_requests_without_the_token_are_refused() -> None:
    with StrictGcs(["bucket"], token="secret") as gcs:
        refused = ask(gcs.url, "PUT", "/bucket/a", b"abc")
        assert (refused.status, b"<Code>AuthenticationRequired</Code>" in refused.body) == (401, True)
        assert ask(gcs.url, "PUT", "/bucket/a", b"abc", authorization="Bearer secret").status == 200


@pytest.mark.parametrize("name", ["", "..", "a%0Ab", "x" * 1025])
def test_names_that_the_service_refuses(gcs: StrictGcs, name: str) -> None:
    reply = ask(gcs.url, "POST", f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}", b"1")
    assert reply.status == 400
