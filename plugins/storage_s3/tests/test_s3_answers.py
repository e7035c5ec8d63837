"""Unusual answers of AWS and of services that are compatible with it."""

from __future__ import annotations

from urllib.parse import quote_plus

import pytest

from ckptcore.errors import StorageError, StorageFullError
from ckptcore.protocols import IF_ABSENT
from plugins.storage_s3.tests.stub_server import Reply, Request, error_reply, stub_server
from plugins.storage_s3.tests.test_s3_failures import open_stub

_KEY = "my run/a model+1 (%2B).bin"
_WHOLE = bytes(range(256))


def _escaped(key: str) -> str:
    """Return a key as S3 writes it with ``encoding-type=url``. botocore decodes such keys with ``unquote_plus``."""
    return quote_plus(key, safe="/")


def test_spaces_in_listed_keys_are_decoded() -> None:
    listed = f"<R><EncodingType>url</EncodingType><Contents><Key>{_escaped(f'run/{_KEY}')}</Key></Contents></R>"
    with stub_server(lambda request: Reply(200, listed.encode())) as stub:
        assert list(open_stub(stub.url).list()) == [_KEY]


def test_uploads_to_keys_with_spaces_are_aborted() -> None:
    listed = f"<Upload><Key>{_escaped(f'run/{_KEY}')}</Key><UploadId>1</UploadId></Upload>"
    listed = f"<R><EncodingType>url</EncodingType>{listed}<IsTruncated>false</IsTruncated></R>"

    def answer(request: Request) -> Reply:
        return Reply(200, listed.encode()) if request.method == "GET" else Reply(204)

    with stub_server(answer) as stub:
        assert open_stub(stub.url).abort_uploads("my run") == 1
        assert [request.path for request in stub.asked if request.method == "DELETE"] == [f"/bucket/run/{_KEY}"]


def test_a_truncated_list_without_a_token_is_an_error() -> None:
    listed = b"<R><IsTruncated>true</IsTruncated><Contents><Key>run/a</Key></Contents></R>"
    with stub_server(lambda request: Reply(200, listed)) as stub:
        for look in (lambda: open_stub(stub.url).list(), lambda: open_stub(stub.url).list_names()):
            with pytest.raises(StorageError, match="the list is truncated"):
                look()


@pytest.mark.parametrize("key", ["a", "a\tb"], ids=["by obstore", "by requests of our own"])
@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, _WHOLE, {"etag": '"1"'}),
        Reply(206, _WHOLE[:4], {"etag": '"1"', "content-range": "bytes 0-3/256"}),
        Reply(206, _WHOLE[100:], {"etag": '"1"', "content-range": "bytes 100-255/256"}),
        Reply(206, _WHOLE[:4], {"etag": '"1"'}),
    ],
    ids=["everything", "another range", "more", "of nowhere"],
)
def test_an_answer_with_other_bytes_than_requested_is_an_error(key: str, reply: Reply) -> None:
    with stub_server(lambda request: reply) as stub:
        storage = open_stub(stub.url)
        buffer = bytearray(4)
        with pytest.raises(StorageError):
            storage.get_into(key, [(100, memoryview(buffer))])
        with pytest.raises(StorageError):
            storage.get(key, 100, 104)
        assert buffer == bytes(4)


@pytest.mark.parametrize("code", ["AccessDenied", "QuotaExceeded"])
def test_a_refused_retry_of_a_put_does_not_count_as_refused(code: str) -> None:
    """The first try of the put may still arrive.

    If a commit is refused, the save deletes the root of the commit. This is safe only if the commit cannot arrive
    afterwards.
    """
    replies = [Reply(0), error_reply(403, code)]
    with (
        stub_server(lambda request: replies.pop(0)) as stub,
        pytest.raises(StorageError, match="may have succeeded") as caught,
    ):
        open_stub(stub.url, retries=1).put("root", b"1", condition=IF_ABSENT)
    assert not isinstance(caught.value, PermissionError | StorageFullError)
