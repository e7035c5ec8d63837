"""Settings of a bucket come from its options, and then from AWS's usual sources. Errors list the options."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ckptcore_obstore.failures import RequestFailed
from ckptcore_s3.credentials import Credentials
from ckptcore_s3.plugin import S3Plugin
from ckptcore_s3.service import S3Service, signed_headers
from ckptcore_s3.sessions import Place
from ckptcore_s3.settings import OPTIONS, settings_of

from ckptcore import Context
from ckptcore.errors import InvalidLocationError, StorageCredentialsError
from ckptcore.model import JSON
from ckptcore.protocols import StorageBackend, StorageOptions

Write = Callable[..., None]


@pytest.fixture(autouse=True)
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Remove the settings of this machine. Return a function that writes the files ``config`` and ``credentials``."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def write_files(**files: str) -> None:
        for name, content in files.items():
            (tmp_path / name).write_text(content, encoding="utf-8")

    return write_files


def place_of(bucket: str, options: Mapping[str, JSON]) -> Place:
    return S3Service(settings_of(bucket, options)).place()


def test_default_settings() -> None:
    place = place_of("bucket", {})
    assert place == Place("https://s3.amazonaws.com", "https://bucket.s3.amazonaws.com", "us-east-1", None)
    settings = settings_of("bucket", {})
    assert settings.credentials is None and not settings.anonymous


def test_options_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://general")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://of-s3:9000/")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/bundle")
    assert place_of("bucket", {}) == Place("https://of-s3:9000", "https://of-s3:9000/bucket", "eu-west-1", "/bundle")
    place = place_of("bucket", {"endpoint": "http://mine", "region": "here", "ca_bundle": "/other"})
    assert place == Place("http://mine", "http://mine/bucket", "here", "/other")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert place_of("bucket", {}).bucket_url == "https://bucket.s3.eu-west-1.amazonaws.com"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert S3Service(settings_of("bucket", {})).prepare() == Credentials("id", "secret", "token")
    own = {"access_key_id": "my", "secret_access_key": "own"}
    assert S3Service(settings_of("bucket", own)).prepare() == Credentials("my", "own", "")


@pytest.mark.parametrize(
    ("bucket", "options", "url"),
    [
        ("with.dots", {"region": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/with.dots"),
        ("bucket", {"region": "eu-west-1"}, "https://bucket.s3.eu-west-1.amazonaws.com"),
        ("bucket", {"addressing_style": "path", "region": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/bucket"),
        ("bucket", {"region": "cn-north-1"}, "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ("bucket", {"endpoint": "https://host:1/base", "addressing_style": "virtual"}, "https://bucket.host:1/base"),
        ("bucket", {"endpoint": "https://host:1/base/"}, "https://host:1/base/bucket"),
        ("bucket", {"endpoint": "https://10.0.0.1:1", "addressing_style": "virtual"}, "https://10.0.0.1:1/bucket"),
    ],
)
def test_url_of_the_bucket(bucket: str, options: dict[str, JSON], url: str) -> None:
    assert place_of(bucket, options).bucket_url == url


HOSTS = {
    "[default]\nregion=us-west-2": "https://bucket.s3.us-west-2.amazonaws.com",
    "[default]\nregion=us-west-2\nuse_fips_endpoint=true": "https://bucket.s3-fips.us-west-2.amazonaws.com",
    "[default]\nregion=us-west-2\nuse_dualstack_endpoint=true": ("https://bucket.s3.dualstack.us-west-2.amazonaws.com"),
    "[default]\nregion=us-west-2\ns3=\n  addressing_style=path": "https://s3.us-west-2.amazonaws.com/bucket",
    "[default]\nregion=us-west-2\ns3=\n  use_accelerate_endpoint=true": "https://bucket.s3-accelerate.amazonaws.com",
    "[default]\nendpoint_url=http://127.0.0.1:9": "http://127.0.0.1:9/bucket",
    "[default]\nendpoint_url=http://host:9\ns3=\n  addressing_style=virtual": "http://bucket.host:9",
    "[default]\nservices=ours\n[services ours]\ns3=\n  endpoint_url=http://127.0.0.1:9": "http://127.0.0.1:9/bucket",
}


@pytest.mark.parametrize("file", ["config", "credentials"])
@pytest.mark.parametrize("content", HOSTS)
def test_files_determine_the_url_of_the_bucket(content: str, file: str, write: Write) -> None:
    """The URL must be that of AWS's own clients. Another host would get requests signed with the same keys."""
    import boto3  # type: ignore[import-untyped]  # it has no annotations

    if file == "credentials" and "\n[services" in content:
        content, services = content.split("\n[services")
        write(config=f"[services{services}")
        url = "http://127.0.0.1:9/bucket"
    else:
        url = HOSTS[content]
    write(**{file: content})
    place = place_of("bucket", {})
    assert place.bucket_url == url
    seen: list[str] = []
    client = boto3.Session(aws_access_key_id="id", aws_secret_access_key="secret").client("s3")

    def answer(request: Any, **_: object) -> _Nothing:
        seen.append(request.url)
        return _Nothing()

    client.meta.events.register("before-send.s3", answer)
    client.head_object(Bucket="bucket", Key="key")
    assert seen == [f"{url}/key"]
    address = S3Service(settings_of("bucket", {})).address("run/").options
    is_usual = url == "https://bucket.s3.us-west-2.amazonaws.com" or "bucket." not in url
    assert ("addressing_style" not in address) == is_usual, "tensorstore would use another host"


class _Nothing:
    """An empty answer for botocore."""

    status_code = 200
    headers: Mapping[str, str] = {}
    content = b""
    raw = None


@pytest.mark.parametrize("variable", ["AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"])
def test_variables_determine_the_url_of_the_bucket(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "true")
    name = "s3-fips" if "FIPS" in variable else "s3.dualstack"
    assert place_of("bucket", {"region": "us-west-2"}).bucket_url == f"https://bucket.{name}.us-west-2.amazonaws.com"


def test_files_of_profiles(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        config="[default]\nregion = eu-north-1\nca_bundle = /of-config\n"
        "[profile training]\nregion = eu-south-1\nservices = local\n"
        "[services local]\ns3 =\n  endpoint_url = http://127.0.0.1:9\n",
        credentials="[training]\naws_access_key_id = id\naws_secret_access_key = secret\naws_session_token = token\n",
    )
    assert place_of("bucket", {}).region == "eu-north-1"
    assert place_of("bucket", {}).ca_bundle == "/of-config"
    place = place_of("bucket", {"profile": "training"})
    assert (place.region, place.bucket_url) == ("eu-south-1", "http://127.0.0.1:9/bucket")
    assert S3Service(settings_of("bucket", {"profile": "training"})).prepare() == Credentials("id", "secret", "token")
    monkeypatch.setenv("AWS_PROFILE", "training")
    assert place_of("bucket", {}) == place


def open_bucket(**options: JSON) -> StorageBackend:
    return S3Plugin().open("s3://bucket/run", StorageOptions(config=options))


def calls_of(storage: StorageBackend) -> Sequence[Callable[[], object]]:
    return (
        lambda: storage.get("a"),
        lambda: list(storage.list()),
        lambda: storage.put("a", b""),
        lambda: storage.address,
        lambda: storage.open_writer("a", 40 << 20).write_at(0, bytes(20 << 20)),
    )


def test_no_credentials(write: Write) -> None:
    for call in calls_of(open_bucket(endpoint="http://127.0.0.1:9")):
        if call.__code__.co_names == ("address",):
            continue  # an address contains no credentials
        with pytest.raises(StorageCredentialsError, match=r"s3://bucket/run.*AWS_ACCESS_KEY_ID"):
            call()


@pytest.mark.parametrize("file", ["config", "credentials"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf[default]\nregion=eu-west-1\n", "byte order mark.*save it without"),
        (b"region=eu-west-1\n", "nable to parse config file"),
        (b"[default]\nregion=\xff\xfe\n", "nable to parse config file"),
        (None, "cannot read '.*': Is a directory"),
    ],
)
def test_the_error_for_unreadable_files(file: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is None:
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).write_bytes(content)
    for call in calls_of(open_bucket(region="eu-west-1")):
        with pytest.raises(
            StorageCredentialsError, match=rf"s3://bucket/run.*{message}.*Check ~/\.aws/config"
        ) as caught:
            call()
        assert file in str(caught.value)


def test_the_error_for_a_missing_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in calls_of(open_bucket(profile="nobody")):
        with pytest.raises(StorageCredentialsError, match=r"nobody.*Check ~/\.aws"):
            call()
    monkeypatch.setenv("AWS_PROFILE", "somebody")
    with pytest.raises(StorageCredentialsError, match="somebody"):
        open_bucket().get("a")


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_the_error_for_unreadable_certificates(content: bytes | None, tmp_path: Path, write: Write) -> None:
    write(credentials="[default]\naws_access_key_id=id\naws_secret_access_key=secret\n")
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_bytes(content)
    storage = open_bucket(endpoint="https://127.0.0.1:9", ca_bundle=str(bundle), retries=0)
    for call in calls_of(storage):
        if call.__code__.co_names == ("address",):
            continue
        with pytest.raises(StorageCredentialsError, match=r"bundle\.pem.*"):
            call()


def test_a_process_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, a process can have a user id without a name."""
    for name in ("HOME", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.getuid", lambda: 987654321)
    with pytest.raises(StorageCredentialsError, match="AWS_ACCESS_KEY_ID"):
        open_bucket(region="eu-west-1").get("a")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert S3Service(settings_of("bucket", {})).prepare() == Credentials("id", "secret")


@pytest.mark.parametrize("home", ["/dev/null", "{closed}/home"])
def test_a_home_directory_without_permission(home: str, tmp_path: Path) -> None:
    """In a container, a process can have its own user id, while HOME is the directory of root."""
    (tmp_path / "closed/home/.aws").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    program = """
import os
from ckptcore_s3.credentials import Credentials
from ckptcore_s3.service import S3Service
from ckptcore_s3.settings import settings_of
os.environ.update(HOME=HOME, AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="secret")
for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
    del os.environ[name]
service = S3Service(settings_of("bucket", {"region": "eu-west-1"}))
assert service.prepare() == Credentials("id", "secret")
assert service.place().bucket_url == "https://bucket.s3.eu-west-1.amazonaws.com"
""".replace("=HOME", f"={home.format(closed=tmp_path / 'closed')!r}")
    command = [sys.executable, "-c", program]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root reads everything, and setpriv is not installed")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert ended.returncode == 0, ended.stderr


def _name_no_profile(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")


def _damage_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "config").mkdir()
    (directory / "credentials").write_bytes(b"\xef\xbb\xbf[default]")


@pytest.mark.parametrize("harm", [_name_no_profile, _damage_files])
@pytest.mark.parametrize("who", [{"access_key_id": "id", "secret_access_key": "secret"}, {"anonymous": True}])
def test_unreadable_files_are_ignored_if_the_context_has_all_settings(
    who: dict[str, JSON], harm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(tmp_path, monkeypatch)
    monkeypatch.setenv("AWS_CA_BUNDLE", "/bundle")
    options: dict[str, JSON] = {"endpoint": "http://host:9000", "region": "here", **who}
    assert place_of("bucket", options) == Place("http://host:9000", "http://host:9000/bucket", "here", "/bundle")
    S3Service(settings_of("bucket", options)).prepare()
    for name in ("endpoint", "region"):
        with pytest.raises(RequestFailed):
            place_of("bucket", {**options, name: ""})
    with pytest.raises(RequestFailed):
        place_of("bucket", {**options, "profile": "somebody"})


def test_readable_files_are_used_if_the_context_has_all_settings(write: Write) -> None:
    write(config="[default]\nca_bundle=/bundle\n")
    options: dict[str, JSON] = {"endpoint": "http://host:9000", "region": "here", "anonymous": True}
    assert place_of("bucket", options).ca_bundle == "/bundle"


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
    "url",
    [
        "s3:///run",
        "s3://",
        "gs://bucket/run",
        "s3://bücket/run",
        "s3://a b/run",
        "s3://b/a//b",
        "s3://b/../c",
        "s3://b--x-s3/a",
    ],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidLocationError):
        S3Plugin().open(url, StorageOptions(config={"endpoint": "http://127.0.0.1:9"}))


@pytest.mark.parametrize("endpoint", ["host:9000", "ftp://host", "https://", "https://host?query"])
def test_invalid_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(InvalidLocationError, match="endpoint"):
        settings_of("bucket", {"endpoint": endpoint})


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
    settings = settings_of("bucket", options)
    address = S3Service(settings).address("run/ü%/")
    shown = f"{storage!r} {storage.address} {settings} {address}"
    assert not any(secret in shown for secret in ("AKIDEXAMPLE", "hidden", "veiled"))
    assert address.url == "s3://bucket/run/%C3%BC%25/"
    assert address.options == {"endpoint": "https://host", "region": "us-east-1", "credentials": "given"}


def test_signatures() -> None:
    """The signatures equal those of botocore."""
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
        "heavy = {name.partition('.')[0] for name in sys.modules} & {'obstore', 'boto3', 'botocore', 'urllib3'}\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_context_does_not_show_secrets() -> None:
    assert "hidden" not in repr(Context(storage={"s3": {"access_key_id": "me", "secret_access_key": "hidden"}}))


def test_an_endpoint_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidLocationError, match="contains a user or a password") as caught:
        open_bucket(endpoint="https://me:hidden@host")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:hidden@host")
    with pytest.raises(StorageCredentialsError, match="contains a user or a password") as raised:
        open_bucket().get("a")
    for error in (caught, raised):
        assert "hidden" not in str(error.value)
        assert "; set credentials with their own options" in str(error.value)
    options = {"endpoint": "https://host", "access_key_id": "me", "secret_access_key": "hidden"}
    assert settings_of("bucket", options).credentials == Credentials("me", "hidden")
    with pytest.raises(ValueError, match="set both access_key_id and secret_access_key, or neither"):
        settings_of("bucket", {"endpoint": "https://host", "access_key_id": "me"})
    assert settings_of("bucket", {"endpoint": "https://host"}).credentials is None
