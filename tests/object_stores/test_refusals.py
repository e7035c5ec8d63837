"""Documented refusals of the services, sent by a proxy. Errors have the right class, the reason and a remedy."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from ckptcore_azure.refusals import REFUSALS as AZURE_REFUSALS
from ckptcore_azure.settings import EMULATOR_KEY
from ckptcore_gcs.refusals import REFUSALS as GCS_REFUSALS
from ckptcore_obstore.failures import FailureKind, Refusal, refusal_of
from ckptcore_s3.refusals import REFUSALS as S3_REFUSALS
from ckptcore_testing import FaultProxy, HTTPAnswer, ProxiedRequest, Refusing

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ConditionFailedError,
    ObjectNotFoundError,
    ObjectUnavailableError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
    WrongRegionError,
)
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from tests.object_stores.stores import STORES, ObjectStore, may_come_late
from tests.object_stores.test_closed_features import refused

CLASSES = {
    FailureKind.MISSING: ObjectNotFoundError,
    FailureKind.NO_BUCKET: BucketNotFoundError,
    FailureKind.CONDITION: ConditionFailedError,
    FailureKind.CREDENTIALS: StorageCredentialsError,
    FailureKind.PERMISSION: StoragePermissionError,
    FailureKind.RETAINED: StoragePermissionError,
    FailureKind.ARCHIVED: ObjectUnavailableError,
    FailureKind.KEY: ObjectUnavailableError,
    FailureKind.REGION: WrongRegionError,
    FailureKind.CLOCK: ClockSkewError,
    FailureKind.FULL: StorageFullError,
    FailureKind.THROTTLED: StorageThrottledError,
    FailureKind.TIMEOUT: StorageTimeoutError,
}


@pytest.fixture(scope="module")
def proxies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[ObjectStore, FaultProxy]]]:
    """Start the services, each behind a proxy."""
    with ExitStack() as stack:
        services = {}
        for scheme, serve in STORES.items():
            store = stack.enter_context(serve(tmp_path_factory.mktemp(scheme)))
            services[scheme] = store, stack.enter_context(FaultProxy(store.upstream, dialect=store.dialect))
        yield services


def open_store(store: ObjectStore, url: str) -> StorageBackend:
    config = {**store.config(url), "retries": 0}
    context = ckptcore.Context(storage={store.scheme: config})
    return open_directory(f"{store.bucket}/run", runtime_of(context).storages)


def _answer(request: ProxiedRequest, code: str, refusal: Refusal) -> HTTPAnswer:
    if request.path.startswith(("/storage/", "/upload/", "/batch/")):
        return refused(refusal.status, code, reason=code[:1].lower() + code[1:])
    return refused(refusal.status, code)


def _always(answer: HTTPAnswer, request: ProxiedRequest) -> HTTPAnswer:
    return answer


TABLES = {"az": AZURE_REFUSALS, "gs": GCS_REFUSALS, "s3": S3_REFUSALS}
CASES = [(scheme, code.replace("*", "OtherException")) for scheme, table in TABLES.items() for code in table]


@pytest.mark.parametrize(("scheme", "code"), CASES)
def test_the_error_for_each_refusal_has_a_remedy(
    scheme: str, code: str, proxies: dict[str, tuple[ObjectStore, FaultProxy]]
) -> None:
    store, proxy = proxies[scheme]
    refusal = refusal_of(code, TABLES[scheme])
    assert refusal is not None
    proxy.plan = Refusing(lambda request: _answer(request, code, refusal))
    storage = open_store(store, proxy.url)
    calls: list[Callable[[], object]] = [
        lambda: storage.put("a", b"1"),
        lambda: storage.put("tab\tname", b"1"),  # this name does not go through obstore
        lambda: storage.open_writer("a", 20 << 20).write_at(0, bytes(10 << 20)),
        lambda: list(storage.list()),
    ]
    if refusal.kind is FailureKind.RANGE:
        assert storage.get("a", 5) == b"", "the object is shorter, which is no error"
        return
    calls += [lambda: storage.get_with_tag("a"), lambda: storage.get("tab\tname")]
    for call in calls:
        with pytest.raises(StorageError) as caught:
            call()
        text = str(caught.value)
        assert type(caught.value) is CLASSES.get(refusal.kind, StorageError), text
        assert f"{store.bucket}/run" in text
        assert f": {refusal.cause or refusal.kind.value}; found {refusal.status} " in text
        assert code.lower() in text.lower()
        remedy = text.rpartition("refused by a test. ")[2]
        assert len(remedy) > 10 and remedy != "Try again", text
        assert refusal.remedy in remedy
        assert "\n" not in text and "Debug" not in text


def test_the_error_names_the_permission_to_grant(proxies: dict[str, tuple[ObjectStore, FaultProxy]]) -> None:
    words = {
        "s3": "User: arn:aws:sts::1:assumed-role/trainer/i-0 is not authorized to perform: kms:GenerateDataKey on "
        "resource: arn:aws:kms:eu-west-1:1:key/2 because no identity-based policy allows the action",
        "gs": "trainer@project.iam.gserviceaccount.com does not have storage.objects.create access to the object",
    }
    for scheme, action in (("s3", "Allow kms:GenerateDataKey"), ("gs", "Give the account storage.objects.create")):
        store, proxy = proxies[scheme]
        answer = refused(403, "AccessDenied", words[scheme])
        proxy.plan = Refusing(functools.partial(_always, answer))
        with pytest.raises(StoragePermissionError, match=action):
            open_store(store, proxy.url).put("a", b"1")


@pytest.mark.parametrize(
    ("scheme", "name"), [("az", "BlobImmutableDueToPolicy"), ("gs", "RetentionPolicyNotMet"), ("s3", "ObjectLocked")]
)
def test_a_bucket_with_a_retention_policy_is_refused(
    scheme: str, name: str, proxies: dict[str, tuple[ObjectStore, FaultProxy]]
) -> None:
    """A commit replaces the claim, and a retention policy refuses this. The error says so."""
    store, proxy = proxies[scheme]
    place = store.new_place("retained")

    def retained(request: ProxiedRequest) -> HTTPAnswer | None:
        replaces = request.headers.get("if-match") or request.headers.get("x-goog-if-generation-match", "0") != "0"
        if may_come_late(request) and not replaces and request.query.get("ifGenerationMatch", "0") == "0":
            return None
        return _answer(request, name, Refusal(403, FailureKind.RETAINED))

    proxy.plan = Refusing(retained)
    context = ckptcore.Context(storage=store.options(proxy.url))
    with pytest.raises(StoragePermissionError, match=rf"(?i)cannot put.*retention.*{name}.*without") as caught:
        ckptcore.save(f"{place}/1", {"w": np.ones(1_500_000)}, context=context)
    assert isinstance(caught.value, PermissionError)


class _Proxy:
    """A forward proxy that asks for a password."""

    def __init__(self, status: int) -> None:
        outer = self
        self.asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_CONNECT(self) -> None:
                outer.asked.append(self.command)
                self.send_response(status)
                self.send_header("Proxy-Authenticate", "Basic")
                self.send_header("Content-Length", "0")
                self.end_headers()
                self.close_connection = True

            do_GET = do_PUT = do_POST = do_HEAD = do_CONNECT

            def log_message(self, format: str, *arguments: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> str:
        self.thread.start()
        return f"http://me:hidden-password@127.0.0.1:{self.server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


PROGRAM = (
    "import json, sys, ckptcore\n"
    "from ckptcore.commit.location import open_directory\n"
    "from ckptcore.runtime import runtime_of\n"
    "for scheme, config in json.loads(sys.argv[1]):\n"
    "    context = ckptcore.Context(storage={scheme: config})\n"
    "    storage = open_directory(f'{scheme}://bucket/run', runtime_of(context).storages)\n"
    "    for call in (lambda: storage.get('a'), lambda: storage.put('tab\\tname', b'1'), storage.list_names):\n"
    "        try:\n"
    "            call()\n"
    "        except ckptcore.errors.StorageError as error:\n"
    "            print(type(error).__name__, error)\n"
)


@pytest.mark.parametrize(
    ("status", "cause"), [(407, "the proxy refused"), (403, "the proxy refused"), (502, "connection")]
)
def test_the_error_names_the_proxy(status: int, cause: str) -> None:
    """This needs a new process, because obstore reads the proxy settings only once."""
    keys = {"access_key_id": "id", "secret_access_key": "secret", "region": "r"}
    account = {"account_name": "team", "account_key": EMULATOR_KEY}
    hosts = ["https://service.invalid", *(["http://service.invalid"] if status == 407 else [])]
    options = [
        (scheme, {"endpoint": host, "retries": 0, **more})
        for host in hosts
        for scheme, more in (("s3", keys), ("gs", {"anonymous": True}), ("az", account))
    ]
    with _Proxy(status) as url:
        environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
        environment |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), url)
        finished = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(options)],
            env=environment, capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
    lines = finished.stdout.splitlines()
    assert len(lines) == 3 * len(options), finished.stdout
    for line in lines:
        assert line.startswith("StorageError cannot ") and cause in line
        assert f"127.0.0.1:{url.rpartition(':')[2]}" in line and str(status) in line
        assert status == 502 or ("NO_PROXY" in line and "service.invalid" in line)
        assert "hidden-password" not in line
