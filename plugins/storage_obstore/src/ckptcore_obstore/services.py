"""Services: the properties of one cloud's object store that the shared code needs, and its credentials."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from ckptcore.protocols import IfAbsent, PutCondition, StorageAddress
from ckptcore_obstore.failures import Failure, FailureKind, Refusals, RequestFailed
from ckptcore_obstore.forks import reset_in_children
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
        timeout_seconds: a request is retried if the service sends no data for this time.
        connect_timeout_seconds: maximum time to connect, and to send each MiB.
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


C = TypeVar("C")


class CredentialSource(ABC, Generic[C]):
    """A source of credentials. Thread-safe."""

    @abstractmethod
    def get(self) -> C:
        """Return valid credentials. May send requests, but not to the service.

        Raises:
            RequestFailed: with the kind CREDENTIALS if there are no credentials, CLOCK if the clock
                of this machine is wrong, or CONNECTION if the token service does not answer. Only
                the last failure may be transient.
        """

    def renew(self, used: object) -> bool:
        """Get new credentials after the service refused the `used` ones. Return True if they differ."""
        return False


@dataclass(frozen=True, slots=True)
class FixedCredentials(CredentialSource[C]):
    """Credentials that never change."""

    credentials: C = field(repr=False)

    def get(self) -> C:
        """Return the credentials."""
        return self.credentials


class LibraryCredentials(CredentialSource[C]):
    """Credentials that the cloud's own library finds and refreshes.

    Attributes:
        library: the library's object with the credentials; None before they are found.
        last: the credentials returned last.
    """

    def __init__(self) -> None:
        """Initialise without I/O, and without importing the library."""
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Discard the credentials. Called in a forked child, because the parent may hold the lock."""
        self._lock = threading.Lock()
        self.library: Any = None
        self.last: C | None = None

    def get(self) -> C:
        """See `CredentialSource`."""
        with self._lock:
            return self.find()

    def renew(self, used: object) -> bool:
        """Get new credentials, unless another thread has renewed them since `used`. See `CredentialSource`."""
        with self._lock:
            if self.last is None or self.last == used:
                self.library = self.last = None  # the environment, the files or the login may have changed
            return self.find() != used

    @abstractmethod
    def find(self) -> C:
        """Return valid credentials, and store them in `last`. The caller holds the lock."""


class Service(ABC):
    """A bucket of one cloud. Thread-safe. Opening it makes no request.

    Attributes:
        metadata_prefix: prefix of metadata headers, such as ``x-amz-meta-``.
        refusals: the errors that the service documents, by code.
        remedies: advice by kind of failure, as sentences without the full stop.
        upload_headers: headers of requests that put an object or begin an upload, such as encryption.
        url: URL of the bucket for messages, such as ``s3://bucket``.
        tuning: tuning of requests.
        credentials: source of the credentials.
    """

    metadata_prefix: ClassVar[str]
    remedies: ClassVar[Mapping[FailureKind, str]]
    refusals: Refusals
    upload_headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, url: str, tuning: Tuning, credentials: CredentialSource[Any]) -> None:
        """Initialise without sending a request or loading credentials."""
        self.url: Final = url
        self.tuning: Final = tuning
        self.credentials: Final = credentials

    @property
    @abstractmethod
    def bucket_url(self) -> str:
        """URL of the bucket for requests, without ``/`` at the end.

        Raises:
            RequestFailed: if the URL cannot be determined.
        """

    @property
    def ca_bundle(self) -> str | None:
        """File of trusted certificates; None for the certificates of the system."""
        return self.tuning.ca_bundle

    @abstractmethod
    def open_store(self) -> ObjectStore:
        """Return the bucket as an obstore store, without a request and without obstore's retries.

        The environment does not affect it.
        """

    @abstractmethod
    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return all headers of a request, with its authorization. The body is not signed.

        Args:
            method: in upper case.
            url: full URL, escaped, with the query sorted by name.
            headers: other headers of the request, by lower-case names.

        Raises:
            RequestFailed: if there are no credentials.
        """

    def prepare(self) -> object:
        """Get the credentials. Called before each try, because obstore reports errors of credentials without details.

        Returns:
            The credentials, for `renew`.

        Raises:
            RequestFailed: if there are no credentials.
        """
        return self.credentials.get()

    def renew(self, used: object) -> bool:
        """Get new credentials after the service refused the `used` ones. Return True if they differ.

        Raises:
            RequestFailed: if there are no credentials.
        """
        return self.credentials.renew(used)

    @abstractmethod
    def address(self, directory: str) -> StorageAddress:
        """Return the address of a directory for native I/O, without secrets. `directory` ends in ``/`` or is empty."""

    def tag(self, e_tag: str | None, version: str | None) -> str:
        """Return the tag of an object for conditional puts, from the ETag and the version in a response."""
        return e_tag or ""

    def put_mode(self, condition: PutCondition) -> Any:
        """Return a condition as the argument `mode` of `obstore.put`."""
        return "create" if isinstance(condition, IfAbsent) else {"e_tag": condition.tag}

    def condition_headers(self, condition: PutCondition) -> Mapping[str, str]:
        """Return a condition as headers.

        See https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html and
        https://learn.microsoft.com/rest/api/storageservices/specifying-conditional-headers-for-blob-service-operations.
        """
        return {"if-none-match": "*"} if isinstance(condition, IfAbsent) else {"if-match": condition.tag}

    def remedy(self, failure: Failure) -> str:
        """Return advice for a failure, as a sentence without the full stop."""
        return self.remedies.get(failure.kind) or _REMEDIES.get(failure.kind, "Try again")


_REMEDIES: Final = {
    FailureKind.MISSING: "Check the path",
    FailureKind.CONDITION: "Another process changed it",
    FailureKind.FULL: "Delete data, or raise the quota",
    FailureKind.SERVER: "Try again later",
    FailureKind.TIMEOUT: "Check the network and the endpoint, or raise the option 'timeout'",
}
"""Advice for kinds of failure that `Service.remedies` does not list."""


def client_options(service: Service) -> dict[str, Any]:
    """Return the options of obstore for connections to a service.

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
    """Return the content of a file of trusted certificates.

    Raises:
        RequestFailed: if the file cannot be read or has no certificate.
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
