"""Settings of a bucket: what the Context and the environment say, by the conventions of AWS."""

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
    "endpoint": text("URL of the service; http:// only where it is given here or by AWS_ENDPOINT_URL(_S3)"),
    "region": text("region of the bucket"),
    "profile": text("profile in ~/.aws/config and ~/.aws/credentials"),
    "access_key_id": text("with secret_access_key: credentials"),
    "secret_access_key": text("with access_key_id: credentials"),
    "session_token": text("of temporary credentials"),
    "anonymous": flag("make requests without credentials, for public buckets"),
    "addressing_style": choice("where the bucket is in a URL", "auto", "path", "virtual"),
    "sse": choice("encryption by the service", "AES256", "aws:kms", "aws:kms:dsse"),
    "sse_kms_key_id": text("key for the encryption by aws:kms"),
    "requester_pays": flag("pay for requests to buckets of others"),
    **tuning_options(),
}
"""The options of ``Context(storage={"s3": {...}})`` by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What requests to a bucket need to know.

    Attributes:
        bucket: its name.
        endpoint: URL of the service, without the bucket.
        bucket_url: of the bucket.
        region: to sign for.
        profile: for credentials; None: the default one.
        credentials: if they were given or are in the environment.
        anonymous: whether no request is signed.
        virtual: whether the bucket is in the name of the host.
        sse, sse_kms_key_id: encryption; empty for the bucket's own.
        requester_pays: whether who asks pays.
        tuning: how requests are made.
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
    """The settings of a bucket; makes no request.

    Options come before the environment, and the environment before the files in ``~/.aws``, which only boto3 reads: it is
    imported where they may say something that nothing before them does.

    Raises:
        InvalidLocationError: for a name that no bucket has, or an endpoint that is no URL.
        StorageCredentialsError: for a profile that is not there.
        ValueError: for an option that is not known or of another type.
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
        # It would stand in errors and in addresses; what it is is not shown here either.
        raise InvalidLocationError(
            "the endpoint has a user or a password in it; give credentials by options of their own"
        )
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise InvalidLocationError(
            f"the endpoint {endpoint!r} is no URL of a service; expected one such as https://host:9000"
        )
    style = given.get("addressing_style", "auto")
    virtual = style == "virtual" or (style == "auto" and not own and "." not in bucket)
    base = endpoint.rstrip("/")
    bucket_url = f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path.rstrip('/')}" if virtual else f"{base}/{bucket}"
    credentials = None
    if given.get("access_key_id") or given.get("secret_access_key"):
        if not (given.get("access_key_id") and given.get("secret_access_key")):
            raise ValueError(
                "Context(storage={'s3': ...}): access_key_id and secret_access_key are given together or not at all"
            )
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
    """The region and the endpoint of a profile; empty where it has none."""
    import botocore.session  # type: ignore[import-untyped]  # it has no annotations
    from botocore.exceptions import ProfileNotFound  # type: ignore[import-untyped]

    session = botocore.session.Session(profile=profile)
    try:
        scoped = session.get_scoped_config()
    except ProfileNotFound as error:
        raise StorageCredentialsError(
            f"no AWS credentials were found: {error}. Look at ~/.aws/config, AWS_PROFILE and the option 'profile'"
        ) from error
    services = session.full_config.get("services", {}).get(scoped.get("services", ""), {})
    own = services.get("s3", {}) if isinstance(services, dict) else {}
    endpoint = (own.get("endpoint_url") if isinstance(own, dict) else "") or scoped.get("endpoint_url") or ""
    return scoped.get("region") or "", endpoint
