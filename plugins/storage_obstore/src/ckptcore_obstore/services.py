"""The interface between the shared code and one cloud's object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from ckptcore.protocols import PutCondition, StorageAddress
from ckptcore_obstore.failures import Failure, FailureKind, Refusals, RequestFailed
from ckptcore_obstore.retrying import RetryPolicy

if TYPE_CHECKING:
    from obstore.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Tuning of requests.

    Attributes:
        concurrency: maximum number of concurrent requests of this process to a bucket.
        request_bytes: useful size of one read. Ranges are not merged into larger reads.
        part_bytes: size of one part of an upload. Smaller objects are put in one request.
        gap_bytes: largest gap between two ranges that are read by one request.
        timeout_seconds: time without data from the service after which a request is retried.
        connect_timeout_seconds: time to connect, and to send each MiB.
        retries: limits of retries.
        ca_bundle: file of trusted certificates.
    """

    concurrency: int = 16
    request_bytes: int = 8 << 20
    part_bytes: int = 16 << 20
    gap_bytes: int = 1 << 20
    timeout_seconds: float = 60.0
    connect_timeout_seconds: float = 10.0
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    ca_bundle: str | None = None


class Service(Protocol):
    """A bucket of one cloud. Thread-safe. Opening it makes no request."""

    @property
    def url(self) -> str:
        """URL of the bucket for messages, such as ``s3://bucket``."""
        ...

    @property
    def bucket_url(self) -> str:
        """URL of the bucket for requests, without ``/`` at the end.

        Raises:
            RequestFailed: if it cannot be found.
        """
        ...

    @property
    def refusals(self) -> Refusals:
        """The errors that the service documents."""
        ...

    @property
    def ca_bundle(self) -> str | None:
        """File of trusted certificates; None for those of the system."""
        ...

    @property
    def tuning(self) -> Tuning:
        """Tuning of requests."""
        ...

    @property
    def metadata_prefix(self) -> str:
        """Prefix of metadata headers, such as ``x-amz-meta-``."""
        ...

    @property
    def upload_headers(self) -> Mapping[str, str]:
        """Headers of requests that put an object or begin an upload, such as encryption or a storage class."""
        ...

    def open_store(self) -> ObjectStore:
        """Return the bucket as an obstore store, without a request and without obstore's retries."""
        ...

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return all headers of a request, with its authorization. The body is not signed.

        Args:
            method: in upper case.
            url: full URL, escaped, with the query sorted by name.
            headers: other headers of the request, by lower-case names.

        Raises:
            RequestFailed: if there are no credentials.
        """
        ...

    def prepare(self) -> object:
        """Get the credentials before each try of a request, because obstore reports their errors without details.

        Returns:
            The credentials, for `renew`.

        Raises:
            RequestFailed: if there are no credentials.
        """
        ...

    def renew(self, used: object) -> bool:
        """Look for other credentials, after the service refused the `used` ones. Return True if there are.

        Raises:
            RequestFailed: if there are no credentials.
        """
        ...

    def address(self, directory: str) -> StorageAddress:
        """Return the address of a directory for native I/O. `directory` ends in ``/`` or is empty."""
        ...

    def tag(self, e_tag: str | None, version: str | None) -> str:
        """Return the tag of an object for conditional puts, from the ETag and the version in a response."""
        ...

    def put_mode(self, condition: PutCondition) -> Any:
        """Return a condition in the form of `obstore.put`."""
        ...

    def condition_headers(self, condition: PutCondition) -> Mapping[str, str]:
        """Return a condition as headers."""
        ...

    def remedy(self, failure: Failure) -> str:
        """Return advice for a failure, as a sentence without the full stop."""
        ...


def client_options(service: Service) -> dict[str, Any]:
    """Return obstore's options of connections to a service.

    Raises:
        RequestFailed: if the file of trusted certificates cannot be read.
    """
    tuning = service.tuning
    options: dict[str, Any] = {
        "allow_http": service.bucket_url.startswith("http://"),
        "connect_timeout": timedelta(seconds=tuning.connect_timeout_seconds),
        "read_timeout": timedelta(seconds=tuning.timeout_seconds),
        "timeout": timedelta(seconds=tuning.retries.deadline_seconds),
    }
    if service.ca_bundle:
        options["root_certificate"] = read_certificates(service.ca_bundle)
    return options


def read_certificates(path: str) -> bytes:
    """Return the file of trusted certificates.

    Raises:
        RequestFailed: if it cannot be read or has no certificate.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        message = f"cannot read the certificates in {path!r}: {error.strerror}"
        raise RequestFailed(Failure(FailureKind.SETTINGS, None, "", message)) from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        message = f"{path!r} has no certificate in PEM format"
        raise RequestFailed(Failure(FailureKind.SETTINGS, None, "", message))
    return content
