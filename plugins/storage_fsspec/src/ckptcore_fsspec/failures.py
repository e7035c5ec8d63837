"""Conversion of file system errors to ckptcore errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from typing import Final

from ckptcore.errors import (
    CheckpointError,
    ObjectNotFoundError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
    converts_errors,
)
from ckptcore.redaction import chainable, redacted

MISSING_OBJECT_ERRORS: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Exceptions that file systems raise for a missing object."""

_MAX_MESSAGE_LENGTH: Final = 300
"""Maximum length of the part of an error message that is shown."""

_REFUSED_KEYS: Final = (
    "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch",
    "TokenRefreshRequired",
)  # fmt: skip
"""Error codes of S3 for invalid credentials."""

_STATUS_NAMES: Final = ("status", "status_code", "code")
"""Attributes with the HTTP status, in errors of aiohttp, Azure, httpx, requests and gcsfs."""


def first_line(error: BaseException) -> str:
    """Return the type and the start of the message of an error, in one line."""
    # Redact before cutting: without its end, a password in a URL would not be recognised.
    text = redacted(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:_MAX_MESSAGE_LENGTH]}" if text else type(error).__name__


@converts_errors
def converted_errors(what: str) -> Iterator[None]:
    """Convert file system errors to ckptcore errors. Errors of ckptcore pass unchanged.

    Args:
        what: operation and location: ``cannot read ...``.

    Raises:
        StorageError: for any other exception; see `failure`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  # raised again as a ckptcore error
        raise failure(error, what) from chainable(error)


def failure(error: BaseException, what: str) -> StorageError:
    """Return the ckptcore error for a file system error.

    Args:
        error: an error of fsspec or of the library below it. These libraries share only
            builtin errors and status codes.
        what: operation and location: ``cannot read ...``.
    """
    text = first_line(error)
    status = _status(error)
    if isinstance(error, MISSING_OBJECT_ERRORS) or status in (404, 410):
        return ObjectNotFoundError(f"{what}: the object does not exist ({text})")
    if (
        status == 401
        or _code(error) in _REFUSED_KEYS
        or type(error).__name__
        in (
            "NoCredentialsError",
            "DefaultCredentialsError",
            "ClientAuthenticationError",
        )
    ):
        return StorageCredentialsError(f"{what}: {text}; provide valid credentials for this storage")
    if isinstance(error, PermissionError) or status == 403:
        return StoragePermissionError(f"{what}: {text}; use other credentials, or grant the permission")
    if status in (429, 503):
        return StorageThrottledError(f"{what}: {text}; use fewer processes at once, and try again")
    if isinstance(error, TimeoutError) or status in (408, 504):
        return StorageTimeoutError(f"{what}: {text}; check the connection to the storage, and try again")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{what}: {text}; free some space, or save elsewhere")
    return StorageError(f"{what}: {text}")


def is_about_credentials(error: StorageError) -> bool:
    """Return True if other credentials may help. S3 answers a HEAD request only with a status, so 400 and 403 count."""
    return isinstance(error, StorageCredentialsError) or (
        error.__cause__ is not None and _code(error.__cause__) in ("400", "403")
    )


def _code(error: BaseException) -> str:
    """Return the error code of S3, which s3fs stores in the cause of its errors. Empty if there is no code."""
    response = getattr(error.__cause__ or error, "response", None)
    details = response.get("Error") if isinstance(response, Mapping) else None
    return str(details.get("Code", "")) if isinstance(details, Mapping) else ""


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or None."""
    for holder in (error, getattr(error, "response", None)):
        for name in _STATUS_NAMES:
            value = getattr(holder, name, None)
            if type(value) is int:
                return value
    return None
