"""Conversion of failed requests to errors for users, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ckptcore.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ConditionFailedError,
    ObjectNotFoundError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
    WrongRegionError,
)
from ckptcore_obstore.failures import FailureKind, RequestFailed
from ckptcore_obstore.services import Service

__all__ = ["converted_errors", "error_of"]

_ERRORS: Final[dict[FailureKind, type[StorageError]]] = {
    FailureKind.MISSING: ObjectNotFoundError,
    FailureKind.NO_BUCKET: BucketNotFoundError,
    FailureKind.CONDITION: ConditionFailedError,
    FailureKind.CREDENTIALS: StorageCredentialsError,
    FailureKind.SETTINGS: StorageCredentialsError,
    FailureKind.PERMISSION: StoragePermissionError,
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
    text = (
        f"cannot {what}: {kind.value}; found {failure.description.removesuffix('.')}{tries}. {service.remedy(failure)}"
    )
    return _ERRORS.get(kind, StorageError)(text)


@contextmanager
def converted_errors(service: Service, what: str) -> Iterator[None]:
    """Convert a `RequestFailed` of the block with `error_of`."""
    try:
        yield
    except RequestFailed as failed:
        raise error_of(failed, service, what) from failed
