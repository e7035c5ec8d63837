"""Errors of a simulated service: each has the right class and a one-line message, and none contains a secret."""

from __future__ import annotations

import logging
import socket
import threading
import traceback
from collections.abc import Callable

import pytest
from ckptcore_azure.plugin import AzurePlugin
from ckptcore_azure.settings import EMULATOR_KEY

from ckptcore.errors import (
    BucketNotFoundError,
    ConditionFailedError,
    ObjectNotFoundError,
    StorageCredentialsError,
    StorageError,
    StoragePermissionError,
)
from ckptcore.model import JSON
from ckptcore.protocols import IF_ABSENT, IfTag, StorageBackend, StorageOptions
from plugins.storage_s3.tests.stub_server import Reply, Request, error_reply, stub_server

SIGNATURE = "sv=2023-11-03&sp=racwdl&sig=TopSecret%2FSignature%3D"
SECRETS = ("TopSecret", EMULATOR_KEY, "secret-token")
CREDENTIALS: dict[str, dict[str, JSON]] = {
    "key": {"account_key": EMULATOR_KEY},
    "sas": {"sas_token": SIGNATURE},
    "token": {"access_token": "secret-token"},
}
DATE = {"last-modified": "Sun, 29 Nov 2026 10:00:00 GMT", "etag": '"0x1"'}


def _open(endpoint: str, **options: JSON) -> StorageBackend:
    config = {"account_name": "team", "endpoint": endpoint, "retries": 0, "part_bytes": 5 << 20, **options}
    return AzurePlugin().open("az://box/run", StorageOptions(config=config))


def _calls(storage: StorageBackend) -> list[Callable[[], object]]:
    return [
        lambda: storage.get("a"),
        lambda: storage.get("tab\tname"),
        lambda: storage.put("a", b"1"),
        lambda: storage.put("a", b"1", condition=IF_ABSENT),
        lambda: storage.put("a", b"1", condition=IfTag('"0x1"')),
        lambda: storage.open_new("a", 20 << 20).write_at(0, bytes(10 << 20)),
        lambda: list(storage.list()),
        lambda: storage.delete(["a", "b"]),
    ]


def _echo(request: Request) -> Reply:
    """Return an answer that repeats the credential of the request, like some proxies and services."""
    url = f"{request.path}?{'&'.join(f'{name}={value}' for name, value in request.query.items())}"
    words = f"cannot do {request.method} http://team.example{url}"
    return (
        Reply(400, f"<html>{words}</html>".encode())
        if "tab" in url
        else error_reply(400, "OddRequest", words.replace("&", "&amp;"))
    )


@pytest.mark.parametrize("kind", CREDENTIALS)
@pytest.mark.parametrize("service", ["echoes", "drops", "is not there"])
def test_no_error_shows_a_secret(kind: str, service: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)  # applies to all libraries: urllib3 logs each URL
    with stub_server(_echo if service == "echoes" else lambda request: Reply(0)) as stub, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}" if service == "is not there" else stub.url
        for call in _calls(_open(url, **CREDENTIALS[kind])):
            with pytest.raises(StorageError, match="az://box/run/") as caught:
                call()
            shown = "".join(traceback.format_exception(caught.value)) + caplog.text
            assert not [secret for secret in SECRETS if secret in shown], shown
            assert "\n" not in str(caught.value)
        if kind == "sas" and stub.asked:
            assert all(request.query["sig"] == "TopSecret/Signature=" for request in stub.asked)


def test_the_error_for_a_missing_container() -> None:
    answer = error_reply(404, "ContainerNotFound", "The specified container does not exist.")
    with stub_server(lambda request: answer) as stub:
        for call in _calls(_open(stub.url, **CREDENTIALS["key"])):
            with pytest.raises(BucketNotFoundError, match="az://box/run.*ContainerNotFound.*or create it"):
                call()


def test_a_private_container_without_credentials() -> None:
    """Without credentials, the service does not reveal that the container exists."""
    answer = error_reply(404, "ResourceNotFound", "The specified resource does not exist.")
    with stub_server(lambda request: answer) as stub:
        for call in _calls(_open(stub.url, anonymous=True)):
            with pytest.raises(StoragePermissionError, match=r"ResourceNotFound.*\. Use a credential"):
                call()
        with pytest.raises(ObjectNotFoundError):
            _open(stub.url, **CREDENTIALS["key"]).get("a")


def test_an_account_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host name of the account has no address. Retries would not change this."""

    def unknown(*arguments: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    storage = _open("http://team.invalid", **CREDENTIALS["key"], retries=2)
    with pytest.raises(
        StorageError, match=r"the host of the service is unknown.*name of the storage account"
    ) as caught:
        storage.get("tab\tname")
    assert "tries" not in str(caught.value)


def test_the_error_for_refused_credentials() -> None:
    answer = error_reply(403, "AuthenticationFailed", "Server failed to authenticate the request.")
    with stub_server(lambda request: answer) as stub:
        for call in _calls(_open(stub.url, **CREDENTIALS["sas"])):
            with pytest.raises(StorageCredentialsError, match="AuthenticationFailed.*AZURE_STORAGE_SAS_TOKEN"):
                call()


class _Copies:
    """A service whose copies are pending for some requests. It records the id of the copy."""

    def __init__(self, *states: str, lose: bool = False) -> None:
        self.states = list(states)
        self.lose = lose
        self.put_id = self.answers_as = ""

    def __call__(self, request: Request) -> Reply:
        if "x-ms-copy-source" in request.headers:
            if self.put_id:
                return error_reply(409, "BlobAlreadyExists", "The specified blob already exists.")
            self.put_id = request.headers["x-ms-meta-ckptcoreput"]
            return Reply(0) if self.lose else Reply(202, b"", {**DATE, "x-ms-copy-status": self.states.pop(0)})
        if request.method == "HEAD":
            headers = {"x-ms-copy-id": "id", "x-ms-meta-ckptcoreput": self.answers_as or self.put_id}
            return Reply(200, b"", {**DATE, **headers, "x-ms-copy-status": self.states.pop(0)})
        return Reply(202 if request.method == "DELETE" else 201, b"", DATE)


@pytest.mark.parametrize("lose", [False, True])
def test_an_upload_ends_after_its_copy_is_complete(lose: bool) -> None:
    states = ["pending", "pending", "success"] if not lose else ["pending", "pending", "pending", "success"]
    copies = _Copies(*states, lose=lose)
    with stub_server(copies) as stub:
        writer = _open(stub.url, retries=1, first_wait=0.001, **CREDENTIALS["sas"]).open_new("a", 6 << 20)
        writer.write_at(0, bytes(6 << 20))
        writer.finish()
        assert not copies.states
        [source] = {
            request.headers["x-ms-copy-source"] for request in stub.asked if "x-ms-copy-source" in request.headers
        }
        assert source.startswith(f"{stub.url}/box/run/a.ckptcore-upload-") and source.endswith("Signature%3D")
        assert (
            next(request.headers["if-none-match"] for request in stub.asked if "x-ms-copy-source" in request.headers)
            == "*"
        )


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_failed_copy_leaves_no_object(is_ours: bool) -> None:
    copies = _Copies("pending", *["failed"] * 3)
    with stub_server(copies) as stub:
        writer = _open(stub.url, **CREDENTIALS["sas"]).open_new("a", 6 << 20)
        writer.write_at(0, bytes(6 << 20))
        copies.answers_as = "" if is_ours else "another's"
        with pytest.raises(StorageError, match="az://box/run/a: .*the copy of run/a.*is failed"):
            writer.finish()
        deleted = [request.headers["if-match"] for request in stub.asked if request.method == "DELETE"]
        assert deleted == ([DATE["etag"]] if is_ours else []), "what the copy left, and no blob of another save"


class _Clock:
    """A clock on which each sleep takes an hour."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 3600


def test_a_copy_that_takes_too_long_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore_azure.containers.time", _Clock())
    with stub_server(_Copies("pending", "pending", "pending", "aborted")) as stub:
        writer = _open(stub.url, **CREDENTIALS["sas"]).open_new("a", 6 << 20)
        writer.write_at(0, bytes(6 << 20))
        with pytest.raises(StorageError, match="the copy of run/a.*is pending"):
            writer.finish()
        [aborted] = [request for request in stub.asked if request.headers.get("x-ms-copy-action") == "abort"]
        assert aborted.query["copyid"] == "id" and aborted.path == "/box/run/a"
        assert [request.path for request in stub.asked if request.method == "DELETE"] == ["/box/run/a"]


def test_deletions_with_a_signature_are_retried_by_key() -> None:
    """All deletions run concurrently. The retry does not repeat those that succeeded."""
    barrier, checks, failed = threading.Barrier(4), list[str](), set[str]()

    def answer(request: Request) -> Reply:
        if request.path.endswith("d") and request.path not in failed:
            failed.add(request.path)
            return error_reply(503, "ServerBusy")
        return Reply(202)

    def check() -> None:
        checks.append("")
        if len(checks) <= 4:
            barrier.wait(timeout=60)

    with stub_server(answer) as stub:
        storage = _open(stub.url, **CREDENTIALS["sas"], concurrency=4, retries=1, first_wait=0.001)
        storage.delete_while(list("abcd"), check)
        paths = sorted(request.path.removeprefix("/box/run/") for request in stub.asked)
    assert paths == ["a", "b", "c", "d", "d"] and len(checks) == 5


def test_blobs_are_deleted_with_a_signature_after_the_main_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a save in the background. The interpreter sets this variable then, and executors refuse work."""
    left = {"/box/run/a", "/box/run/b", "/box/run/c"}

    def answer(request: Request) -> Reply:
        left.discard(request.path)
        return Reply(202)

    with stub_server(answer) as stub:
        storage = _open(stub.url, **CREDENTIALS["sas"])
        monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
        storage.delete(["a", "b", "c"])
    assert not left


def test_a_batch_with_a_missing_blob_deletes_the_others() -> None:
    """The answer to a batch reports each blob, but obstore raises only the first failure."""
    left = {"run/a", "run/b", "run/c"}

    def answer(request: Request) -> Reply:
        if request.query.get("comp") == "batch":
            head = "--m\r\nContent-Type: application/http\r\nContent-ID: {}\r\n\r\nHTTP/1.1 {}\r\n\r\n"
            body = "".join(head.format(number, "404 Not Found") for number in range(3)) + "--m--\r\n"
            return Reply(202, body.encode(), {"content-type": "multipart/mixed; boundary=m"})
        left.discard(request.path.removeprefix("/box/"))
        return Reply(202)

    with stub_server(answer) as stub:
        _open(stub.url, **CREDENTIALS["key"]).delete(["a", "b", "c"])
    assert not left


def test_directories_of_a_hierarchical_namespace_are_not_listed() -> None:
    blob = "<Blob><Name{}>run/{}</Name><Properties><Content-Length>{}</Content-Length>{}</Properties></Blob>"
    kind = "<ResourceType>directory</ResourceType>"
    blobs = (
        blob.format("", "a", 0, kind) + blob.format("", "a/b", 7, "") + blob.format(' Encoded="true"', "c%0Bd", 1, "")
    )
    body = f"\ufeff<?xml version='1.0'?><EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
    with stub_server(lambda request: Reply(200, body.encode())) as stub:
        assert _open(stub.url, **CREDENTIALS["key"]).list_sizes() == {"a/b": 7, "c\vd": 1}


@pytest.mark.parametrize("code", ["InvalidQueryParameterValue", "AuthorizationPermissionMismatch"])
def test_temporary_blobs_are_deleted_if_blocks_cannot_be_listed(code: str, caplog: pytest.LogCaptureFixture) -> None:
    """The service may refuse lists of uncommitted blobs for accounts with a hierarchical namespace."""
    key = f"run/a.ckptcore-upload-{'0' * 32}"
    names = f"<Blob><Name>{key}</Name></Blob><Blob><Name>run/b</Name></Blob>"

    def answer(request: Request) -> Reply:
        if "include" in request.query:
            return error_reply(403 if "Mismatch" in code else 400, code)
        return Reply(202 if request.method == "DELETE" else 200, f"<R><Blobs>{names}</Blobs></R>".encode())

    with stub_server(answer) as stub:
        assert _open(stub.url, **CREDENTIALS["key"]).abort_uploads() == 1
        assert [request.path for request in stub.asked if request.method == "DELETE"] == [f"/box/{key}"]
    assert "unfinished uploads of failed saves cannot be aborted" in caplog.text


def test_a_put_is_refused_if_another_save_replaced_the_blob() -> None:
    answer = error_reply(412, "ConditionNotMet", "The condition specified using HTTP conditional header(s) is not met.")
    reply = {"PUT": answer, "HEAD": Reply(200, b"", {**DATE, "x-ms-meta-ckptcoreput": "another's"})}
    with stub_server(lambda request: reply[request.method]) as stub:
        storage = _open(stub.url, **CREDENTIALS["key"])
        for condition in (IF_ABSENT, IfTag('"0x0"')):
            with pytest.raises(ConditionFailedError, match="az://box/run/a.*ConditionNotMet"):
                storage.put("a", b"1", condition=condition)


def test_the_environment_does_not_change_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore also reads these variables."""
    for name, value in {
        "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9",
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURE_STORAGE_SAS_TOKEN": "sig=other",
        "AZURE_STORAGE_TOKEN": "other",
        "AZURE_CREDENTIAL_TYPE": "azure_cli",
        "AZURE_SKIP_SIGNATURE": "true",
        "AZURE_CONTAINER_NAME": "other",
    }.items():
        monkeypatch.setenv(name, value)
    with stub_server(lambda request: Reply(201, b"", DATE)) as stub:
        _open(stub.url, **CREDENTIALS["token"]).put("a", b"1")
        [request] = stub.asked
        assert (request.path, request.headers["authorization"]) == ("/box/run/a", "Bearer secret-token")
        monkeypatch.setenv("AZURE_ENCRYPTION_KEY", "hidden")
        with pytest.raises(StorageCredentialsError, match="AZURE_ENCRYPTION_KEY is set.*unset AZURE_ENCRYPTION_KEY"):
            _open(stub.url, **CREDENTIALS["token"]).put("a", b"1")
