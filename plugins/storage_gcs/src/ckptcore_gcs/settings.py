"""Settings of a bucket, from the Context and from Google's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from ckptcore_obstore.options import Option, check_options, choice, flag, text, tuning_of, tuning_options
from ckptcore_obstore.services import Tuning

from ckptcore.errors import InvalidLocationError
from ckptcore.model import JSON

_OF_GOOGLE: Final = ("CLOUDSDK_", "GCE_", "GOOGLE_", "HOME")

OPTIONS: Final[Mapping[str, Option]] = {
    "endpoint": text("URL of the service; plain HTTP needs http:// here or in STORAGE_EMULATOR_HOST"),
    "credentials_file": text("file of credentials: a service account, a federated identity, a user"),
    "access_token": text("an OAuth 2.0 token; it is not refreshed"),
    "anonymous": flag("make requests without credentials, for public buckets and emulators"),
    "user_project": text("project that requests are billed to, and whose quota they use"),
    "uploads": choice(
        "upload of large objects: in parts by the XML API, or composed of small objects by the JSON API",
        "parts",
        "composite",
    ),
    **tuning_options(),
}
"""The options of ``Context(storage={"gs": {...}})`` by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a bucket.

    Attributes:
        bucket: name of the bucket.
        endpoint: URL of the service, without ``/`` at the end.
        credentials_file: file of credentials; None for Google's default credentials.
        access_token: a fixed token, or None.
        anonymous: True to send no token.
        user_project: project that requests are billed to; empty for the project of the credentials.
        uploads: method of uploading large objects.
        tuning: tuning of requests.
        environment: the variables that google-auth reads. They are part of the settings, so a
            change of them opens the bucket again.
    """

    bucket: str
    endpoint: str
    credentials_file: str | None
    access_token: str | None = field(repr=False)
    anonymous: bool
    user_project: str
    uploads: Literal["parts", "composite"]
    tuning: Tuning
    environment: frozenset[tuple[str, str]] = field(repr=False)


def settings_of(bucket: str, config: Mapping[str, JSON], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a bucket. Makes no request and reads no file.

    Options take precedence over the environment. As in Google's libraries,
    ``STORAGE_EMULATOR_HOST`` names an emulator, ``GOOGLE_CLOUD_UNIVERSE_DOMAIN`` names a cloud
    other than the public one, and ``GOOGLE_CLOUD_QUOTA_PROJECT`` names the project that is billed.
    Requests to an emulator are anonymous unless an option sets credentials.
    ``CKPTCORE_GCS_UPLOADS`` sets the default of the option ``uploads``, because most emulators do
    not support uploads in parts.

    Raises:
        InvalidLocationError: for an invalid endpoint.
        ValueError: for an unknown option or a wrong type, for several kinds of credentials, or for
            an invalid ``CKPTCORE_GCS_UPLOADS``.
    """
    given: Mapping[str, Any] = check_options("gs", config, OPTIONS)
    uploads: Any = given.get("uploads") or environment.get("CKPTCORE_GCS_UPLOADS") or "parts"
    if uploads not in ("parts", "composite"):
        raise ValueError(f"CKPTCORE_GCS_UPLOADS in the environment: expected parts or composite, found {uploads!r}")
    kinds = [name for name in ("credentials_file", "access_token", "anonymous") if given.get(name)]
    if len(kinds) > 1:
        raise ValueError(f"Context(storage={{'gs': ...}}): set only one of {', '.join(kinds)}")
    host = environment.get("STORAGE_EMULATOR_HOST", "")
    emulator = bool(host) and not given.get("endpoint")
    domain = environment.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"
    endpoint = given.get("endpoint") or (host if "://" in host or not host else f"http://{host}")
    endpoint = (endpoint or f"https://storage.{domain}").rstrip("/")
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        # Refuse such an endpoint, because errors and addresses show it. This message does not show it.
        raise InvalidLocationError("the endpoint contains a user or a password; set credentials with their own options")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise InvalidLocationError(
            f"the endpoint {endpoint!r} is not a service URL; expected one such as https://storage.googleapis.com"
        )
    anonymous = given.get("anonymous", False) or (emulator and not kinds)
    project = given.get("user_project") or ""
    if not project and not anonymous:  # anonymous requests have no quota project
        project = environment.get("GOOGLE_CLOUD_QUOTA_PROJECT") or ""
    return Settings(
        bucket=bucket,
        endpoint=endpoint,
        credentials_file=given.get("credentials_file") or None,
        access_token=given.get("access_token") or None,
        anonymous=anonymous,
        user_project=project,
        uploads=uploads,
        tuning=tuning_of(given),
        environment=frozenset([(name, value) for name, value in environment.items() if name.startswith(_OF_GOOGLE)]),
    )
