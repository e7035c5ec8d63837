"""Credentials come from the options, or from Google's usual sources. Missing and refused ones raise errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ckptcore_gcs.plugin import GcsPlugin
from ckptcore_gcs_server import Request, Response, StrictGcs

from ckptcore.errors import ClockSkewError, StorageCredentialsError
from ckptcore.model import JSON
from ckptcore.protocols import StorageBackend, StorageOptions
from plugins.storage_gcs.tests.identities import TokenService

TOKEN = "a-token-of-the-tests"

# google-auth warns about files from untrusted sources. This file is trusted, because the user has named it.
pytestmark = pytest.mark.filterwarnings("ignore:The load_credentials_from_file method:DeprecationWarning")


@pytest.fixture
def guarded() -> Iterator[StrictGcs]:
    """A GCS server that accepts only the token of these tests."""
    with StrictGcs(["bucket"], token=TOKEN) as server:
        yield server


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TokenService]:
    """A token service. Credentials of this machine are hidden."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_QUOTA_PROJECT", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no-gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with TokenService(TOKEN) as service:
        yield service


def _open(gcs: StrictGcs, **config: JSON) -> StorageBackend:
    options = StorageOptions(config={"endpoint": gcs.url, "retries": 0, **config})
    return GcsPlugin().open("gs://bucket/run", options)


def _works(storage: StorageBackend) -> None:
    tag = storage.put("a", b"1")  # sent by obstore
    assert storage.get_with_tag("a") == (b"1", tag)
    storage.delete(["a"])  # sent by our client of the JSON API


def test_a_service_account_in_the_environment(
    guarded: StrictGcs, tokens: TokenService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tokens.service_account(tmp_path)))
    _works(_open(guarded))
    assert tokens.asked == ["/token"], "one token serves all requests"


def test_a_file_in_the_options(guarded: StrictGcs, tokens: TokenService, tmp_path: Path) -> None:
    storage = _open(guarded, credentials_file=str(tokens.service_account(tmp_path)))
    _works(storage)
    assert storage.address is not None
    assert storage.address.options["credentials"] == "file"
    assert TOKEN not in repr(storage.address)


def test_an_identity_of_another_cloud(
    guarded: StrictGcs, tokens: TokenService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """google-auth reads such a file. Obstore cannot, and must not try."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tokens.federated(tmp_path)))
    # Without this variable, google-auth asks the real service for the project.
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    _works(_open(guarded))


@pytest.mark.system
@pytest.mark.slow
def test_credentials_from_the_metadata_server(guarded: StrictGcs, tokens: TokenService) -> None:
    """Runs in a new process, because google-auth reads the variables when it is imported."""
    program = (
        "import ckptcore\n"
        f"context = ckptcore.Context(storage={{'gs': {{'endpoint': {guarded.url!r}, 'retries': 0}}}})\n"
        "ckptcore.save('gs://bucket/run', {'step': 1}, context=context)\n"
        "assert ckptcore.load('gs://bucket/run', context=context)['step'] == 1\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NO_GCE_CHECK"}
    environment |= {"GCE_METADATA_HOST": tokens.host, "GCE_METADATA_IP": tokens.host}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)
    assert any("/computeMetadata/v1/instance/service-accounts/" in path for path in tokens.asked)


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Is a directory"),
        (b"", "valid json|JSON"),
        (b"[1]", "cannot read the file"),
        (b'{"type": "service_account"}', "."),
        (b"\xef\xbb\xbf{}", "valid json|JSON"),
        (b"\xff\xfe", "valid json|JSON"),
    ],
)
def test_the_error_for_files_without_credentials(
    by: str,
    content: bytes | None,
    message: str,
    guarded: StrictGcs,
    tokens: TokenService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "keys.json"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    if by == "environment":
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    storage = _open(guarded, **({"credentials_file": str(file)} if by == "option" else {}))
    for call in (lambda: storage.put("a", b"1"), lambda: storage.get("a"), lambda: list(storage.list())):
        with pytest.raises(StorageCredentialsError, match=message) as caught:
            call()
        assert "gs://bucket/run" in str(caught.value) and "keys.json" in str(caught.value)


def test_another_account_in_the_environment_is_used(
    guarded: StrictGcs, tokens: TokenService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long-running program can change its variables. It then gets a new connection to the same bucket."""
    plugin = GcsPlugin()
    options = StorageOptions(config={"endpoint": guarded.url, "retries": 0})
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing"))
    with pytest.raises(StorageCredentialsError):
        plugin.open("gs://bucket/run", options).get("a")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tokens.service_account(tmp_path)))
    _works(plugin.open("gs://bucket/run", options))


def test_a_token_in_the_options(guarded: StrictGcs, tokens: TokenService) -> None:
    _works(_open(guarded, access_token=TOKEN))
    with pytest.raises(StorageCredentialsError, match="gs://bucket/run/a.*401 AuthenticationRequired"):
        _open(guarded, access_token="another").put("a", b"1")
    assert tokens.asked == []


def test_emulator_needs_no_credentials(gcs: StrictGcs, tokens: TokenService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url.removeprefix("http://"))
    storage = GcsPlugin().open("gs://bucket/run", StorageOptions())
    _works(storage)
    assert storage.address is not None
    assert storage.address.options == {"endpoint": gcs.url, "credentials": "anonymous"}


def test_the_error_for_missing_credentials(guarded: StrictGcs, tokens: TokenService) -> None:
    with pytest.raises(
        StorageCredentialsError, match=r"cannot put gs://bucket/run/a.*gcloud auth application-default login"
    ):
        _open(guarded).put("a", b"1")
    with pytest.raises(StorageCredentialsError, match="401"):
        _open(guarded, anonymous=True).put("a", b"1")
    with pytest.raises(StorageCredentialsError, match="none.json"):
        _open(guarded, credentials_file="/none.json").put("a", b"1")
    assert guarded.service.buckets.list("bucket", limit=1).objects == []


def test_the_error_for_refused_credentials(guarded: StrictGcs, tokens: TokenService, tmp_path: Path) -> None:
    file = str(tokens.service_account(tmp_path))
    tokens.answer = (400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."})
    with pytest.raises(StorageCredentialsError, match="Invalid JWT Signature"):
        _open(guarded, credentials_file=file).get("a")
    late = "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe."
    tokens.answer = (400, {"error": "invalid_grant", "error_description": late})
    with pytest.raises(ClockSkewError, match="NTP"):
        _open(guarded, credentials_file=file).get("a")


def test_several_kinds_of_credentials_are_refused(gcs: StrictGcs) -> None:
    with pytest.raises(ValueError, match="one of access_token, anonymous"):
        _open(gcs, access_token="1", anonymous=True)


def test_every_request_names_the_paying_project(gcs: StrictGcs) -> None:
    """Obstore sends some of the requests, and our own HTTP client sends others."""
    seen: list[str | None] = []

    def look(request: Request, serve: Callable[[Request], Response]) -> Response:
        seen.append(request.headers.get("x-goog-user-project"))
        return serve(request)

    gcs.intercept = look
    storage = _open(gcs, anonymous=True, user_project="who-pays")
    _works(storage)
    assert list(storage.list()) == []
    assert len(seen) == 4
    assert set(seen) == {"who-pays"}


def test_the_schemes_gcs_and_gs_are_equal(gcs: StrictGcs) -> None:
    options = StorageOptions(config={"endpoint": gcs.url, "anonymous": True})
    GcsPlugin().open("gcs://bucket/run", options).put("a", b"1")
    assert _open(gcs, anonymous=True).get("a") == b"1"
