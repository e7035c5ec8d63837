"""Credentials: configured ones, or tokens that azure-identity finds for the owner of the process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Protocol

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.forks import reset_in_children

from ckptcore.redaction import chainable, redacted

_SCOPE: Final = "https://storage.azure.com/.default"
_EARLIER: Final = timedelta(minutes=5)
"""Time before the end of a token from which a new one is used."""

_MAX_MESSAGE_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class Credential:
    """A credential that authorizes requests.

    Attributes:
        kind: the key of the account, a shared access signature, an OAuth 2.0 token, or none.
        secret: the credential itself; a signature without ``?``.
        expires: time from which a new one is needed; None if unknown.
    """

    kind: Literal["key", "sas", "token", "anonymous"]
    secret: str = field(default="", repr=False)
    expires: datetime | None = None


ANONYMOUS: Final = Credential("anonymous")
"""For requests without credentials."""


class CredentialSource(Protocol):
    """A source of credentials. Thread-safe."""

    def get(self) -> Credential:
        """Return a valid credential.

        Raises:
            RequestFailed: with kind CREDENTIALS if there is none, or CONNECTION if the token service does not answer,
                which may be transient.
        """
        ...

    def renew(self, used: object) -> bool:
        """Look for another credential, after the service refused the `used` one. Return True if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class FixedCredential:
    """A fixed credential."""

    credential: Credential

    def get(self) -> Credential:
        """Return the credential."""
        return self.credential

    def renew(self, used: object) -> bool:
        """Return False."""
        return False


class DefaultTokens:
    """Tokens of Microsoft Entra ID, which `azure.identity.DefaultAzureCredential` finds.

    It looks at the variables ``AZURE_CLIENT_ID`` and others, the identity of a pod or machine, and the logins of the
    command line tools.
    """

    def __init__(self) -> None:
        """Initialise without I/O, and without importing azure-identity."""
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Discard the tokens. Called in a forked child, because the parent may hold the lock."""
        self._lock = threading.Lock()
        self._found: Any = None
        self._cached: Credential | None = None

    def get(self) -> Credential:
        """Return a valid token. May send requests to the token service, or start the Azure CLI."""
        with self._lock:
            return self._get()

    def renew(self, used: object) -> bool:
        """See `CredentialSource`. If another thread has renewed the token since, there is nothing to look for."""
        with self._lock:
            if self._cached is None or self._cached == used:
                self._found = self._cached = None  # the variables or the login may have changed
            return self._get() != used

    def _get(self) -> Credential:
        now = datetime.now(UTC)
        if self._cached is not None and self._cached.expires is not None and now + _EARLIER < self._cached.expires:
            return self._cached
        from azure.core.exceptions import AzureError, ClientAuthenticationError
        from azure.identity import DefaultAzureCredential

        try:
            if self._found is None:
                self._found = DefaultAzureCredential()
            token = self._found.get_token(_SCOPE)
        except (AzureError, ValueError) as error:
            message = redacted(" ".join(str(error).split()))[:_MAX_MESSAGE_LENGTH]
            # A token service that does not answer raises ServiceRequestError or HttpResponseError.
            is_final = isinstance(error, ClientAuthenticationError | ValueError)
            kind = FailureKind.CREDENTIALS if is_final else FailureKind.CONNECTION
            raise RequestFailed(Failure(kind, None, "", f"cannot get a token: {message}")) from chainable(error)
        self._cached = Credential("token", token.token, datetime.fromtimestamp(token.expires_on, UTC))
        return self._cached
