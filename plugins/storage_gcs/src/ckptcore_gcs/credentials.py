"""Credentials: a configured token, or Google's application default credentials."""

from __future__ import annotations

import os
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.services import LibraryCredentials

from ckptcore.redaction import chainable, redacted

if TYPE_CHECKING:
    from google.auth.exceptions import GoogleAuthError

_SCOPES: Final = ("https://www.googleapis.com/auth/devstorage.read_write",)

_MAX_MESSAGE_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class Token:
    """An OAuth 2.0 token, sent with requests.

    Attributes:
        text: the token itself, a secret.
        expires: time from which a new token is needed; None if unknown.
    """

    text: str = field(repr=False)
    expires: datetime | None = None


class DefaultTokens(LibraryCredentials[Token]):
    """Application default credentials, found and refreshed by google-auth.

    google-auth reads the given file. Without a file, it searches
    ``GOOGLE_APPLICATION_CREDENTIALS``, the gcloud login and the metadata server. A file can hold a
    service account, a user, a federated identity or an impersonated account.
    """

    def __init__(self, file: str | None) -> None:
        """Initialise without I/O, and without importing google-auth."""
        super().__init__()
        self._file = file

    def find(self) -> Token:
        """See `LibraryCredentials`. May send requests to the metadata server or the token service."""
        from google.auth.exceptions import GoogleAuthError

        try:
            if self.library is None:
                self.library = self._load()
            if not self.library.valid:
                self.library.refresh(_connection())
        except GoogleAuthError as error:
            raise RequestFailed(_failure_of(error)) from chainable(error)
        except OSError as error:  # the credentials name a file with the token of a pod
            message = f"cannot get a token: {redacted(str(error))}"
            raise RequestFailed(Failure(FailureKind.CREDENTIALS, None, "", message)) from chainable(error)
        expiry = self.library.expiry
        self.last = Token(str(self.library.token), None if expiry is None else expiry.replace(tzinfo=UTC))
        return self.last

    def _load(self) -> Any:
        import google.auth

        named = self._file or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        source = "the option 'credentials_file'" if self._file else "GOOGLE_APPLICATION_CREDENTIALS"
        try:
            if self._file is None:
                return google.auth.default(scopes=_SCOPES)[0]
            # google-auth warns about files from untrusted sources (DeprecationWarning). This file
            # was named by the user of the program.
            loaded: tuple[Any, Any] = google.auth.load_credentials_from_file(self._file, scopes=_SCOPES)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, AttributeError, TypeError) as error:  # the last two: JSON, but not an object
            what = f"the file {named!r} of {source}" if named else "the file of the gcloud login"
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            message = redacted(f"cannot read {what}: {reason}")[:_MAX_MESSAGE_LENGTH]
            raise RequestFailed(Failure(FailureKind.CREDENTIALS, None, "", message)) from chainable(error)
        return loaded[0]


def _connection() -> Any:
    """Return the transport of token requests. It uses the proxy of the environment."""
    import urllib3
    from google.auth.transport.urllib3 import Request

    proxy = urllib.request.getproxies().get("https")
    return Request(urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager())  # type: ignore[no-untyped-call]


def _failure_of(error: GoogleAuthError) -> Failure:
    """Convert an error of google-auth."""
    from google.auth.exceptions import TransportError

    message = redacted(" ".join(str(error).split()))[:_MAX_MESSAGE_LENGTH]
    # The message of the token service is "Token must be a short-lived token (60 minutes) and in a
    # reasonable timeframe."
    if "reasonable timeframe" in message:
        return Failure(FailureKind.CLOCK, None, "", message)
    if isinstance(error, TransportError) or error.retryable:
        return Failure(FailureKind.CONNECTION, None, "", f"cannot get a token: {message}")
    return Failure(FailureKind.CREDENTIALS, None, "", message)
