"""Long runs with expiring credentials. Other programs renew keys and tokens, and the run continues."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import FaultProxy, HTTPAnswer, ProxiedRequest, Refusing

import ckptcore
from ckptcore.context import IOOptions
from ckptcore.errors import StorageCredentialsError
from plugins.storage_gcs.tests.identities import TokenService
from tests.object_stores.stores import STORES, ObjectStore

_EXPIRED_S3 = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_EXPIRED_GCS = b'{"error": {"code": 401, "message": "Invalid Credentials", "errors": [{"reason": "authError"}]}}'

STATE = {"w": np.arange(1_500_000.0), "step": 1}  # uploaded in several parts


class Issuer:
    """An issuer of keys or tokens. Only the newest is valid.

    Attributes:
        number: the number of the newest key or token.
        is_down: True while the issuer refuses to issue.
    """

    def __init__(self) -> None:
        self.number = 1
        self.is_down = False

    @property
    def name(self) -> str:
        """Return the newest key id or token."""
        return f"KEY{self.number:05d}"

    def refusal(self, request: ProxiedRequest) -> HTTPAnswer | None:
        """Refuse a request with an older key or token, as the service does."""
        if self.name in request.headers.get("authorization", ""):
            return None
        if "Bearer" in request.headers.get("authorization", ""):
            return HTTPAnswer.make(401, "Unauthorized", "application/json", _EXPIRED_GCS)
        return HTTPAnswer.make(400, "Bad Request", "application/xml", _EXPIRED_S3)

    @contextmanager
    def serving(self, answer: Callable[[], object]) -> Iterator[str]:
        """Run an HTTP server that answers every request. Yield its URL."""
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.dumps(answer()).encode()
                self.send_response(400 if issuer.is_down else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *arguments: Any) -> None:
                """Print nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def _shared_file(issuer: Issuer, path: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Credentials in ``~/.aws/credentials``, which another program replaces."""
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path / "credentials"))

    def renew() -> None:
        (path / "credentials").write_text(
            f"[default]\naws_access_key_id={issuer.name}\naws_secret_access_key=secret\naws_session_token=token\n"
        )

    renew()
    yield renew


@contextmanager
def _environment(issuer: Issuer, path: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Credentials in environment variables, which the program itself replaces."""

    def renew() -> None:
        patch.setenv("AWS_ACCESS_KEY_ID", issuer.name)
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    renew()
    yield renew


@contextmanager
def _container(issuer: Issuer, path: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Credentials of a container from its host. Keys are revoked before their stated expiration."""

    def answer() -> object:
        keys = {"AccessKeyId": issuer.name, "SecretAccessKey": "secret", "Token": "token"}
        return {**keys, "Expiration": "2099-01-01T00:00:00Z"}

    with issuer.serving(answer) as url:
        patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/credentials")
        yield lambda: None


@contextmanager
def _process(issuer: Issuer, path: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Credentials from a ``credential_process``."""

    def renew() -> None:
        keys = {"Version": 1, "AccessKeyId": issuer.name, "SecretAccessKey": "secret", "SessionToken": "token"}
        (path / "keys.json").write_text(json.dumps({**keys, "Expiration": "2099-01-01T00:00:00Z"}))

    renew()
    (path / "config").write_text(f"[default]\ncredential_process = cat {path / 'keys.json'}\n")
    yield renew


@contextmanager
def _tokens(issuer: Issuer, path: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Tokens of a service account of Google. They are revoked before their stated expiration."""
    with TokenService(issuer.name) as service:

        def renew() -> None:
            error = {"error": "invalid_grant", "error_description": "the account is disabled"}
            token = {"access_token": issuer.name, "expires_in": 3600, "token_type": "Bearer"}
            service.answer = (400, error) if issuer.is_down else (200, token)

        renew()
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(service.service_account(path)))
        yield renew


SOURCES = {
    "shared file": ("s3", _shared_file),
    "environment": ("s3", _environment),
    "container": ("s3", _container),
    "process": ("s3", _process),
    "tokens": ("gs", _tokens),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ObjectStore]]:
    """Start the services. Return them by scheme."""
    with (
        STORES["s3"](tmp_path_factory.mktemp("s3")) as s3,
        STORES["gs"](tmp_path_factory.mktemp("gs")) as gs,
    ):
        yield {"s3": s3, "gs": gs}


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_continues_with_renewed_credentials(
    source: str, stores: dict[str, ObjectStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    for name, file in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "missing")):
        monkeypatch.setenv(name, str(tmp_path / file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    scheme, begin = SOURCES[source]
    store, issuer = stores[scheme], Issuer()
    place = store.new_place("expiring")
    with FaultProxy(store.upstream, dialect=store.dialect) as proxy, begin(issuer, tmp_path, monkeypatch) as renew:
        config = dict(store.config(proxy.url))
        for name in ("access_key_id", "secret_access_key", "anonymous"):
            config.pop(name, None)
        context = ckptcore.Context(storage={scheme: config}, io=IOOptions(threads=2))
        proxy.plan = Refusing(issuer.refusal)
        with ckptcore.Checkpointer(place, context=context) as run:
            for step in range(1, 4):
                run.save_blocking(step, STATE)
                assert run.load(step)["w"].size == 1_500_000
                issuer.number += 1
                renew()
            with ckptcore.Checkpointer(f"{place}-other", context=context) as other:
                other.save_blocking(1, STATE)
            assert run.steps == (1, 2, 3)
            # The old credentials are refused, and the issuer issues no new ones.
            issuer.number += 1
            issuer.is_down = True
            if source == "tokens":
                renew()
            with pytest.raises(
                StorageCredentialsError, match=rf"{scheme}://.*(ExpiredToken|authError|token|credentials)"
            ):
                run.save_blocking(4, STATE)
            issuer.is_down = False
            renew()
            run.save_blocking(5, STATE)
            assert run.load(5)["step"] == 1
    assert ckptcore.verify(f"{place}/5", context=store.direct).ok
