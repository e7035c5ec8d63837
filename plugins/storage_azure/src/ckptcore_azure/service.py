"""`AzureService`: implements the `Service` protocol of ckptcore_obstore for one container."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote

from ckptcore_obstore.failures import Failure, FailureKind, Refusals, RequestFailed
from ckptcore_obstore.services import Tuning, client_options

from ckptcore.protocols import IfAbsent, PutCondition, StorageAddress
from ckptcore_azure.credentials import ANONYMOUS, CredentialSource, DefaultTokens, FixedCredential
from ckptcore_azure.refusals import ANONYMOUS_REFUSALS, REFUSALS
from ckptcore_azure.settings import Settings
from ckptcore_azure.signing import shared_key_headers

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_REMEDIES: Final = {
    FailureKind.MISSING: "Check the path",
    FailureKind.NO_BUCKET: "Check the name of the container and the account, or create it",
    FailureKind.NO_UPLOAD: "Save again: another save may have aborted the upload",
    FailureKind.CONDITION: "Another process changed it",
    FailureKind.CREDENTIALS: "Check AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or "
    "AZURE_STORAGE_CONNECTION_STRING, or run `az login`, and check the clock of this machine; for a public container "
    "set the option 'anonymous'",
    FailureKind.SETTINGS: "Check the option 'ca_bundle', and unset AZURE_ENCRYPTION_KEY",
    FailureKind.PERMISSION: "Give the identity the role Storage Blob Data Contributor on the container, or the shared "
    "access signature the permissions racwdl",
    FailureKind.FULL: "Delete data, or raise the quota",
    FailureKind.THROTTLED: "Use fewer processes or a lower 'concurrency', or another storage account",
    FailureKind.SERVER: "Try again later",
    FailureKind.TIMEOUT: "Check the network and the endpoint, or raise the option 'timeout'",
    FailureKind.CONNECTION: "Check the network, the name of the storage account and the endpoint; plain HTTP needs "
    "http:// in the endpoint",
    FailureKind.RETAINED: "Wait until it ends, or use a container without it for checkpoints",
    FailureKind.ARCHIVED: "Rehydrate it to the hot tier and wait until that is done, or load another checkpoint",
    FailureKind.UNSUPPORTED: "Use another storage account or location",
}


class AzureService:
    """A container. Thread-safe."""

    metadata_prefix: Final = "x-ms-meta-"

    upload_headers: Final[Mapping[str, str]] = {"x-ms-blob-type": "BlockBlob"}

    def __init__(self, settings: Settings) -> None:
        """Initialise without sending a request or loading credentials."""
        self._settings = settings
        self._source: CredentialSource = (
            DefaultTokens() if settings.credential is None else FixedCredential(settings.credential)
        )

    @property
    def settings(self) -> Settings:
        """Settings of the container."""
        return self._settings

    @property
    def url(self) -> str:
        """URL of the container, for messages."""
        return self._settings.url

    @property
    def bucket_url(self) -> str:
        """URL of the container, for requests."""
        return f"{self._settings.endpoint}/{self._settings.container}"

    @property
    def refusals(self) -> Refusals:
        """The errors that the service documents, for these credentials."""
        return ANONYMOUS_REFUSALS if self._settings.credential is ANONYMOUS else REFUSALS

    @property
    def ca_bundle(self) -> str | None:
        """File of trusted certificates."""
        return self._settings.tuning.ca_bundle

    @property
    def tuning(self) -> Tuning:
        """Tuning of requests."""
        return self._settings.tuning

    def open_store(self) -> ObjectStore:
        """Return the container as an obstore store. The environment does not affect it.

        Raises:
            RequestFailed: with kind SETTINGS, if the environment has an encryption key.
        """
        from obstore.store import AzureStore

        settings = self._settings
        if os.environ.get("AZURE_ENCRYPTION_KEY"):
            # obstore reads it, without a way to prevent that. Uploads in blocks would lack it.
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
        found = self._source.get()
        name = {"key": "access_key", "sas": "sas_token", "token": "token"}[found.kind]
        return {name: found.secret, "expires_at": found.expires}

    @property
    def has_signature(self) -> bool:
        """True if a shared access signature authorizes requests."""
        return self._settings.credential is not None and self._settings.credential.kind == "sas"

    def signature(self) -> Mapping[str, str]:
        """Return the parameters of the shared access signature, which are part of the URL of each request."""
        found = self._source.get()
        return dict(parse_qsl(found.secret, keep_blank_values=True)) if found.kind == "sas" else {}

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return all headers of a request, with its authorization, unless that is part of the URL."""
        found = self._source.get()
        if found.kind == "key":
            return shared_key_headers(method, url, headers, self._settings.account, found.secret)
        if found.kind == "token":
            return {**headers, "authorization": f"Bearer {found.secret}"}
        return headers

    def prepare(self) -> object:
        """Return the credential."""
        return self._source.get()

    def renew(self, used: object) -> bool:
        """Look for another credential than the one that the service refused."""
        return self._source.renew(used)

    def address(self, directory: str) -> StorageAddress:
        """Return the address for native I/O. It contains no secrets."""
        settings = self._settings
        kind = "default" if settings.credential is None else settings.credential.kind
        options = {"endpoint": settings.endpoint, "account_name": settings.account, "credentials": kind}
        return StorageAddress(f"az://{settings.container}/{quote(directory)}", options)

    def tag(self, e_tag: str | None, version: str | None) -> str:
        """Return the ETag, which is unique among all versions of a blob."""
        return e_tag or ""

    def put_mode(self, condition: PutCondition) -> Any:
        """Return ``create``, or the required tag."""
        return "create" if isinstance(condition, IfAbsent) else {"e_tag": condition.tag}

    def condition_headers(self, condition: PutCondition) -> Mapping[str, str]:
        """Return headers of a condition.

        See https://learn.microsoft.com/rest/api/storageservices/specifying-conditional-headers-for-blob-service-operations.
        """
        return {"if-none-match": "*"} if isinstance(condition, IfAbsent) else {"if-match": condition.tag}

    def remedy(self, failure: Failure) -> str:
        """Return advice for a failure."""
        if failure.kind is FailureKind.OTHER:
            return f"Check the endpoint {self._settings.endpoint} and its response"
        return _REMEDIES.get(failure.kind, "Try again")
