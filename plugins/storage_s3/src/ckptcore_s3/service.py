"""`S3Service`: implements the `Service` protocol of ckptcore_obstore for one bucket."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from ckptcore_obstore.failures import Failure, FailureKind
from ckptcore_obstore.forks import reset_in_children
from ckptcore_obstore.services import Tuning, client_options
from ckptcore_obstore.storage_errors import converted_errors

from ckptcore.model import JSON
from ckptcore.protocols import IfAbsent, PutCondition, StorageAddress
from ckptcore_s3.credentials import ChainCredentials, CredentialSource, FixedCredentials, environment_credentials
from ckptcore_s3.refusals import REFUSALS
from ckptcore_s3.sessions import Place, find_place
from ckptcore_s3.settings import Settings
from ckptcore_s3.signing import signed_headers

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_ACTION: Final = re.compile(r"not authorized to perform: (\w+:\w+)")
"""The message of AccessDenied in the same account."""

_USER_AGENT: Final = "ckptcore botocore"
"""The gateway of Hugging Face answers reads of most clients by a redirection to other servers, whose tags need not be
those of the gateway. It sends data itself to clients that name botocore, which finds our endpoint and credentials."""

_REMEDIES: Final = {
    FailureKind.MISSING: "Check the path",
    FailureKind.NO_BUCKET: "Check the name of the bucket and the endpoint, or create it",
    FailureKind.CONDITION: "Another process changed it",
    FailureKind.CREDENTIALS: "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile, or sign in again",
    FailureKind.SETTINGS: "Check ~/.aws/config, ~/.aws/credentials, the environment variables AWS_..., and the option "
    "'profile'",
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
    FailureKind.RETAINED: "Wait until it ends, or use a bucket without retention for checkpoints",
    FailureKind.ARCHIVED: "Restore it, or load another checkpoint",
    FailureKind.KEY: "Check the key in KMS",
    FailureKind.DIGEST: "Use another service or location",
    FailureKind.UNSUPPORTED: "Use another service or location",
}


class S3Service:
    """A bucket. Thread-safe."""

    metadata_prefix: Final = "x-amz-meta-"

    refusals: Final = REFUSALS

    def __init__(self, settings: Settings) -> None:
        """Initialise without sending a request, loading credentials or importing botocore."""
        self._settings = settings
        self._source: CredentialSource = (
            FixedCredentials(settings.credentials) if settings.credentials else ChainCredentials(settings.profile)
        )
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget where the bucket is. Called in a forked child, because the parent may hold the lock."""
        self._lock = threading.Lock()
        self._found: Place | None = None

    def place(self) -> Place:
        """Return where the bucket is, found with the first request.

        Raises:
            RequestFailed: with kind SETTINGS.
        """
        with self._lock:
            if self._found is None:
                self._found = find_place(self._settings)
            return self._found

    @property
    def url(self) -> str:
        """URL of the bucket, for messages."""
        return f"s3://{self._settings.bucket}"

    @property
    def bucket_url(self) -> str:
        """URL of the bucket, for requests."""
        return self.place().bucket_url

    @property
    def ca_bundle(self) -> str | None:
        """File of trusted certificates."""
        return self.place().ca_bundle

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

        settings, place = self._settings, self.place()
        config: dict[str, Any] = {
            "endpoint": place.bucket_url,
            "aws_endpoint_url_s3": place.bucket_url,  # overrides "endpoint", and may be set in the environment
            "region": place.region,
            "virtual_hosted_style_request": True,  # the endpoint is the bucket's, in any style
            "skip_signature": settings.anonymous,
            "unsigned_payload": True,
            "conditional_put": "etag",
            "request_payer": settings.requester_pays,
        }
        if settings.sse:
            config["server_side_encryption"] = settings.sse
        if settings.sse_kms_key_id:
            config["sse_kms_key_id"] = settings.sse_kms_key_id
        # Needed for given keys too: otherwise obstore adds a session token from the environment.
        provider = None if settings.anonymous else self._obstore_token
        return S3Store(
            settings.bucket,
            config=config,  # type: ignore[arg-type]  # obstore's TypedDict cannot be built step by step
            client_options={**client_options(self), "user_agent": _USER_AGENT},  # type: ignore[arg-type]
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
        if not self._settings.anonymous:
            sent = signed_headers(method, url, sent, self._source.get(), self.place().region)
        sent["user-agent"] = _USER_AGENT  # not signed: proxies may change it
        return sent

    def prepare(self) -> object:
        """Return the credentials."""
        self.place()
        return None if self._settings.anonymous else self._source.get()

    def renew(self, used: object) -> bool:
        """Look for other credentials than those that the service refused."""
        return not self._settings.anonymous and self._source.renew(used)

    def address(self, directory: str) -> StorageAddress:
        """Return the address for native I/O, such as tensorstore. It contains no secrets."""
        settings = self._settings
        with converted_errors(self, f"open {self.url}/{directory}"):
            place = self.place()
        options: dict[str, JSON] = {"endpoint": place.endpoint, "region": place.region}
        if place.is_virtual and place.endpoint not in _standard_endpoints(place.region):
            options["addressing_style"] = "virtual"
        environment = environment_credentials(os.environ)
        if settings.anonymous:
            options["credentials"] = "anonymous"
        elif settings.credentials is not None:
            # An address has no secrets, so native I/O cannot use credentials that only the Context has.
            options["credentials"] = "environment" if settings.credentials == environment else "given"
        elif settings.profile:
            options |= {"credentials": "profile", "profile": settings.profile}
        else:
            options["credentials"] = "default" if environment is None else "environment"
        if settings.requester_pays:
            options["requester_pays"] = True
        if place.ca_bundle and place.endpoint.startswith("https://"):
            options["ca_bundle"] = place.ca_bundle
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
            return f"Set the option 'region' or AWS_REGION to {named}; the request used {self.place().region!r}"
        if failure.kind is FailureKind.PERMISSION and (action := _ACTION.search(failure.message)):
            return f"Allow {action[1]} in the policies that the message names, or use another identity"
        if failure.kind is FailureKind.PERMISSION and "object lock" in failure.message.lower():
            return REFUSALS["ObjectLocked"].remedy
        if failure.kind is FailureKind.OTHER:
            return f"Check the endpoint {self.place().endpoint} and its response"
        return _REMEDIES.get(failure.kind, "Try again")


def _standard_endpoints(region: str) -> tuple[str, ...]:
    """Return the endpoints that any AWS client uses for a region if nothing else is configured."""
    return "https://s3.amazonaws.com", f"https://s3.{region}.amazonaws.com", f"https://s3.{region}.amazonaws.com.cn"
