"""Credentials: configured credentials, or tokens that azure-identity finds for the user of the process."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.services import LibraryCredentials

from ckptcore.redaction import chainable, redacted

_SCOPE: Final = "https://storage.azure.com/.default"
_EARLIER: Final = timedelta(minutes=5)
"""A token is replaced this long before it expires."""

_MAX_MESSAGE_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class Credential:
    """A credential that authorizes requests.

    Attributes:
        kind: the key of the account, a shared access signature, an OAuth 2.0 token, or no
            credential.
        secret: the credential itself. A signature does not begin with ``?``.
        expires: time from which a new credential is needed; None if unknown.
    """

    kind: Literal["key", "sas", "token", "anonymous"]
    secret: str = field(default="", repr=False)
    expires: datetime | None = None


ANONYMOUS: Final = Credential("anonymous")
"""The credential of requests without authorization."""


class DefaultTokens(LibraryCredentials[Credential]):
    """Tokens of Microsoft Entra ID, found by `azure.identity.DefaultAzureCredential`.

    `DefaultAzureCredential` reads environment variables such as ``AZURE_CLIENT_ID``, the identity of the pod or
    machine, and the logins of the command line tools.
    """

    def find(self) -> Credential:
        """See `LibraryCredentials`. May send requests to the token service, or start the Azure CLI."""
        now = datetime.now(UTC)
        if self.last is not None and self.last.expires is not None and now + _EARLIER < self.last.expires:
            return self.last
        from azure.core.exceptions import AzureError, ClientAuthenticationError
        from azure.identity import DefaultAzureCredential

        try:
            if self.library is None:
                self.library = DefaultAzureCredential()
            token = self.library.get_token(_SCOPE)
        except (AzureError, ValueError) as error:
            message = redacted(" ".join(str(error).split()))[:_MAX_MESSAGE_LENGTH]
            # A token service that does not answer raises ServiceRequestError or HttpResponseError.
            is_final = isinstance(error, ClientAuthenticationError | ValueError)
            kind = FailureKind.CREDENTIALS if is_final else FailureKind.CONNECTION
            raise RequestFailed(Failure(kind, None, "", f"cannot get a token: {message}")) from chainable(error)
        self.last = Credential("token", token.token, datetime.fromtimestamp(token.expires_on, UTC))
        return self.last
