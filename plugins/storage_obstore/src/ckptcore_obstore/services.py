"""Services: what the shared code has to be told of a cloud's object store."""

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
    """How requests are made.

    Attributes:
        concurrency: requests that are worth having under way at once.
        request_bytes: what one read should ask for.
        part_bytes: what one part of an upload carries; an object up to this size is put by one request.
        gap_bytes: what lies between two ranges that are read by one request is read in vain; up to so many bytes.
        timeout_seconds: without a byte from the service, after which a request is given up and tried again.
        connect_timeout_seconds: for a connection, and for the service to take each MiB.
        retries: when requests are tried again.
        ca_bundle: a file of certificates to trust.
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
    """A bucket of a cloud's object store. Any thread; opening one makes no request."""

    @property
    def url(self) -> str:
        """The bucket as users name it, such as ``s3://bucket``."""
        ...

    @property
    def bucket_url(self) -> str:
        """Where HTTP finds the bucket, without ``/`` at the end."""
        ...

    @property
    def tuning(self) -> Tuning:
        """How requests are made."""
        ...

    @property
    def metadata_prefix(self) -> str:
        """What the header of an object's own metadata begins with, such as ``x-amz-meta-``."""
        ...

    @property
    def upload_headers(self) -> Mapping[str, str]:
        """Headers of a request that begins an upload in parts: encryption, a storage class."""
        ...

    def open_store(self) -> ObjectStore:
        """The bucket as obstore knows it, made without a request and without retries of its own."""
        ...

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """All headers to send with a request, those that show who asks included; the body is not signed.

        Args:
            method: in capitals.
            url: whole, with escapes, its query sorted by name.
            headers: of the request, by names in small letters.

        Raises:
            StorageCredentialsError: if there are none.
        """
        ...

    def prepare(self) -> None:
        """See that requests can be signed: what is wrong with credentials obstore could only report in words of its own.

        Raises:
            StorageCredentialsError: if there are none.
        """
        ...

    def address(self, directory: str) -> StorageAddress:
        """Where native I/O finds a directory; the key ends in ``/`` or is empty."""
        ...

    def tag(self, e_tag: str | None, version: str | None) -> str:
        """The tag of an object that a condition can name."""
        ...

    def put_mode(self, condition: PutCondition) -> Any:
        """A condition as `obstore.put` takes it."""
        ...

    def condition_headers(self, condition: PutCondition) -> Mapping[str, str]:
        """A condition as headers of a request."""
        ...

    def remedy(self, failure: Failure) -> str:
        """What to do about a failure, as the end of a sentence."""
        ...
