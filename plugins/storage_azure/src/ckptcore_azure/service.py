"""`AzureService`: the service of one container. Also signs requests with the key of a storage account."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote, urlsplit

from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_obstore.services import FixedCredentials, Service, client_options

from ckptcore.protocols import StorageAddress
from ckptcore_azure.credentials import ANONYMOUS, DefaultTokens
from ckptcore_azure.refusals import ANONYMOUS_REFUSALS, REFUSALS
from ckptcore_azure.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_SIGNED: Final = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)
"""Headers whose values are signed, in this order."""


def shared_key_headers(
    method: str, url: str, headers: Mapping[str, str], account: str, key: str, *, now: datetime | None = None
) -> Mapping[str, str]:
    """Return the headers of a request, with a signature made with the key of a storage account.

    See https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key.

    Args:
        method: in upper case.
        url: full URL, escaped.
        headers: all other headers, by lower-case names. ``content-length`` must be among them if there is a body.
        account: name of the storage account.
        key: the account's key, in Base64.
        now: time of the request.
    """
    sent = {**headers, "x-ms-date": format_datetime(now or datetime.now(UTC), usegmt=True)}
    lines = [method, *[sent.get(name, "") for name in _SIGNED]]
    if sent.get("content-length") == "0":  # an empty value is signed since version 2015-02-21 of the protocol
        lines[1 + _SIGNED.index("content-length")] = ""
    lines += [f"{name}:{' '.join(sent[name].split())}" for name in sorted(sent) if name.startswith("x-ms-")]
    parts = urlsplit(url)
    lines.append(f"/{account}{parts.path or '/'}")
    lines += [f"{name.lower()}:{value}" for name, value in sorted(parse_qsl(parts.query, keep_blank_values=True))]
    digest = hmac.new(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256).digest()
    sent["authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
    return sent


_REMEDIES: Final = {
    FailureKind.NO_BUCKET: "Check the name of the container and the account, or create it",
    FailureKind.NO_UPLOAD: "Save again: another save may have aborted the upload",
    FailureKind.CREDENTIALS: "Check AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or "
    "AZURE_STORAGE_CONNECTION_STRING, or run `az login`, and check the clock of this machine; for a public container "
    "set the option 'anonymous'",
    FailureKind.SETTINGS: "Check the option 'ca_bundle', and unset AZURE_ENCRYPTION_KEY",
    FailureKind.PERMISSION: "Give the identity the role Storage Blob Data Contributor on the container, or the shared "
    "access signature the permissions racwdl",
    FailureKind.THROTTLED: "Use fewer processes or a lower 'concurrency', or another storage account",
    FailureKind.CONNECTION: "Check the network, the name of the storage account and the endpoint; plain HTTP needs "
    "http:// in the endpoint",
    FailureKind.RETAINED: "Wait until it ends, or use a container without it for checkpoints",
    FailureKind.ARCHIVED: "Rehydrate it to the hot tier and wait until that is done, or load another checkpoint",
    FailureKind.UNSUPPORTED: "Use another storage account or location",
}


class AzureService(Service):
    """A container. Thread-safe."""

    metadata_prefix = "x-ms-meta-"

    upload_headers = MappingProxyType({"x-ms-blob-type": "BlockBlob"})

    remedies = _REMEDIES

    def __init__(self, settings: Settings) -> None:
        """Initialise without sending a request or loading credentials."""
        source = DefaultTokens() if settings.credential is None else FixedCredentials(settings.credential)
        super().__init__(settings.url, settings.tuning, source)
        self._settings = settings
        self.refusals = ANONYMOUS_REFUSALS if settings.credential is ANONYMOUS else REFUSALS

    @property
    def bucket_url(self) -> str:
        """URL of the container, for requests."""
        return f"{self._settings.endpoint}/{self._settings.container}"

    def open_store(self) -> ObjectStore:
        """Return the container as an obstore store. The environment does not affect it.

        Raises:
            RequestFailed: with kind SETTINGS, if the environment has an encryption key.
        """
        from obstore.store import AzureStore

        settings = self._settings
        if os.environ.get("AZURE_ENCRYPTION_KEY"):
            # obstore always reads this variable, but uploads in blocks would not use the key.
            message = "AZURE_ENCRYPTION_KEY is set, but customer-provided encryption keys are not supported"
            raise RequestFailed(Failure(FailureKind.SETTINGS, None, "", message))
        anonymous = settings.credential is ANONYMOUS
        config: dict[str, Any] = {
            "account_name": settings.account,
            "endpoint": settings.endpoint,
            "use_emulator": False,
            "use_fabric_endpoint": False,
            "skip_signature": anonymous,
            "credential_type": "auto",
        }
        return AzureStore(
            settings.container,
            config=config,  # type: ignore[arg-type]  # obstore's TypedDict cannot be built step by step
            client_options=client_options(self),  # type: ignore[arg-type]
            retry_config={"max_retries": 0},
            credential_provider=None if anonymous else self._obstore_credential,  # type: ignore[arg-type]
        )

    def _obstore_credential(self) -> dict[str, Any]:
        """Return the credential in obstore's form. obstore calls this again after it expires."""
        credential = self.credentials.get()
        name = {"key": "access_key", "sas": "sas_token", "token": "token"}[credential.kind]
        return {name: credential.secret, "expires_at": credential.expires}

    @property
    def has_signature(self) -> bool:
        """True if a shared access signature authorizes requests."""
        return self._settings.credential is not None and self._settings.credential.kind == "sas"

    def signature(self) -> Mapping[str, str]:
        """Return the parameters of the shared access signature, which are part of the URL of each request."""
        credential = self.credentials.get()
        return dict(parse_qsl(credential.secret, keep_blank_values=True)) if credential.kind == "sas" else {}

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return all headers of a request. They include the authorization, unless it is part of the URL."""
        credential = self.credentials.get()
        if credential.kind == "key":
            return shared_key_headers(method, url, headers, self._settings.account, credential.secret)
        if credential.kind == "token":
            return {**headers, "authorization": f"Bearer {credential.secret}"}
        return headers

    def address(self, directory: str) -> StorageAddress:
        """Return the address for native I/O. It contains no secrets."""
        settings = self._settings
        kind = "default" if settings.credential is None else settings.credential.kind
        options = {"endpoint": settings.endpoint, "account_name": settings.account, "credentials": kind}
        return StorageAddress(f"az://{settings.container}/{quote(directory)}", options)

    def remedy(self, failure: Failure) -> str:
        """Return advice for a failure."""
        if failure.kind is FailureKind.OTHER:
            return f"Check the endpoint {self._settings.endpoint} and its response"
        return super().remedy(failure)
