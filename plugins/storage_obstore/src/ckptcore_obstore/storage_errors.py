"""Conversion of failed requests to errors for users, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from ckptcore.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ConditionFailedError,
    ObjectNotFoundError,
    ObjectUnavailableError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
    WrongRegionError,
    converts_errors,
)
from ckptcore.redaction import redacted_location
from ckptcore_obstore.failures import FailureKind, RequestFailed, refusal_of
from ckptcore_obstore.plain_requests import proxy_of
from ckptcore_obstore.services import Service

_ERRORS: Final[dict[FailureKind, type[StorageError]]] = {
    FailureKind.MISSING: ObjectNotFoundError,
    FailureKind.NO_BUCKET: BucketNotFoundError,
    FailureKind.CONDITION: ConditionFailedError,
    FailureKind.CREDENTIALS: StorageCredentialsError,
    FailureKind.SETTINGS: StorageCredentialsError,
    FailureKind.PERMISSION: StoragePermissionError,
    FailureKind.RETAINED: StoragePermissionError,
    FailureKind.ARCHIVED: ObjectUnavailableError,
    FailureKind.KEY: ObjectUnavailableError,
    FailureKind.REGION: WrongRegionError,
    FailureKind.CLOCK: ClockSkewError,
    FailureKind.FULL: StorageFullError,
    FailureKind.THROTTLED: StorageThrottledError,
    FailureKind.TIMEOUT: StorageTimeoutError,
}


def error_of(failed: RequestFailed, service: Service, what: str) -> StorageError:
    """Return the error for a failed request.

    Args:
        failed: the failure.
        service: the service that failed.
        what: operation in the infinitive, such as ``read s3://bucket/a``.
    """
    failure = failed.failure
    kind = failure.kind
    tries = f" ({failed.tried.tries} tries in {failed.tried.seconds:.1f} s)" if failed.tried.tries > 1 else ""
    refusal = refusal_of(failure.code, service.refusals)
    cause, remedy = (refusal.cause, refusal.remedy) if refusal is not None else ("", "")
    if kind is FailureKind.PROXY:
        remedy = _proxy_remedy(service)
    if kind is FailureKind.HOST:
        failure = replace(failure, kind=FailureKind.CONNECTION)  # what to do is the same
    remedy = remedy or service.remedy(failure)
    text = f"cannot {what}: {cause or kind.value}; found {failure.description.removesuffix('.')}{tries}. {remedy}"
    return _ERRORS.get(kind, StorageError)(text)


def _proxy_remedy(service: Service) -> str:
    proxy = proxy_of(service.bucket_url)
    named = "the proxy" if proxy is None else f"the proxy {redacted_location(proxy)}"
    scheme, host = urlsplit(service.bucket_url).scheme.upper(), urlsplit(service.bucket_url).hostname
    return (
        f"Check the user and password for {named} in {scheme}_PROXY, allow it to connect to {host}, or add that host "
        "to NO_PROXY"
    )


@converts_errors
def converted_errors(service: Service, what: str) -> Iterator[None]:
    """Convert a `RequestFailed` of the block with `error_of`."""
    try:
        yield
    except RequestFailed as failed:
        raise error_of(failed, service, what) from failed
