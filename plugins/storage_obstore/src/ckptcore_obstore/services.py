"""The interface between the shared code and one cloud's object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ckptcore.protocols import PutCondition, StorageAddress
from ckptcore_obstore.failures import Failure
from ckptcore_obstore.retrying import RetryPolicy

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Service", "Tuning"]


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
        """URL of the bucket for requests, without ``/`` at the end."""
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
            StorageCredentialsError or RequestFailed: if there are no valid credentials.
        """
        ...

    def prepare(self) -> None:
        """Check the credentials before a request, because obstore reports their errors without details.

        Raises:
            StorageCredentialsError or RequestFailed: if there are no valid credentials.
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
