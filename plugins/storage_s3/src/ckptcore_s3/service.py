"""Buckets of S3: their URLs, their service, and request signatures."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from ckptcore_obstore.bucket_requests import converted_errors
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import Failure, FailureKind
from ckptcore_obstore.forks import reset_in_children
from ckptcore_obstore.services import FixedCredentials, Service, client_options
from ckptcore_obstore.storage import ObjectStoreDirectory, OpenBuckets

from ckptcore.errors import InvalidLocationError
from ckptcore.model import JSON
from ckptcore.protocols import StorageAddress, StorageOptions
from ckptcore.redaction import redacted_location
from ckptcore_s3.credentials import ChainCredentials, Credentials, environment_credentials
from ckptcore_s3.refusals import REFUSALS
from ckptcore_s3.sessions import Place, find_place
from ckptcore_s3.settings import Settings, settings_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def signed_headers(
    method: str,
    url: str,
    headers: Mapping[str, str],
    credentials: Credentials,
    region: str,
    *,
    now: datetime | None = None,
) -> dict[str, str]:
    """Return the headers of a request, with a signature (AWS Signature Version 4). The body is not signed.

    See https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.

    Args:
        method: in upper case.
        url: full URL, escaped, with the query sorted by name.
        headers: headers to sign, by lower-case names.
        credentials: credentials to sign with.
        region: region of the bucket.
        now: time of the signature; None for the current time.
    """
    at = now or datetime.now(UTC)
    parts = urlsplit(url)
    signed = {
        **headers,
        "host": parts.netloc,
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "x-amz-date": at.strftime("%Y%m%dT%H%M%SZ"),
    }
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(signed))
    # The service replaces runs of spaces in a header value by one space before it checks the
    # signature. Do the same here.
    canonical = "\n".join(
        [
            method,
            parts.path or "/",
            parts.query,
            *[f"{name}:{' '.join(signed[name].split())}" for name in sorted(signed)],
            "",
            names,
            "UNSIGNED-PAYLOAD",
        ]
    )
    day = at.strftime("%Y%m%d")
    scope = f"{day}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", signed["x-amz-date"], scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret_access_key}".encode()
    for step in (day, region, "s3", "aws4_request"):
        key = _hmac(key, step)
    signature = _hmac(key, text).hex()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


_ACTION: Final = re.compile(r"not authorized to perform: (\w+:\w+)")
"""Finds the action in the message of AccessDenied for requests in the same account."""

_USER_AGENT: Final = "ckptcore botocore"
"""User agent of requests.

The gateway of Hugging Face redirects reads of most clients to other servers, which may return other
entity tags than the gateway. It does not redirect clients that name botocore. We name it because
botocore finds our endpoint and credentials.
"""

_REMEDIES: Final = {
    FailureKind.NO_BUCKET: "Check the name of the bucket and the endpoint, or create it",
    FailureKind.CREDENTIALS: "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile, or sign in again",
    FailureKind.SETTINGS: "Check ~/.aws/config, ~/.aws/credentials, the environment variables AWS_..., and the option "
    "'profile'",
    FailureKind.PERMISSION: "Allow it in the policies of the user or role and of the bucket: "
    "s3:GetObject, s3:PutObject, s3:DeleteObject, "
    "s3:ListBucket, s3:AbortMultipartUpload, s3:ListBucketMultipartUploads",
    FailureKind.CLOCK: "Set the clock of this machine (NTP)",
    FailureKind.THROTTLED: "Use fewer processes or a lower 'concurrency', or spread the names over more prefixes",
    FailureKind.CONNECTION: "Check the network, the endpoint and the option 'region'; plain HTTP needs http:// in the "
    "endpoint",
    FailureKind.RETAINED: "Wait until it ends, or use a bucket without retention for checkpoints",
    FailureKind.ARCHIVED: "Restore it, or load another checkpoint",
    FailureKind.KEY: "Check the key in KMS",
    FailureKind.DIGEST: "Use another service or location",
    FailureKind.UNSUPPORTED: "Use another service or location",
}


class S3Service(Service):
    """A bucket. Thread-safe."""

    metadata_prefix = "x-amz-meta-"
    refusals = REFUSALS
    remedies = _REMEDIES

    def __init__(self, settings: Settings) -> None:
        """Initialise without sending a request, loading credentials or importing botocore."""
        source = FixedCredentials(settings.credentials) if settings.credentials else ChainCredentials(settings.profile)
        super().__init__(f"s3://{settings.bucket}", settings.tuning, source)
        self._settings = settings
        encryption = {
            "x-amz-server-side-encryption": settings.sse,
            "x-amz-server-side-encryption-aws-kms-key-id": settings.sse_kms_key_id,
        }
        self.upload_headers = {name: value for name, value in encryption.items() if value}
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget the place of the bucket. A forked child calls this, because the parent may hold the lock."""
        self._lock = threading.Lock()
        self._place: Place | None = None

    def place(self) -> Place:
        """Return the place of the bucket. It is determined for the first request.

        Raises:
            RequestFailed: with the kind SETTINGS, if the settings are invalid.
        """
        with self._lock:
            if self._place is None:
                self._place = find_place(self._settings)
            return self._place

    @property
    def bucket_url(self) -> str:
        """URL of the bucket, for requests."""
        return self.place().bucket_url

    @property
    def ca_bundle(self) -> str | None:
        """File of trusted certificates."""
        return self.place().ca_bundle

    def open_store(self) -> ObjectStore:
        """Return the bucket as an obstore store. The environment does not affect it."""
        from obstore.store import S3Store

        settings, place = self._settings, self.place()
        config: dict[str, Any] = {
            "endpoint": place.bucket_url,
            "aws_endpoint_url_s3": place.bucket_url,  # overrides "endpoint", and the environment may set it
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
        # Use a provider also for given keys. Otherwise obstore adds a session token from the
        # environment.
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
        credentials = self.credentials.get()
        return {
            "access_key_id": credentials.access_key_id,
            "secret_access_key": credentials.secret_access_key,
            "token": credentials.token or None,
            "expires_at": None
            if isinstance(self.credentials, FixedCredentials)
            else datetime.now(UTC) + timedelta(minutes=1),
        }

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return all headers of a request, with the signature."""
        sent = dict(headers)
        if self._settings.requester_pays:
            sent["x-amz-request-payer"] = "requester"
        if not self._settings.anonymous:
            sent = signed_headers(method, url, sent, self.credentials.get(), self.place().region)
        sent["user-agent"] = _USER_AGENT  # not signed: proxies may change it
        return sent

    def prepare(self) -> object:
        """Return the credentials, or None for unsigned requests. See `Service.prepare`."""
        self.place()
        return None if self._settings.anonymous else self.credentials.get()

    def renew(self, used: object) -> bool:
        """Get new credentials after the service refused the used ones. Return True if they differ."""
        return not self._settings.anonymous and self.credentials.renew(used)

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
            # An address contains no secrets, so native I/O cannot use credentials that only the
            # Context has.
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
        return super().remedy(failure)


def _standard_endpoints(region: str) -> tuple[str, ...]:
    """Return the endpoints that any AWS client uses for a region if nothing else is configured."""
    return "https://s3.amazonaws.com", f"https://s3.{region}.amazonaws.com", f"https://s3.{region}.amazonaws.com.cn"


_SCHEME: Final = "s3://"
_DIRECTORY_BUCKET: Final = "--x-s3"
"""End of the name of a directory bucket.

See https://docs.aws.amazon.com/AmazonS3/latest/userguide/directory-bucket-naming-rules.html.
"""


class S3Buckets:
    """Cache of the buckets that this process used last, by settings. Thread-safe."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._buckets = OpenBuckets[Settings, Bucket]()

    def open(self, url: str, options: StorageOptions) -> ObjectStoreDirectory:
        """Open ``s3://BUCKET`` or ``s3://BUCKET/DIRECTORY``. Creates nothing and makes no request.

        Raises:
            InvalidLocationError: for an invalid URL or endpoint.
            ValueError: for invalid options; see `settings_of`.
        """
        if url[: len(_SCHEME)].lower() != _SCHEME:
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: expected a URL such as s3://bucket/directory"
            )
        name, _, directory = url[len(_SCHEME) :].partition("/")
        if not name or not name.isascii() or not all(char.isalnum() or char in ".-_" for char in name):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: invalid bucket name; expected a URL such as s3://bucket/directory"
            )
        if name.endswith(_DIRECTORY_BUCKET):
            raise InvalidLocationError(
                f"cannot open {redacted_location(url)!r}: it is in a directory bucket (S3 Express One Zone), which "
                "needs sessions that ckptcore does not make; use a general purpose bucket"
            )
        settings = settings_of(name, options.config)
        bucket = self._buckets.get(settings, lambda: Bucket(S3Service(settings)))
        return ObjectStoreDirectory(bucket, directory.rstrip("/"))
