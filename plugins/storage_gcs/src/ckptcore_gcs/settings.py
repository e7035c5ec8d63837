"""Settings of a bucket: what the Context and the environment say, by the conventions of Google Cloud."""

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

__all__ = ["OPTIONS", "Settings", "settings_of"]

OPTIONS: Final[Mapping[str, Option]] = {
    "endpoint": text("URL of the service; http:// only where it is given here or by STORAGE_EMULATOR_HOST"),
    "credentials_file": text("file of credentials: a service account, a federated identity, a user"),
    "access_token": text("an OAuth 2.0 token that somebody else refreshes"),
    "anonymous": flag("make requests without credentials, for public buckets and emulators"),
    "user_project": text("project that pays for the requests, and whose quota they count against"),
    "uploads": choice(
        "how objects of several parts are written: by uploads in parts of the XML API, or composed of objects by the JSON API",
        "parts",
        "composite",
    ),
    **tuning_options(),
}
"""The options of ``Context(storage={"gs": {...}})`` by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What requests to a bucket need to know.

    Attributes:
        bucket: its name.
        endpoint: URL of the service, without ``/`` at the end.
        emulator: whether the environment said that the endpoint is an emulator.
        credentials_file: if one was given; else Google's conventions find credentials.
        access_token: if one was given.
        anonymous: whether requests bear no token.
        user_project: which project pays; empty for the one of the credentials.
        uploads: how objects of several parts are written.
        tuning: how requests are made.
    """

    bucket: str
    endpoint: str
    emulator: bool
    credentials_file: str | None
    access_token: str | None = field(repr=False)
    anonymous: bool
    user_project: str
    uploads: Literal["parts", "composite"]
    tuning: Tuning


def settings_of(bucket: str, config: Mapping[str, JSON], environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of a bucket; makes no request and reads no file.

    Options come before the environment. As for Google's own libraries, ``STORAGE_EMULATOR_HOST`` names an emulator, which is
    asked without credentials unless an option gives some, ``GOOGLE_CLOUD_UNIVERSE_DOMAIN`` another cloud than the public one,
    and ``GOOGLE_CLOUD_QUOTA_PROJECT`` the project that requests count against. ``CKPTCORE_GCS_UPLOADS`` is the option ``uploads`` for
    programs that give none: most emulators have no uploads in parts.

    Raises:
        InvalidLocationError: for an endpoint that is no URL.
        ValueError: for an option that is not known or of another type, several kinds of credentials, or a variable of the
            environment that names no kind of uploads.
    """
    given: Mapping[str, Any] = check_options("gs", config, OPTIONS)
    uploads: Any = given.get("uploads") or environment.get("CKPTCORE_GCS_UPLOADS") or "parts"
    if uploads not in ("parts", "composite"):
        raise ValueError(f"CKPTCORE_GCS_UPLOADS in the environment: expected parts or composite, found {uploads!r}")
    kinds = [name for name in ("credentials_file", "access_token", "anonymous") if given.get(name)]
    if len(kinds) > 1:
        raise ValueError(f"Context(storage={{'gs': ...}}): give one of {', '.join(kinds)}, not several")
    host = environment.get("STORAGE_EMULATOR_HOST", "")
    emulator = bool(host) and not given.get("endpoint")
    domain = environment.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"
    endpoint = given.get("endpoint") or (host if "://" in host or not host else f"http://{host}")
    endpoint = (endpoint or f"https://storage.{domain}").rstrip("/")
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        # It would stand in errors and in addresses; what it is is not shown here either.
        raise InvalidLocationError(
            "the endpoint has a user or a password in it; give credentials by options of their own"
        )
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise InvalidLocationError(
            f"the endpoint {endpoint!r} is no URL of a service; expected one such as https://storage.googleapis.com"
        )
    anonymous = given.get("anonymous", False) or (emulator and not kinds)
    project = given.get("user_project") or ""
    if not project and not anonymous:  # what nobody in particular asks for counts against no project
        project = environment.get("GOOGLE_CLOUD_QUOTA_PROJECT") or ""
    return Settings(
        bucket=bucket,
        endpoint=endpoint,
        emulator=emulator,
        credentials_file=given.get("credentials_file") or None,
        access_token=given.get("access_token") or None,
        anonymous=anonymous,
        user_project=project,
        uploads=uploads,
        tuning=tuning_of(given),
    )
