"""Credentials: the key of the account, signatures, and expiring tokens that azure-identity provides."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from ckptcore_azure.credentials import DefaultTokens
from ckptcore_azure.plugin import AzurePlugin
from ckptcore_azure.service import shared_key_headers
from ckptcore_azure.settings import EMULATOR_ACCOUNT, EMULATOR_KEY

from ckptcore.errors import StorageCredentialsError, StorageError
from ckptcore.protocols import StorageBackend, StorageOptions
from plugins.storage_s3.tests.stub_server import Reply, Request, error_reply, stub_server

OPENED = {"last-modified": "Sun, 29 Nov 2026 10:00:00 GMT", "etag": '"0x1"'}


class _Token(NamedTuple):
    """Replacement for `azure.core.credentials.AccessToken`."""

    token: str
    expires_on: int


class _Identity:
    """Replacement for `azure.identity.DefaultAzureCredential`. The test defines its tokens."""

    def __init__(self) -> None:
        self.tokens: list[_Token | Exception] = []
        self.made = 0

    def __call__(self) -> _Identity:
        self.made += 1
        return self

    def get_token(self, scope: str) -> _Token:
        assert scope == "https://storage.azure.com/.default"
        token = self.tokens.pop(0)
        if isinstance(token, Exception):
            raise token
        return token


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> _Identity:
    credential = _Identity()
    monkeypatch.setattr("azure.identity.DefaultAzureCredential", credential)
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    return credential


def _open(endpoint: str, **options: Any) -> StorageBackend:
    config = {"account_name": "team", "endpoint": endpoint, "retries": 0, **options}
    return AzurePlugin().open("az://box/run", StorageOptions(config=config))


def test_a_known_signature() -> None:
    """azure-storage-blob 12.31 sends this signature for the same request (`SharedKeyCredentialPolicy`)."""
    headers = {"x-ms-version": "2023-11-03", "content-length": "1", "if-none-match": "*", "x-ms-blob-type": "BlockBlob"}
    url = f"http://127.0.0.1:1/{EMULATOR_ACCOUNT}/box/a%20b?comp=block&blockid=MQ%3D%3D"
    now = datetime(2026, 11, 29, 10, tzinfo=UTC)
    signed = shared_key_headers("PUT", url, headers, EMULATOR_ACCOUNT, EMULATOR_KEY, now=now)
    assert signed["x-ms-date"] == "Sun, 29 Nov 2026 10:00:00 GMT"
    assert signed["authorization"] == f"SharedKey {EMULATOR_ACCOUNT}:mfSVfpS6dcb45/X1D8yv9j2FBj1PeQN5jq/lFXCNGdg="


def test_tokens_are_renewed_before_they_expire(identity: _Identity) -> None:
    soon, late = int(time.time()) + 60, int(time.time()) + 3600
    identity.tokens = [_Token("1", soon), _Token("2", late), _Token("3", late)]
    tokens = DefaultTokens()
    assert [tokens.get().secret for _ in range(3)] == ["1", "2", "2"]
    assert identity.made == 1
    assert "2" not in repr(tokens.get()).partition("expires")[0]


def _answer(valid: Callable[[], str]) -> Callable[[Request], Reply]:
    def answer(request: Request) -> Reply:
        if request.headers["authorization"] != f"Bearer {valid()}":
            return error_reply(401, "InvalidAuthenticationInfo", "Authentication information is not given correctly.")
        return Reply(201 if request.method == "PUT" else 200, b"" if request.method == "PUT" else b"data", OPENED)

    return answer


def test_a_refused_token_is_replaced(identity: _Identity) -> None:
    late = int(time.time()) + 3600
    identity.tokens = [_Token(str(number), late) for number in range(1, 4)]
    valid = "1"
    with stub_server(_answer(lambda: valid)) as stub:
        storage = _open(stub.url)
        storage.put("a", b"data")
        valid = "2"
        assert storage.get("a") == b"data"
        assert storage.get("tab\tname") == b"data"
        valid = "4"
        with pytest.raises(StorageCredentialsError, match=r"InvalidAuthenticationInfo.*az login"):
            storage.put("a", b"data")
    assert identity.made == 3


@pytest.mark.parametrize("kind", ["none", "unreachable"])
def test_the_error_if_no_token_can_be_obtained(kind: str, identity: _Identity) -> None:
    from azure.core.exceptions import ServiceRequestError
    from azure.identity import CredentialUnavailableError

    words = "DefaultAzureCredential failed\nAttempted credentials:\n\thttps://login.example/?client_secret=hidden"
    error = CredentialUnavailableError(message=words) if kind == "none" else ServiceRequestError(words)
    identity.tokens = [error] * 2
    expected = StorageCredentialsError if kind == "none" else StorageError
    for call in (lambda: _open("http://127.0.0.1:9").get("a"), lambda: list(_open("http://127.0.0.1:9").list())):
        with pytest.raises(
            expected, match=r"az://box/run.*cannot get a token: DefaultAzureCredential failed"
        ) as caught:
            call()
        assert "hidden" not in str(caught.value) and "\n" not in str(caught.value)
        assert isinstance(caught.value, StorageCredentialsError) is (kind == "none")
