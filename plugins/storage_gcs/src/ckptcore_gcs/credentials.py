"""Credentials: tokens that were given, or those that Google's own conventions find."""

from __future__ import annotations

import threading
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.forks import renew_in_children

if TYPE_CHECKING:
    from google.auth.exceptions import GoogleAuthError

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
            RequestFailed: of kind CREDENTIALS where there is none, CLOCK where there would be one at another time, CONNECTION
                where whoever gives them out did not answer, and may a little later.
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
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Look for them anew: in a child by fork, whose parent may be asking for them just now."""
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
                raise RequestFailed(_failure_of(error)) from error
            expiry = self._found.expiry
            return Token(str(self._found.token), None if expiry is None else expiry.replace(tzinfo=UTC))

    def _find(self) -> Any:
        import google.auth

        if self._file is None:
            return google.auth.default(scopes=_SCOPES)[0]
        try:
            # It warns of files that strangers may have written (DeprecationWarning): who runs the program has named this one.
            found: tuple[Any, Any] = google.auth.load_credentials_from_file(self._file, scopes=_SCOPES)  # type: ignore[no-untyped-call]
        except OSError as error:
            told = f"the file {self._file!r} of the option 'credentials_file' cannot be read: {error.strerror}"
            raise RequestFailed(Failure(FailureKind.CREDENTIALS, None, "", told)) from error
        return found[0]


def _connection() -> Any:
    """What google-auth asks the token service by; proxies are those of the environment."""
    import urllib3
    from google.auth.transport.urllib3 import Request

    proxy = urllib.request.getproxies().get("https")
    return Request(urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager())  # type: ignore[no-untyped-call]


def _failure_of(error: GoogleAuthError) -> Failure:
    """The failure that an error of google-auth tells."""
    from google.auth.exceptions import TransportError

    told = " ".join(str(error).split())[:_MOST_TOLD]
    # The words of the token service: "Token must be a short-lived token (60 minutes) and in a reasonable timeframe."
    if "reasonable timeframe" in told:
        return Failure(FailureKind.CLOCK, None, "", told)
    if isinstance(error, TransportError) or error.retryable:
        return Failure(FailureKind.CONNECTION, None, "", f"no token could be had: {told}")
    return Failure(FailureKind.CREDENTIALS, None, "", told)
