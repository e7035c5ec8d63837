"""Arrays of other software on S3. tensorstore reads them if it can use the address. Otherwise ckptcore reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from ckptcore_orbax.zarr import chunk_decoding
from ckptcore_orbax.zarr.native_reading import _quotes, native_spec
from ckptcore_s3.testing import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server, s3_server

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError, StorageError, StoragePermissionError
from ckptcore.protocols import StorageAddress, StorageOptions

ELEMENTS = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)


reads_spaces = pytest.mark.skipif(not _quotes(), reason="this TensorStore quotes no spaces")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server on this machine."""
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove credentials and configuration files of the user, so that a test uses only its own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def location(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of Orbax with compressed chunks, which the fixture uploads file by file."""
    directory = tmp_path_factory.mktemp("orbax") / "checkpoint"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory, {"w": ELEMENTS})
    bucket = server.create_bucket()
    location = f"s3://{bucket}/a%41 b/with space"
    store = _storage(location, server.options)
    for path in directory.rglob("*"):
        if path.is_file():
            store.put(path.relative_to(directory).as_posix(), path.read_bytes())
    return location


def _storage(url: str, options: Mapping[str, Any]) -> Any:
    from ckptcore.plugins import installed_plugins

    return installed_plugins().storage("s3")(url, StorageOptions(config=options))


@pytest.fixture
def native_reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs that ckptcore passed to tensorstore for reads."""
    asked: list[Any] = []
    true_read = chunk_decoding.read_native

    def read(state: Any, wanted: Any, native: Any) -> Any:
        if wanted:
            asked.append(native)
        return true_read(state, wanted, native)

    monkeypatch.setattr(chunk_decoding, "read_native", read)
    return asked


def _context(server: S3Server, **options: Any) -> ckptcore.Context:
    return ckptcore.Context(storage={"s3": {"endpoint": server.server.url, "region": "us-east-1", **options}})


def _expect_elements(location: str, context: ckptcore.Context) -> None:
    assert np.array_equal(ckptcore.load(location, context=context)["w"], ELEMENTS)


@pytest.mark.system
@reads_spaces
def test_credentials_of_the_environment(
    server: S3Server, location: str, native_reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    _expect_elements(location, _context(server))
    assert [native["base"]["aws_credentials"] for native in native_reads] == [{"type": "environment"}]


@pytest.mark.system
def test_credentials_of_a_profile(server: S3Server, location: str, native_reads: list[Any], tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        f"[team]\naws_access_key_id = {ACCESS_KEY_ID}\naws_secret_access_key = {SECRET_ACCESS_KEY}\n"
    )
    _expect_elements(location, _context(server, profile="team"))
    assert native_reads == [], "tensorstore 0.1.86 cannot use profiles"


@pytest.mark.system
@reads_spaces
def test_anonymous_access(server: S3Server, location: str, native_reads: list[Any]) -> None:
    _expect_elements(location, _context(server, anonymous=True))
    assert [native["base"]["aws_credentials"] for native in native_reads] == [{"type": "anonymous"}]


@pytest.mark.system
def test_credentials_of_a_context_are_not_passed_to_tensorstore(
    server: S3Server, location: str, native_reads: list[Any]
) -> None:
    context = _context(server, access_key_id=ACCESS_KEY_ID, secret_access_key=SECRET_ACCESS_KEY)
    _expect_elements(location, context)
    assert native_reads == []
    address = _storage(location, context.storage["s3"]).address
    assert SECRET_ACCESS_KEY not in repr(address) and ACCESS_KEY_ID not in repr(address).replace(location, "")


@pytest.mark.system
def test_a_missing_chunk_is_reported_as_damage(server: S3Server, location: str, native_reads: list[Any]) -> None:
    source = _storage(location, server.options)
    copy = location.replace("with space", "damaged")
    target = _storage(copy, server.options)
    for key in source.list():
        if "/d/" not in f"/{key}":
            target.put(key, source.get(key))
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load(copy, context=_context(server, anonymous=True))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("PERMISSION_DENIED: no", StoragePermissionError),
        ("UNAVAILABLE: later", StorageError),
        ("DATA_LOSS: bad", CorruptCheckpointError),
        ("NOT_FOUND: chunk", CorruptCheckpointError),
    ],
)
def test_only_errors_about_stored_bytes_are_reported_as_damage(text: str, error: type[CheckpointError]) -> None:
    from ckptcore_orbax.zarr.chunk_codec import ReadErrors

    with pytest.raises(error, match="'w'") as caught, ReadErrors("w"):
        raise ValueError(text)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("url", "options", "spec"),
    [
        ("file:///a%20b/", {}, {"driver": "file", "path": "/a b/"}),
        ("file:///a/", {"mode": 1}, None),
        ("memory://a/", {}, None),
        ("s3://bucket/d%20e/", {"credentials": "given"}, None),
        ("s3://bucket/", {"credentials": "anonymous", "ca_bundle": "/file"}, None),
        pytest.param(
            "s3://bucket/d%20e/",
            {"endpoint": "https://s3.eu-west-1.amazonaws.com", "region": "eu-west-1", "requester_pays": True,
             "credentials": "environment"},
            {"driver": "s3", "bucket": "bucket", "path": "d e/", "aws_region": "eu-west-1", "requester_pays": True,
             "aws_credentials": {"type": "environment"}},
            marks=reads_spaces,
        ),
        (  # tensorstore would connect to another host of Amazon
            "s3://bucket/", {"endpoint": "https://s3-fips.us-west-2.amazonaws.com", "region": "us-west-2",
                             "addressing_style": "virtual", "credentials": "environment"},
            None,
        ),
        (
            "s3://bucket/", {"endpoint": "https://s3-fips.us-west-2.amazonaws.com", "region": "us-west-2",
                             "credentials": "anonymous"},
            {"driver": "s3", "bucket": "bucket", "aws_region": "us-west-2",
             "endpoint": "https://s3-fips.us-west-2.amazonaws.com", "aws_credentials": {"type": "anonymous"}},
        ),
        ("gs://bucket/d/", {"endpoint": "https://storage.googleapis.com", "credentials": "default"},
         {"driver": "gcs", "bucket": "bucket", "path": "d/"}),
        ("gs://bucket/d/", {"user_project": "p"},
         {"driver": "gcs", "bucket": "bucket", "path": "d/", "gcs_user_project": {"project_id": "p"}}),
        ("gs://bucket/d/", {"endpoint": "http://127.0.0.1:1"}, None),
        ("gs://bucket/d/", {"credentials": "token"}, None),
    ],
)  # fmt: skip
def test_specs_of_addresses(url: str, options: Any, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    assert native_spec(StorageAddress(url, options)) == spec


def test_tensorstore_uses_a_gcs_endpoint_only_if_the_environment_names_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:1/")
    assert native_spec(StorageAddress("gs://bucket/", {"endpoint": "http://127.0.0.1:1"})) is not None
    assert native_spec(StorageAddress("gs://bucket/")) is None
