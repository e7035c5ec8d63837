"""`GcsService`: the `Service` of ckptcore_obstore for one bucket."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from ckptcore_obstore.failures import Failure, FailureKind
from ckptcore_obstore.services import CredentialSource, FixedCredentials, Service, client_options

from ckptcore.protocols import IfAbsent, PutCondition, StorageAddress
from ckptcore_gcs.credentials import DefaultTokens, Token
from ckptcore_gcs.refusals import REFUSALS
from ckptcore_gcs.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PERMISSION: Final = re.compile(r"does not have ([a-zA-Z]+\.[a-zA-Z.]+) access")
"""Finds the permission in the message about a missing permission."""

_REMEDIES: Final = {
    FailureKind.NO_BUCKET: "Check the name of the bucket, or create it",
    FailureKind.CREDENTIALS: "Check GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`; "
    "for a public bucket set Context(storage={'gs': {'anonymous': True}})",
    FailureKind.SETTINGS: "Check the option 'ca_bundle'",
    FailureKind.PERMISSION: "Give the account the role Storage Object User on the bucket (storage.objects.* and "
    "storage.multipartUploads.*)",
    FailureKind.CLOCK: "Set the clock of this machine (NTP)",
    FailureKind.THROTTLED: "Use fewer processes or a lower 'concurrency', or spread the names over more prefixes; "
    "one object can be replaced about once a second",
    FailureKind.CONNECTION: "Check the network and the endpoint; plain HTTP needs http:// in the endpoint",
    FailureKind.UNSUPPORTED: "Set the option 'uploads' to 'composite' if the service lacks uploads in parts of the XML "
    "API, or use another location",
}


class GcsService(Service):
    """A bucket. Thread-safe."""

    metadata_prefix = "x-goog-meta-"
    refusals = REFUSALS
    remedies = _REMEDIES

    def __init__(self, settings: Settings) -> None:
        """Initialise without sending a request or loading credentials."""
        source: CredentialSource[Token]
        if settings.anonymous or settings.access_token is not None:
            source = FixedCredentials(Token("" if settings.anonymous else settings.access_token or ""))
        else:
            source = DefaultTokens(settings.credentials_file)  # registers a fork callback, which is never removed
        super().__init__(f"gs://{settings.bucket}", settings.tuning, source)
        self.settings: Final = settings

    @property
    def bucket_url(self) -> str:
        """URL of the bucket in the XML API."""
        return f"{self.settings.endpoint}/{self.settings.bucket}"

    def open_store(self) -> ObjectStore:
        """Return the bucket as an obstore store. The environment does not affect it."""
        from obstore.store import GCSStore

        settings, client = self.settings, client_options(self)
        if settings.user_project:
            client["default_headers"] = {"x-goog-user-project": settings.user_project}
        # With this key, obstore does not search the environment, where it may find a key that it
        # cannot read.
        key = {
            "gcs_base_url": settings.endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return GCSStore(
            settings.bucket,
            config={"service_account_key": json.dumps(key), "base_url": settings.endpoint},
            client_options=client,  # type: ignore[arg-type]  # obstore's TypedDict cannot be built step by step
            retry_config={"max_retries": 0},
            credential_provider=None if settings.anonymous else self._obstore_token,  # type: ignore[arg-type]
        )

    def _obstore_token(self) -> dict[str, Any]:
        """Return a token in obstore's form. obstore calls this again after it expires."""
        token = self.credentials.get()
        return {"token": token.text, "expires_at": token.expires}

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return all headers of a request, with the token."""
        sent = dict(headers)
        token = self.credentials.get().text
        if token:
            sent["authorization"] = f"Bearer {token}"
        if self.settings.user_project:
            sent["x-goog-user-project"] = self.settings.user_project
        return sent

    def address(self, directory: str) -> StorageAddress:
        """Return the address for native I/O, such as tensorstore. It contains no secrets."""
        settings = self.settings
        kind = "anonymous" if settings.anonymous else "token" if settings.access_token else "default"
        options: dict[str, Any] = {"endpoint": settings.endpoint, "credentials": kind}
        if settings.credentials_file:
            options |= {"credentials": "file", "credentials_file": settings.credentials_file}
        if settings.user_project:
            options["user_project"] = settings.user_project
        return StorageAddress(f"gs://{settings.bucket}/{quote(directory)}", options)

    def tag(self, e_tag: str | None, version: str | None) -> str:
        """Return the generation, which is unique among all versions of an object."""
        return version or ""

    def put_mode(self, condition: PutCondition) -> Any:
        """Return ``create``, or the required generation."""
        if isinstance(condition, IfAbsent):
            return "create"
        return {"e_tag": "", "version": condition.tag}

    def condition_headers(self, condition: PutCondition) -> Mapping[str, str]:
        """Return the headers of a condition. Generation 0 means that the object must not exist.

        See https://cloud.google.com/storage/docs/request-preconditions.
        """
        return {"x-goog-if-generation-match": "0" if isinstance(condition, IfAbsent) else condition.tag}

    def remedy(self, failure: Failure) -> str:
        """Return advice for a failure."""
        if failure.kind is FailureKind.PERMISSION and (permission := _PERMISSION.search(failure.message)):
            return f"Give the account {permission[1]} on the bucket, or use another account"
        if failure.kind in (FailureKind.OTHER, FailureKind.REGION):
            return f"Check the endpoint {self.settings.endpoint} and its response"
        return super().remedy(failure)
