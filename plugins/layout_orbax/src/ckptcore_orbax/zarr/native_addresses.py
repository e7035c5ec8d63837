"""Addresses of storages, as tensorstore's own drivers know them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import tensorstore

from ckptcore.model import JSON
from ckptcore.protocols import StorageAddress

__all__ = ["native_base"]

_GOOGLE: Final = "https://storage.googleapis.com"


def native_base(address: StorageAddress) -> Mapping[str, Any] | None:
    """The spec of tensorstore's key-value store for a directory; None where it knows no such storage, or not all its options.

    What is None is read by ckptcore itself: a storage may need secrets that no address holds, or options that tensorstore lacks.
    """
    options = _OPTIONS.get(address.url.partition("://")[0])
    found = options(address.options) if options is not None else None
    if found is None:
        return None
    try:
        # A URL has escapes: without them a directory called %2e%2e would be the one above.
        return {**tensorstore.KvStore.Spec(address.url).to_json(), **found}
    except ValueError:
        return None


def _no_options(options: Mapping[str, JSON]) -> Mapping[str, Any] | None:
    return None if options else {}


def _s3_options(options: Mapping[str, JSON]) -> Mapping[str, Any] | None:
    """https://google.github.io/tensorstore/kvstore/s3."""
    left = dict(options)
    endpoint, region = left.pop("endpoint", None), left.pop("region", None)
    credentials = left.pop("credentials", None)
    pays = left.pop("requester_pays", False)
    if left or credentials not in _AWS_CREDENTIALS:
        return None
    found: dict[str, Any] = {"aws_credentials": {"type": credentials}}
    if region is not None:
        found["aws_region"] = region
    if endpoint is not None and not _is_of_amazon(str(endpoint)):
        found["endpoint"] = endpoint  # Amazon's own it knows better by the region
    if pays:
        found["requester_pays"] = True
    return found


_AWS_CREDENTIALS: Final = ("anonymous", "environment")
"""Kinds of credentials that tensorstore finds as ckptcore does. Of profiles it makes nothing (0.1.86: "Failed to create credentials
provider"), what it finds by itself may be another's, and those that were given are in no address."""


def _is_of_amazon(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _gcs_options(options: Mapping[str, JSON]) -> Mapping[str, Any] | None:
    """https://google.github.io/tensorstore/kvstore/gcs: the endpoint and the credentials are those of the process."""
    left = dict(options)
    endpoint = str(left.pop("endpoint", _GOOGLE)).rstrip("/")
    credentials = left.pop("credentials", "default")
    project = left.pop("user_project", None)
    if left or credentials != "default":
        return None
    if endpoint != os.environ.get("TENSORSTORE_GCS_HTTP_URL", _GOOGLE).rstrip("/"):
        return None
    return {} if project is None else {"gcs_user_project": {"project_id": project}}


_OPTIONS: Final[Mapping[str, Callable[[Mapping[str, JSON]], Mapping[str, Any] | None]]] = {
    "file": _no_options,
    "s3": _s3_options,
    "gs": _gcs_options,
}
"""By scheme: what the options of an address are in a spec."""
