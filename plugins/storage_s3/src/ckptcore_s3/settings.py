"""Settings of a bucket, from the Context."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore_obstore.options import Option, check_options, choice, flag, text, tuning_of, tuning_options
from ckptcore_obstore.services import Tuning

from ckptcore.errors import InvalidLocationError
from ckptcore.model import JSON
from ckptcore_s3.credentials import Credentials
from ckptcore_s3.sessions import check_endpoint

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
    """Settings of a bucket, from the Context. botocore finds the settings that are missing; see `ckptcore_s3.sessions`.

    Attributes:
        bucket: name of the bucket.
        endpoint: URL of the service, without the bucket; empty to ask botocore.
        region: region used in signatures; empty to ask botocore.
        profile: profile in the AWS files; None to ask botocore.
        credentials: credentials; None for the AWS credential chain.
        anonymous: True to send unsigned requests.
        addressing_style: position of the bucket name in URLs; empty to ask botocore.
        sse, sse_kms_key_id: server-side encryption; empty for the bucket's default.
        requester_pays: True to pay for requests.
        tuning: tuning of requests.
        environment: the variables that botocore reads. They are part of the settings, so a change
            of them opens the bucket again.
    """

    bucket: str
    endpoint: str
    region: str
    profile: str | None
    credentials: Credentials | None
    anonymous: bool
    addressing_style: str
    sse: str
    sse_kms_key_id: str
    requester_pays: bool
    tuning: Tuning
    environment: frozenset[tuple[str, str]] = field(repr=False)

    @property
    def is_complete(self) -> bool:
        """True if no file of AWS is needed.

        The Context then has the endpoint, the region and the keys, and names no profile.
        """
        has_keys = self.credentials is not None or self.anonymous
        return bool(self.endpoint and self.region and has_keys and not self.profile)


def settings_of(bucket: str, config: Mapping[str, JSON]) -> Settings:
    """Return the settings of a bucket. Makes no request and reads no file.

    Raises:
        InvalidLocationError: for an invalid endpoint.
        ValueError: for an unknown option or a wrong type, or if only one of ``access_key_id`` and
            ``secret_access_key`` is set.
    """
    given: Mapping[str, Any] = check_options("s3", config, OPTIONS)
    if given.get("endpoint") and (wrong := check_endpoint(given["endpoint"])):
        raise InvalidLocationError(wrong)
    credentials = None
    if given.get("access_key_id") or given.get("secret_access_key"):
        if not (given.get("access_key_id") and given.get("secret_access_key")):
            raise ValueError("Context(storage={'s3': ...}): set both access_key_id and secret_access_key, or neither")
        credentials = Credentials(given["access_key_id"], given["secret_access_key"], given.get("session_token", ""))
    return Settings(
        bucket=bucket,
        endpoint=given.get("endpoint", ""),
        region=given.get("region", ""),
        profile=given.get("profile") or None,
        credentials=credentials,
        anonymous=given.get("anonymous", False),
        addressing_style=given.get("addressing_style", ""),
        sse=given.get("sse", ""),
        sse_kms_key_id=given.get("sse_kms_key_id", ""),
        requester_pays=given.get("requester_pays", False),
        tuning=tuning_of(given),
        environment=frozenset(
            [(name, value) for name, value in os.environ.items() if name == "HOME" or name.startswith("AWS_")]
        ),
    )
