"""`S3Service`: implements the `Service` protocol of ckptcore_obstore for one bucket."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from ckptcore_obstore.failures import Failure, FailureKind
from ckptcore_obstore.services import Tuning

from ckptcore.model import JSON
from ckptcore.protocols import IfAbsent, PutCondition, StorageAddress
from ckptcore_s3.credentials import ChainCredentials, CredentialSource, FixedCredentials, environment_credentials
from ckptcore_s3.settings import Settings
from ckptcore_s3.signing import signed_headers

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["S3Service"]

_REMEDIES: Final = {
    FailureKind.MISSING: "Check the path",
    FailureKind.NO_BUCKET: "Check the name of the bucket and the endpoint, or create it",
    FailureKind.CONDITION: "Another process changed it",
    FailureKind.CREDENTIALS: "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile, or sign in again",
    FailureKind.PERMISSION: "Allow it in the policies of the user or role and of the bucket: "
    "s3:GetObject, s3:PutObject, s3:DeleteObject, "
    "s3:ListBucket, s3:AbortMultipartUpload, s3:ListBucketMultipartUploads",
    FailureKind.CLOCK: "Set the clock of this machine (NTP)",
    FailureKind.FULL: "Delete data, or raise the quota",
    FailureKind.THROTTLED: "Use fewer processes or a lower 'concurrency', or spread the names over more prefixes",
    FailureKind.SERVER: "Try again later",
    FailureKind.TIMEOUT: "Check the network and the endpoint, or raise the option 'timeout'",
    FailureKind.CONNECTION: "Check the network, the endpoint and the option 'region'; plain HTTP needs http:// in the "
    "endpoint",
    FailureKind.UNSUPPORTED: "Use another service or location",
}


class S3Service:
    """A bucket. Thread-safe."""

    metadata_prefix: Final = "x-amz-meta-"

    def __init__(self, settings: Settings) -> None:
        """Initialise without sending a request or loading credentials."""
        self._settings = settings
        self._source: CredentialSource = (
            FixedCredentials(settings.credentials) if settings.credentials else ChainCredentials(settings.profile)
        )

    @property
    def url(self) -> str:
        """URL of the bucket, for messages."""
        return f"s3://{self._settings.bucket}"

    @property
    def bucket_url(self) -> str:
        """URL of the bucket, for requests."""
        return self._settings.bucket_url

    @property
    def tuning(self) -> Tuning:
        """Tuning of requests."""
        return self._settings.tuning

    @property
    def upload_headers(self) -> Mapping[str, str]:
        """Headers that request server-side encryption."""
        headers = {}
        if self._settings.sse:
            headers["x-amz-server-side-encryption"] = self._settings.sse
        if self._settings.sse_kms_key_id:
            headers["x-amz-server-side-encryption-aws-kms-key-id"] = self._settings.sse_kms_key_id
        return headers

    def open_store(self) -> ObjectStore:
        """Return the bucket as an obstore store. The environment does not affect it."""
        from obstore.store import S3Store

        settings, tuning = self._settings, self.tuning
        endpoint = settings.bucket_url if settings.virtual else settings.endpoint
        config: dict[str, Any] = {
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,  # overrides "endpoint", and may be set in the environment
            "region": settings.region,
            "virtual_hosted_style_request": settings.virtual,
            "skip_signature": settings.anonymous,
            "unsigned_payload": True,
            "conditional_put": "etag",
            "request_payer": settings.requester_pays,
        }
        if settings.sse:
            config["server_side_encryption"] = settings.sse
        if settings.sse_kms_key_id:
            config["sse_kms_key_id"] = settings.sse_kms_key_id
        client: dict[str, Any] = {
            "allow_http": settings.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=tuning.connect_timeout_seconds),
            "read_timeout": timedelta(seconds=tuning.timeout_seconds),
            "timeout": timedelta(seconds=tuning.retries.deadline_seconds),
        }
        if tuning.ca_bundle:
            with open(tuning.ca_bundle, "rb") as file:
                client["root_certificate"] = file.read()
        # Needed for given keys too: otherwise obstore adds a session token from the environment.
        provider = None if settings.anonymous else self._obstore_token
        return S3Store(
            settings.bucket,
            config=config,  # type: ignore[arg-type]  # obstore's TypedDict cannot be built step by step
            client_options=client,  # type: ignore[arg-type]
            retry_config={"max_retries": 0},
            credential_provider=provider,  # type: ignore[arg-type]
        )

    def _obstore_token(self) -> dict[str, Any]:
        """Return credentials in obstore's form. obstore calls this again after they expire."""
        found = self._source.get()
        return {
            "access_key_id": found.access_key_id,
            "secret_access_key": found.secret_access_key,
            "token": found.token or None,
            "expires_at": None
            if isinstance(self._source, FixedCredentials)
            else datetime.now(UTC) + timedelta(minutes=1),
        }

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return all headers of a request, with the signature."""
        sent = dict(headers)
        if self._settings.requester_pays:
            sent["x-amz-request-payer"] = "requester"
        if self._settings.anonymous:
            return sent
        return signed_headers(method, url, sent, self._source.get(), self._settings.region)

    def prepare(self) -> None:
        """Check that there are credentials."""
        if not self._settings.anonymous:
            self._source.get()

    def address(self, directory: str) -> StorageAddress:
        """Return the address for native I/O, such as tensorstore. It contains no secrets."""
        settings = self._settings
        options: dict[str, JSON] = {"endpoint": settings.endpoint, "region": settings.region}
        if settings.anonymous:
            options["credentials"] = "anonymous"
        elif settings.credentials is not None:
            # An address has no secrets, so native I/O cannot use credentials that only the Context
            # has.
            known = settings.credentials == environment_credentials(os.environ)
            options["credentials"] = "environment" if known else "given"
        elif settings.profile:
            options |= {"credentials": "profile", "profile": settings.profile}
        else:
            options["credentials"] = "default"
        if settings.requester_pays:
            options["requester_pays"] = True
        if settings.tuning.ca_bundle and settings.endpoint.startswith("https://"):
            options["ca_bundle"] = settings.tuning.ca_bundle
        return StorageAddress(f"s3://{settings.bucket}/{quote(directory)}", options)

    def tag(self, e_tag: str | None, version: str | None) -> str:
        """Return the ETag."""
        return e_tag or ""

    def put_mode(self, condition: PutCondition) -> Any:
        """Return ``create``, or the required tag."""
        return "create" if isinstance(condition, IfAbsent) else {"e_tag": condition.tag}

    def condition_headers(self, condition: PutCondition) -> Mapping[str, str]:
        """Return headers of a condition.

        See https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html.
        """
        return {"if-none-match": "*"} if isinstance(condition, IfAbsent) else {"if-match": condition.tag}

    def remedy(self, failure: Failure) -> str:
        """Return advice for a failure."""
        if failure.kind is FailureKind.REGION:
            region = dict(failure.hints).get("Region")
            named = f"'{region}'" if region else "the region of the bucket"
            return f"Set the option 'region' or AWS_REGION to {named}; the request used {self._settings.region!r}"
        if failure.kind is FailureKind.OTHER:
            return f"Check the endpoint {self._settings.endpoint} and its response"
        return _REMEDIES.get(failure.kind, "Try again")
