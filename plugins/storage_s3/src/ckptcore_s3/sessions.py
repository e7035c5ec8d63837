"""Sessions of botocore, which determine the URL, region and certificates of a bucket.

botocore reads the environment and the files in ``~/.aws``, and supports regions, FIPS, dual stack
and the addressing styles. It is imported for the first request.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed

from ckptcore.errors import converts_errors
from ckptcore.redaction import chainable, redacted

if TYPE_CHECKING:
    from ckptcore_s3.settings import Settings

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_VARIABLES: Final = {"config_file": "AWS_CONFIG_FILE", "credentials_file": "AWS_SHARED_CREDENTIALS_FILE"}
"""Session variables of botocore for the files that it reads, each with the environment variable that names the file."""


class Place(NamedTuple):
    """The URLs, region and certificates of a bucket.

    Attributes:
        endpoint: URL of the service, without the bucket and without ``/`` at the end.
        bucket_url: URL of the bucket.
        region: region used in signatures.
        ca_bundle: file of trusted certificates; None for the certificates of the system.
    """

    endpoint: str
    bucket_url: str
    region: str
    ca_bundle: str | None

    @property
    def is_virtual(self) -> bool:
        """True if the bucket is part of the host name."""
        return urlsplit(self.endpoint).netloc != urlsplit(self.bucket_url).netloc


def find_place(settings: Settings) -> Place:
    """Ask botocore for the place of a bucket. Makes no request.

    If the Context contains all settings, invalid files and a missing profile are ignored.

    Raises:
        RequestFailed: if the environment or a file in ``~/.aws`` is invalid.
    """
    try:
        with refused_settings():
            return _found(open_session(settings.profile), settings)
    except RequestFailed:
        if not settings.is_complete:
            raise
    with refused_settings():
        return _found(_session_without_files(), settings)


def open_session(profile: str | None) -> Any:
    """Return a new session, which reads the environment and the files.

    If `profile` is None, they also choose the profile.

    Raises:
        RequestFailed: if a file exists but cannot be read.
    """
    session = _new_session(profile)
    for variable in ("config_file", "credentials_file"):
        # Check this here, because botocore treats an unreadable file like a missing file.
        path = os.path.expanduser(session.get_config_variable(variable))
        try:
            with open(path, "rb") as file:
                begins = file.read(len(_BYTE_ORDER_MARK))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if _VARIABLES[variable] not in os.environ and _is_in_closed_directory(path):
                continue  # the home directory of another user, as in a container that sets another user id
            raise _refusal(f"cannot read {path!r}: {error.strerror}") from error
        if begins == _BYTE_ORDER_MARK:
            raise _refusal(f"{path!r} begins with a byte order mark, which botocore does not read; save it without")
    return session


def _is_in_closed_directory(path: str) -> bool:
    """Return True if this process has no permission to access the directory of a file."""
    try:
        os.lstat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _session_without_files() -> Any:
    """Return a new session that reads no file. It uses only options and the environment."""
    session = _new_session(None)
    for variable in _VARIABLES:
        session.set_config_variable(variable, os.devnull)
    session.get_component("config_store").set_config_variable("profile", None)
    return session


def _new_session(profile: str | None) -> Any:
    import botocore.session  # type: ignore[import-untyped]  # it has no annotations

    session = botocore.session.Session(profile=profile)
    session.register_component("data_loader", _loader())
    return session


@converts_errors
def refused_settings() -> Iterator[None]:
    """Convert botocore's errors about the environment and the files, which have many types."""
    try:
        yield
    except RequestFailed:
        raise
    except Exception as error:  # noqa: BLE001  # see the docstring
        raise _refusal(redacted(" ".join(str(error).split()))[:300]) from chainable(error)


def _refusal(message: str) -> RequestFailed:
    return RequestFailed(Failure(FailureKind.SETTINGS, None, "", message))


@functools.lru_cache(maxsize=1)
def _loader() -> Any:
    """Return botocore's loader of its data files. It caches the files."""
    import botocore.loaders  # type: ignore[import-untyped]  # it has no annotations

    return botocore.loaders.create_loader()


class _Signing(Exception):
    """Exception that ends a request of botocore before it is signed and sent."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def _sign(request: Any, **_: object) -> None:
    raise _Signing(request.url)


def _found(session: Any, settings: Settings) -> Place:
    from botocore.config import Config  # type: ignore[import-untyped]  # it has no annotations

    style = {"addressing_style": settings.addressing_style} if settings.addressing_style else None
    client = session.create_client(
        "s3",
        # botocore does not read AWS_REGION, but other clients of AWS do.
        region_name=settings.region or os.environ.get("AWS_REGION") or None,
        endpoint_url=settings.endpoint or None,
        config=Config(signature_version="s3v4", s3=style),
        # Dummy keys, so that botocore does not search for credentials. Nothing is signed with them.
        aws_access_key_id="none",
        aws_secret_access_key="none",
    )
    client.meta.events.register("before-sign.s3", _sign)
    try:
        client.head_object(Bucket=settings.bucket, Key="key")
    except _Signing as signing:
        bucket_url = signing.url.removesuffix("/key")
    if error := check_endpoint(bucket_url):
        raise _refusal(error)
    parts = urlsplit(bucket_url)
    host, path = parts.netloc, parts.path
    if path.endswith(f"/{settings.bucket}"):
        path = path.removesuffix(f"/{settings.bucket}")
    else:
        host = host.removeprefix(f"{settings.bucket}.")
    bundle = settings.tuning.ca_bundle or session.get_config_variable("ca_bundle") or None
    return Place(f"{parts.scheme}://{host}{path}", bucket_url, client.meta.region_name, bundle)


def check_endpoint(endpoint: str) -> str | None:
    """Return the problem of a service URL as text, or None if it is valid."""
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        # Refuse such an endpoint, because errors and addresses show it. This message does not show it.
        return "the endpoint contains a user or a password; set credentials with their own options"
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        return f"the endpoint {endpoint!r} is not a service URL; expected one such as https://host:9000"
    return None
