"""The service: a bucket of Google Cloud Storage, as the shared code asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from ckptcore_obstore.failures import Failure, FailureKind
from ckptcore_obstore.services import Tuning

from ckptcore.protocols import IfAbsent, PutCondition, StorageAddress
from ckptcore_gcs.credentials import DefaultTokens, GivenToken, TokenSource
from ckptcore_gcs.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["GcsService"]

_REMEDIES: Final = {
    FailureKind.MISSING: "Check the path",
    FailureKind.NO_BUCKET: "Check the name of the bucket, or create it",
    FailureKind.CONDITION: "Someone changed it meanwhile",
    FailureKind.CREDENTIALS: "Check GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`; for a public "
    "bucket set Context(storage={'gs': {'anonymous': True}})",
    FailureKind.PERMISSION: "Give the account the role Storage Object User on the bucket (storage.objects.* and "
    "storage.multipartUploads.*)",
    FailureKind.CLOCK: "Set the clock of this machine (NTP)",
    FailureKind.FULL: "Delete something, or raise the quota",
    FailureKind.THROTTLED: "Use fewer processes or a lower 'concurrency', or spread the names over more prefixes; one object "
    "can be replaced about once a second",
    FailureKind.SERVER: "Try again later",
    FailureKind.TIMEOUT: "Look at the network and the endpoint, or raise the option 'timeout'",
    FailureKind.CONNECTION: "Look at the network and the endpoint; http:// must be written out in the endpoint",
    FailureKind.UNSUPPORTED: "Set the option 'uploads' to 'composite' for a service without uploads in parts of the XML API, or "
    "use another location",
}


class GcsService:
    """A bucket. Any thread."""

    metadata_prefix: Final = "x-goog-meta-"

    upload_headers: Final[Mapping[str, str]] = {}

    def __init__(self, settings: Settings) -> None:
        """Make no request and look for no credentials."""
        self._settings = settings
        self._source: TokenSource
        if settings.anonymous:
            self._source = GivenToken("")
        elif settings.access_token is not None:
            self._source = GivenToken(settings.access_token)
        else:
            self._source = DefaultTokens(settings.credentials_file)

    @property
    def settings(self) -> Settings:
        """What it was made of."""
        return self._settings

    @property
    def url(self) -> str:
        """The bucket as users name it."""
        return f"gs://{self._settings.bucket}"

    @property
    def bucket_url(self) -> str:
        """Where the XML API has the bucket."""
        return f"{self._settings.endpoint}/{self._settings.bucket}"

    @property
    def tuning(self) -> Tuning:
        """How requests are made."""
        return self._settings.tuning

    def open_store(self) -> ObjectStore:
        """The bucket as obstore knows it; nothing of it is left to the environment."""
        from obstore.store import GCSStore

        settings, tuning = self._settings, self.tuning
        client: dict[str, Any] = {
            "allow_http": settings.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=tuning.connect_timeout_seconds),
            "read_timeout": timedelta(seconds=tuning.timeout_seconds),
            "timeout": timedelta(seconds=tuning.retries.deadline_seconds),
        }
        if settings.user_project:
            client["default_headers"] = {"x-goog-user-project": settings.user_project}
        if tuning.ca_bundle:
            with open(tuning.ca_bundle, "rb") as file:
                client["root_certificate"] = file.read()
        # With a key of its own obstore looks for none in the environment, where it might be of a kind that it cannot read.
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
            credential_provider=None if settings.anonymous else self._for_obstore,  # type: ignore[arg-type]
        )

    def _for_obstore(self) -> dict[str, Any]:
        """A token as obstore asks for it; it asks again when that has expired."""
        token = self._source.get()
        return {"token": token.text, "expires_at": token.expires}

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """All headers to send with a request."""
        sent = dict(headers)
        token = self._source.get().text
        if token:
            sent["authorization"] = f"Bearer {token}"
        if self._settings.user_project:
            sent["x-goog-user-project"] = self._settings.user_project
        return sent

    def prepare(self) -> None:
        """See that there is a token: what goes wrong with it obstore could only report in words of its own."""
        self._source.get()

    def address(self, directory: str) -> StorageAddress:
        """Where tensorstore and others find a directory; without secrets."""
        settings = self._settings
        kind = "anonymous" if settings.anonymous else "token" if settings.access_token else "default"
        options: dict[str, Any] = {"endpoint": settings.endpoint, "credentials": kind}
        if settings.credentials_file:
            options |= {"credentials": "file", "credentials_file": settings.credentials_file}
        if settings.user_project:
            options["user_project"] = settings.user_project
        return StorageAddress(f"gs://{settings.bucket}/{quote(directory)}", options)

    def tag(self, e_tag: str | None, version: str | None) -> str:
        """The generation: no two objects of one name ever have the same."""
        return version or ""

    def put_mode(self, condition: PutCondition) -> Any:
        """``create``, or the generation that must be there."""
        if isinstance(condition, IfAbsent):
            return "create"
        return {"e_tag": "", "version": condition.tag}

    def condition_headers(self, condition: PutCondition) -> Mapping[str, str]:
        """https://cloud.google.com/storage/docs/request-preconditions; generation 0 is that of no object."""
        return {"x-goog-if-generation-match": "0" if isinstance(condition, IfAbsent) else condition.tag}

    def remedy(self, failure: Failure) -> str:
        """What to do about a failure."""
        if failure.code == "UserProjectMissing":
            return "Set the option 'user_project' to the project that pays: the bucket's owner does not"
        if failure.kind in (FailureKind.OTHER, FailureKind.REGION):
            return f"Look at the endpoint {self._settings.endpoint} and at what it says"
        return _REMEDIES.get(failure.kind, "Try again")
