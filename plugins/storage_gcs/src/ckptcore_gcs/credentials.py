"""Credentials: tokens that were given, or those that Google's own conventions find."""

from __future__ import annotations

import threading
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed

from ckptcore.errors import ClockSkewError, StorageCredentialsError, StorageError

__all__ = ["DefaultTokens", "GivenToken", "Token", "TokenSource"]

_SCOPES: Final = ("https://www.googleapis.com/auth/devstorage.read_write",)

_MOST_TOLD: Final = 300


@dataclass(frozen=True, slots=True)
class Token:
    """What a request bears.

    Attributes:
        text: the secret itself.
        expires: when a new one is to be asked for; None: nobody knows.
    """

    text: str = field(repr=False)
    expires: datetime | None = None


class TokenSource(Protocol):
    """Where tokens come from. Any thread."""

    def get(self) -> Token:
        """One to send now.

        Raises:
            StorageCredentialsError: if there is none.
            ClockSkewError: if there would be one with another time.
            RequestFailed: if whoever gives them out did not answer, and may a little later.
        """
        ...


@dataclass(frozen=True, slots=True)
class GivenToken:
    """A token that stays the same; empty for no token."""

    text: str = field(repr=False)

    def get(self) -> Token:
        """Itself."""
        return Token(self.text)


class DefaultTokens:
    """What google-auth finds and refreshes: a file, ``GOOGLE_APPLICATION_CREDENTIALS``, gcloud's login, the metadata server.

    Files can be those of service accounts, of users, of identities that are federated from other clouds, and of
    impersonation.
    """

    def __init__(self, file: str | None) -> None:
        """Look for nothing yet, and do not import google-auth."""
        self._file = file
        self._lock = threading.Lock()
        self._found: Any = None

    def get(self) -> Token:
        """One to send now; the first call may ask the metadata server of a machine."""
        from google.auth.exceptions import GoogleAuthError

        with self._lock:
            try:
                if self._found is None:
                    self._found = self._find()
                if not self._found.valid:
                    self._found.refresh(_connection())
            except GoogleAuthError as error:
                raise _error_of(error) from error
            expiry = self._found.expiry
            return Token(str(self._found.token), None if expiry is None else expiry.replace(tzinfo=UTC))

    def _find(self) -> Any:
        import google.auth

        if self._file is None:
            return google.auth.default(scopes=_SCOPES)[0]
        try:
            found: tuple[Any, Any] = google.auth.load_credentials_from_file(self._file, scopes=_SCOPES)  # type: ignore[no-untyped-call]
            return found[0]
        except OSError as error:
            raise StorageCredentialsError(
                f"the file of credentials {self._file!r} cannot be read: {error.strerror}. Look at the option 'credentials_file'"
            ) from error


def _connection() -> Any:
    """What google-auth asks the token service by; proxies are those of the environment."""
    import urllib3
    from google.auth.transport.urllib3 import Request

    proxy = urllib.request.getproxies().get("https")
    return Request(urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager())  # type: ignore[no-untyped-call]


def _error_of(error: Exception) -> StorageError | RequestFailed:
    """The error to raise for one of google-auth's."""
    from google.auth.exceptions import DefaultCredentialsError, TransportError

    told = " ".join(str(error).split())[:_MOST_TOLD]
    if isinstance(error, DefaultCredentialsError):
        return StorageCredentialsError(
            f"no Google credentials were found: {told} Set GOOGLE_APPLICATION_CREDENTIALS or run `gcloud auth "
            "application-default login`; for a public bucket set Context(storage={'gs': {'anonymous': True}})"
        )
    # The words of the token service: "Token must be a short-lived token (60 minutes) and in a reasonable timeframe."
    if "reasonable timeframe" in told:
        return ClockSkewError(
            f"the Google credentials are refused because of the time they are signed with: {told} Set the clock of this machine "
            "(NTP)"
        )
    if isinstance(error, TransportError) or getattr(error, "retryable", False):
        return RequestFailed(Failure(FailureKind.CONNECTION, None, "", f"no token could be had: {told}"))
    return StorageCredentialsError(
        f"the Google credentials could not be refreshed: {told} Sign in again, or look at the account they belong to"
    )
