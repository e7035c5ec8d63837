"""Settings of a bucket, from the Context and from AWS environment variables and files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ckptcore_obstore.options import Option, check_options, choice, flag, text, tuning_of, tuning_options
from ckptcore_obstore.services import Tuning

from ckptcore.errors import InvalidLocationError, StorageCredentialsError
from ckptcore.model import JSON
from ckptcore_s3.credentials import Credentials, environment_credentials

__all__ = ["OPTIONS", "Settings", "settings_of"]

OPTIONS: Final[Mapping[str, Option]] = {
    "endpoint": text("URL of the service; plain HTTP needs http:// here or in AWS_ENDPOINT_URL(_S3)"),
    "region": text("region of the bucket"),
    "profile": text("profile in ~/.aws/config and ~/.aws/credentials"),
    "access_key_id": text("access key; requires secret_access_key"),
    "secret_access_key": text("secret key; requires access_key_id"),
    "session_token": text("session token of temporary credentials"),
    "anonymous": flag("make requests without credentials, for public buckets"),
    "addressing_style": choice("position of the bucket name in URLs", "auto", "path", "virtual"),
    "sse": choice("server-side encryption", "AES256", "aws:kms", "aws:kms:dsse"),
    "sse_kms_key_id": text("KMS key for server-side encryption"),
    "requester_pays": flag("pay for requests to buckets of other accounts"),
    **tuning_options(),
}
"""The options of ``Context(storage={"s3": {...}})`` by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a bucket.

    Attributes:
        bucket: name of the bucket.
        endpoint: URL of the service, without the bucket.
        bucket_url: URL of the bucket.
        region: region used in signatures.
        profile: profile in the AWS files; None for the default profile.
        credentials: credentials from the options or the environment; None to use the AWS credential
            chain.
        anonymous: True to send unsigned requests.
        virtual: True if the bucket is part of the host name.
        sse, sse_kms_key_id: server-side encryption; empty for the bucket's default.
        requester_pays: True to pay for requests.
        tuning: tuning of requests.
    """

    bucket: str
    endpoint: str
    bucket_url: str
    region: str
    profile: str | None
    credentials: Credentials | None
    anonymous: bool
    virtual: bool
    sse: str
    sse_kms_key_id: str
    requester_pays: bool
    tuning: Tuning


def settings_of(bucket: str, config: Mapping[str, JSON], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a bucket. Makes no request.

    Options take precedence over the environment, and the environment over the files in ``~/.aws``.
    botocore reads these files. It is imported only if the options and the environment leave the
    endpoint or the region open, and a profile is selected or ``~/.aws/config`` exists.

    Raises:
        InvalidLocationError: for an invalid endpoint.
        StorageCredentialsError: for an unknown profile.
        ValueError: for an unknown option or a wrong type, or if only one of ``access_key_id`` and
            ``secret_access_key`` is set.
    """
    given: Mapping[str, Any] = check_options("s3", config, OPTIONS)
    profile = given.get("profile") or environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or None
    region = given.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or ""
    endpoint = given.get("endpoint") or ""
    if not endpoint and environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
    if (not endpoint or not region) and (profile or _has_config(environment)):
        found_region, found_endpoint = _configured(profile)
        region, endpoint = region or found_region, endpoint or found_endpoint
    region = region or "us-east-1"
    own = bool(endpoint)
    if not own:
        endpoint = f"https://s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        # Refuse it, because errors and addresses show the endpoint. This message does not.
        raise InvalidLocationError("the endpoint contains a user or a password; set credentials with their own options")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise InvalidLocationError(
            f"the endpoint {endpoint!r} is not a service URL; expected one such as https://host:9000"
        )
    style = given.get("addressing_style", "auto")
    virtual = style == "virtual" or (style == "auto" and not own and "." not in bucket)
    base = endpoint.rstrip("/")
    bucket_url = f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path.rstrip('/')}" if virtual else f"{base}/{bucket}"
    credentials = None
    if given.get("access_key_id") or given.get("secret_access_key"):
        if not (given.get("access_key_id") and given.get("secret_access_key")):
            raise ValueError("Context(storage={'s3': ...}): set both access_key_id and secret_access_key, or neither")
        credentials = Credentials(given["access_key_id"], given["secret_access_key"], given.get("session_token", ""))
    elif not given.get("profile"):
        credentials = environment_credentials(environment)
    return Settings(
        bucket=bucket,
        endpoint=base,
        bucket_url=bucket_url,
        region=region,
        profile=profile,
        credentials=credentials,
        anonymous=given.get("anonymous", False),
        virtual=virtual,
        sse=given.get("sse", ""),
        sse_kms_key_id=given.get("sse_kms_key_id", ""),
        requester_pays=given.get("requester_pays", False),
        tuning=tuning_of(given, ca_bundle=environment.get("AWS_CA_BUNDLE") or None),
    )


def _has_config(environment: Mapping[str, str]) -> bool:
    return Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser().is_file()


def _configured(profile: str | None) -> tuple[str, str]:
    """Return the region and endpoint of a profile, empty if not set."""
    import botocore.session  # type: ignore[import-untyped]  # it has no annotations
    from botocore.exceptions import ProfileNotFound  # type: ignore[import-untyped]

    session = botocore.session.Session(profile=profile)
    try:
        scoped = session.get_scoped_config()
    except ProfileNotFound as error:
        raise StorageCredentialsError(
            f"cannot find AWS credentials: {error}. Check ~/.aws/config, AWS_PROFILE and the option 'profile'"
        ) from error
    services = session.full_config.get("services", {}).get(scoped.get("services", ""), {})
    own = services.get("s3", {}) if isinstance(services, dict) else {}
    endpoint = (own.get("endpoint_url") if isinstance(own, dict) else "") or scoped.get("endpoint_url") or ""
    return scoped.get("region") or "", endpoint
