"""Settings of a bucket: options before the environment, the environment before files; and errors
that list the options.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from ckptcore_s3.credentials import ChainCredentials, Credentials
from ckptcore_s3.plugin import S3Plugin
from ckptcore_s3.service import S3Service
from ckptcore_s3.settings import OPTIONS, settings_of
from ckptcore_s3.signing import signed_headers

from ckptcore import Context
from ckptcore.errors import InvalidLocationError, StorageCredentialsError
from ckptcore.protocols import StorageOptions

NO_FILES = {"AWS_CONFIG_FILE": "/nonexistent/config", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials"}


def test_nothing_given() -> None:
    found = settings_of("bucket", {}, NO_FILES)
    assert found.region == "us-east-1"
    assert found.bucket_url == "https://bucket.s3.us-east-1.amazonaws.com"
    assert found.credentials is None and not found.anonymous


def test_options_come_before_the_environment() -> None:
    environment = {
        **NO_FILES,
        "AWS_ENDPOINT_URL": "https://general",
        "AWS_ENDPOINT_URL_S3": "https://of-s3:9000/",
        "AWS_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_SESSION_TOKEN": "token",
        "AWS_CA_BUNDLE": "/bundle",
    }
    found = settings_of("bucket", {}, environment)
    assert found.bucket_url == "https://of-s3:9000/bucket"
    assert (found.region, found.credentials) == ("eu-west-1", Credentials("id", "secret", "token"))
    assert found.tuning.ca_bundle == "/bundle"
    given = {"endpoint": "http://mine", "region": "here", "access_key_id": "my", "secret_access_key": "own"}
    found = settings_of("bucket", given, environment)
    assert found.bucket_url == "http://mine/bucket"
    assert (found.region, found.credentials) == ("here", Credentials("my", "own", ""))
    found = settings_of("bucket", {}, {**environment, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"})
    assert found.bucket_url == "https://bucket.s3.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    ("bucket", "options", "url"),
    [
        ("with.dots", {}, "https://s3.us-east-1.amazonaws.com/with.dots"),
        ("bucket", {"addressing_style": "path"}, "https://s3.us-east-1.amazonaws.com/bucket"),
        ("bucket", {"region": "cn-north-1"}, "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ("bucket", {"endpoint": "https://host:1/base", "addressing_style": "virtual"}, "https://bucket.host:1/base"),
        ("bucket", {"endpoint": "https://host:1/base/"}, "https://host:1/base/bucket"),
    ],
)
def test_where_the_bucket_is(bucket: str, options: dict[str, str], url: str) -> None:
    assert settings_of(bucket, options, NO_FILES).bucket_url == url


def test_files_of_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text(
        "[default]\nregion = eu-north-1\n[profile training]\nregion = eu-south-1\nservices = local\n"
        "[services local]\ns3 =\n  endpoint_url = http://127.0.0.1:9\n",
        encoding="utf-8",
    )
    credentials.write_text(
        "[training]\naws_access_key_id = id\naws_secret_access_key = secret\naws_session_token = token\n",
        encoding="utf-8",
    )
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert settings_of("bucket", {}).region == "eu-north-1"
    found = settings_of("bucket", {"profile": "training"})
    assert (found.region, found.bucket_url) == ("eu-south-1", "http://127.0.0.1:9/bucket")
    assert ChainCredentials("training").get() == Credentials("id", "secret", "token")
    with pytest.raises(StorageCredentialsError, match=r"nobody.*AWS_PROFILE"):
        settings_of("bucket", {"profile": "nobody"})
    with pytest.raises(StorageCredentialsError, match="nobody"):
        ChainCredentials("nobody").get()
    with pytest.raises(StorageCredentialsError, match="AWS_ACCESS_KEY_ID"):
        ChainCredentials(None).get()
    storage = S3Plugin().open("s3://bucket/run", StorageOptions(config={"endpoint": "http://127.0.0.1:9"}))
    for call in (lambda: storage.get("a"), lambda: list(storage.list()), lambda: storage.put("a", b"")):
        with pytest.raises(StorageCredentialsError, match="AWS_ACCESS_KEY_ID"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpont": "https://host"}, "unknown option 'endpont'; did you mean 'endpoint'"),
        ({"region": 3}, "expected str, found int"),
        ({"anonymous": "yes"}, "expected bool"),
        ({"retries": True}, "expected int"),
        ({"retries": -1}, "at least 0"),
        ({"timeout": 0}, "at least"),
        ({"part_bytes": 1 << 20}, "at least"),
        ({"part_bytes": (8 << 20) + 1}, "multiple of"),
        ({"addressing_style": "virtual-host"}, "'auto', 'path', 'virtual'"),
        ({"access_key_id": "id"}, "or neither"),
    ],
)
def test_a_wrong_option_is_an_error(options: dict[str, str | int | bool], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        S3Plugin().open("s3://bucket/run", StorageOptions(config=options))
    if "there is no option" in message:
        assert all(name in str(caught.value) for name in OPTIONS)


@pytest.mark.parametrize(
    "url", ["s3:///run", "s3://", "gs://bucket/run", "s3://bücket/run", "s3://a b/run", "s3://b/a//b", "s3://b/../c"]
)
def test_urls_that_name_no_directory(url: str) -> None:
    with pytest.raises(InvalidLocationError):
        S3Plugin().open(url, StorageOptions(config={"endpoint": "http://127.0.0.1:9"}))


@pytest.mark.parametrize("endpoint", ["host:9000", "ftp://host", "https://", "https://host?query"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(InvalidLocationError, match="endpoint"):
        settings_of("bucket", {"endpoint": endpoint}, NO_FILES)


def test_the_readme_has_every_option() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(OPTIONS)


def test_secrets_are_not_shown() -> None:
    options = {
        "access_key_id": "AKIDEXAMPLE",
        "secret_access_key": "hidden",
        "session_token": "veiled",
        "endpoint": "https://host",
    }
    storage = S3Plugin().open("s3://bucket/run", StorageOptions(config=options))
    settings = settings_of("bucket", options, NO_FILES)
    address = S3Service(settings).address("run/ü%/")
    shown = f"{storage!r} {storage.address} {settings} {address}"
    assert not any(secret in shown for secret in ("AKIDEXAMPLE", "hidden", "veiled"))
    assert address.url == "s3://bucket/run/%C3%BC%25/"
    assert address.options == {"endpoint": "https://host", "region": "us-east-1", "credentials": "given"}


def test_signatures() -> None:
    """The settings are equal to those of botocore."""
    from botocore.auth import S3SigV4Auth  # type: ignore[import-untyped]  # it has no annotations
    from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]
    from botocore.credentials import Credentials as BotocoreCredentials  # type: ignore[import-untyped]

    url = "https://host:9000/bucket/a%20b/%C3%BC?list-type=2&prefix=a%2Fb"
    ours = signed_headers(
        "GET", url, {"range": "bytes=1-2", "x-amz-meta-a": "b  c"}, Credentials("id", "secret", "token"), "r-1"
    )
    request = AWSRequest(
        "GET", url, headers={"range": "bytes=1-2", "x-amz-meta-a": "b  c", "X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}
    )
    signer = S3SigV4Auth(BotocoreCredentials("id", "secret", "token"), "s3", "r-1")
    request.context["timestamp"] = ours["x-amz-date"]
    request.headers["X-Amz-Date"] = ours["x-amz-date"]
    request.headers["X-Amz-Security-Token"] = "token"
    request.headers["host"] = "host:9000"
    request.context["payload_signing_enabled"] = False
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert ours["authorization"].endswith(signer.signature(text, request))
    again = signed_headers(
        "GET", url, {}, Credentials("id", "secret"), "r-1", now=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    )
    assert again["x-amz-date"] == "20260102T030405Z" and "x-amz-security-token" not in again


def test_opening_imports_nothing_heavy_and_makes_no_request() -> None:
    code = (
        "import sys\n"
        "from ckptcore.protocols import StorageOptions\n"
        "from ckptcore_s3.plugin import PLUGIN\n"
        "config = {'endpoint': 'http://127.0.0.1:9', 'region': 'r', 'access_key_id': 'a', 'secret_access_key': 'b'}\n"
        "PLUGIN.open('s3://bucket/run', StorageOptions(config=config))\n"
        "found = {name.partition('.')[0] for name in sys.modules} & {'obstore', 'boto3', 'botocore', 'urllib3'}\n"
        "sys.exit(f'imported {found}' if found else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_context_does_not_show_secrets() -> None:
    assert "hidden" not in repr(Context(storage={"s3": {"access_key_id": "me", "secret_access_key": "hidden"}}))


def test_an_endpoint_has_no_password() -> None:
    for given in ({"endpoint": "https://me:hidden@host"}, {}):
        with pytest.raises(InvalidLocationError, match="contains a user or a password") as caught:
            settings_of("bucket", given, {**NO_FILES, "AWS_ENDPOINT_URL": "https://me:hidden@host"})
        assert "hidden" not in str(caught.value)
        assert "; set credentials with their own options" in str(caught.value)
    options = {"endpoint": "https://host", "access_key_id": "me", "secret_access_key": "hidden"}
    found = settings_of("bucket", options, NO_FILES)
    assert found.credentials == Credentials("me", "hidden")
    with pytest.raises(ValueError, match="set both access_key_id and secret_access_key, or neither"):
        settings_of("bucket", {"endpoint": "https://host", "access_key_id": "me"}, NO_FILES)
    assert settings_of("bucket", {"endpoint": "https://host"}, NO_FILES).credentials is None
