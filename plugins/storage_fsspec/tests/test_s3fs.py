"""S3 through s3fs, tested on MiniStack. This file system is asynchronous, and writers stream objects to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_fsspec.opening import open_url
from ckptcore_s3.testing import ACCESS_KEY_ID, DIALECT, SECRET_ACCESS_KEY, S3Server, s3_server
from ckptcore_testing import FaultProxy, HTTPAnswer, ProxiedRequest, Refusing, StorageBackendTests

from ckptcore.errors import ObjectNotFoundError, StorageCredentialsError
from ckptcore.model import JSON
from ckptcore.protocols import StorageBackend, StorageOptions

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running MiniStack."""
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def options_of(server: S3Server) -> dict[str, JSON]:
    """Return the options of s3fs for the server."""
    return {"key": ACCESS_KEY_ID, "secret": SECRET_ACCESS_KEY, "endpoint_url": server.server.url}


@pytest.mark.slow
class TestS3(StorageBackendTests):
    """Conformance tests."""

    conditional = False
    examples = 3

    @pytest.fixture(autouse=True)
    def _bucket(self, server: S3Server) -> None:
        self.options = StorageOptions(config=options_of(server))
        self.bucket = server.create_bucket()

    def open(self, directory: str) -> StorageBackend:
        return open_url(f"fsspec+s3://{self.bucket}/{directory}", self.options)


def test_ranges_and_parts(server: S3Server) -> None:
    """A quick test of the most important methods. The slow class above tests all."""
    bucket = server.create_bucket()
    storage = open_url(f"fsspec+s3://{bucket}/directory", StorageOptions(config=options_of(server)))
    data = bytes(range(251)) * 80_000
    writer = storage.open_writer("a%41 b/?#", len(data))
    for start in (10 << 20, 0, 15 << 20, 5 << 20):
        writer.write_at(start, data[start : start + (5 << 20)])
    writer.finish()
    assert storage.list_names() == ["a%41 b/"]
    for start, stop in (
        (0, None),
        (3, 9),
        (len(data) - 3, len(data) + 9),
        (len(data), None),
        (len(data) + 5, len(data) + 9),
    ):
        assert storage.get("a%41 b/?#", start, stop) == data[start:stop]
    storage.delete(["a%41 b/?#", "missing"])
    assert list(storage.list()) == []


def test_changes_of_another_client_are_seen(server: S3Server) -> None:
    """By default, s3fs caches listings. The plugin turns this cache off."""
    from ckptcore.plugins import installed_plugins

    bucket = server.create_bucket()
    ours = open_url(f"fsspec+s3://{bucket}/directory", StorageOptions(config=options_of(server)))
    other = installed_plugins().storage("s3")(f"s3://{bucket}/directory", StorageOptions(config=server.options))
    assert list(ours.list()) == []
    other.put("a/b", b"1")
    assert (list(ours.list()), ours.list_names("a"), ours.size("a/b")) == (["a/b"], ["b"], 1)
    other.put("a/b", b"22")
    other.put("a/c", b"3")
    assert (list(ours.list()), ours.list_names("a"), ours.size("a/b")) == (["a/b", "a/c"], ["b", "c"], 2)
    other.delete(["a/b", "a/c"])
    assert list(ours.list()) == []
    with pytest.raises(ObjectNotFoundError):
        ours.size("a/b")


def test_a_missing_bucket_is_not_created(server: S3Server) -> None:
    storage = open_url("fsspec+s3://no-such-bucket/directory", StorageOptions(config=options_of(server)))
    with pytest.raises(ObjectNotFoundError):
        storage.put("a", b"1")
    writer = storage.open_writer("a", 1)
    writer.write_at(0, b"1")
    with pytest.raises(ObjectNotFoundError):
        writer.finish()
    writer.abort()
    assert storage.list_names() == []


def test_an_aborted_upload_leaves_no_object(server: S3Server) -> None:
    bucket = server.create_bucket()
    storage = open_url(f"fsspec+s3://{bucket}/directory", StorageOptions(config=options_of(server)))
    writer = storage.open_writer("large")
    for start in range(3):
        writer.write_at(start * (8 << 20), bytes(8 << 20))
    writer.abort()
    del writer
    assert list(storage.list()) == []


def test_keys_that_another_program_renews(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs reads the credentials file only once. The plugin reads it again after the service has refused the keys."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    expired = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    valid = ""

    def renew(number: int) -> None:
        nonlocal valid
        valid = f"KEY{number}"
        file.write_text(f"[default]\naws_access_key_id={valid}\naws_secret_access_key=secret\n")

    def refusal(request: ProxiedRequest) -> HTTPAnswer | None:
        is_valid = f"{valid}/" in request.headers["authorization"]
        return None if is_valid else HTTPAnswer.make(400, "Bad Request", "application/xml", expired)

    bucket = server.create_bucket()
    renew(1)
    with FaultProxy(server.server.url, Refusing(refusal), dialect=DIALECT) as proxy:
        options = StorageOptions(config={"endpoint_url": proxy.url})
        storage = open_url(f"fsspec+s3://{bucket}/directory", options)

        def write() -> None:
            writer = storage.open_writer("b", 3)
            writer.write_at(0, b"123")
            writer.finish()

        for number, call in enumerate(
            (
                lambda: storage.put("a", b"1"),
                lambda: storage.get("a"),
                lambda: storage.list_names(),
                lambda: storage.delete(["a"]),
            ),
            2,
        ):
            call()
            renew(number)
        # A stream cannot be repeated with new keys, so this write fails. The next one uses the new keys.
        with pytest.raises(StorageCredentialsError, match="expired"):
            write()
        write()
        valid = "another"
        with pytest.raises(StorageCredentialsError, match="expired"):
            storage.put("a", b"1")
