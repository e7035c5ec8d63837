"""Requests to one bucket, sent with obstore or plain HTTP. They share connections, a retry policy and a limit."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from ckptcore.errors import (
    BucketNotFoundError,
    CheckpointError,
    ClockSkewError,
    ConditionFailedError,
    ObjectNotFoundError,
    ObjectUnavailableError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
    WrongRegionError,
    converts_errors,
)
from ckptcore.protocols import Buffer
from ckptcore.redaction import chainable, redacted, redacted_location
from ckptcore_obstore.failures import (
    Failure,
    FailureKind,
    RequestFailed,
    failure_of_response,
    failure_of_text,
    is_unknown_host,
    refusal_of,
)
from ckptcore_obstore.forks import reset_in_children
from ckptcore_obstore.retrying import AdaptiveLimit, try_request
from ckptcore_obstore.services import Service, read_certificates

if TYPE_CHECKING:
    import urllib3


_TUNNEL: Final = re.compile(r"Tunnel connection failed: (\d{3}) ?([^'\")]*)")
"""Matches the message of `http.client` if a proxy refuses to connect to a host."""

_SEND_BYTES: Final = 1 << 20
"""Bytes sent in one step. The connect timeout applies to each step, not to the whole body."""


@dataclass(frozen=True, slots=True)
class Response:
    """A successful response.

    Attributes:
        status: below 300.
        headers: by lower-case names.
        body: the whole body.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


class PlainRequests:
    """Single requests to one bucket, without retries. Thread-safe.

    A forked child opens its own connections.

    Attributes:
        has_digests: True to send a digest of each uploaded body. Buckets with Object Lock require
            digests. Elsewhere they are not needed, because TLS protects the transfer, and every
            load verifies checksums.
    """

    def __init__(self, service: Service) -> None:
        """Initialise without sending a request."""
        self._service = service
        self.has_digests = False
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Drop all connections. A forked child must not write to its parent's connections."""
        self._lock = threading.Lock()
        self._pools: urllib3.PoolManager | None = None

    def send(
        self,
        method: str,
        key: str = "",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Buffer = b"",
    ) -> Response:
        """Send one request, and read the whole response.

        Args:
            method: in upper case.
            key: key of an object; empty for the bucket.
            query, headers: parameters and headers of the request; header names in lower case.
            body: contiguous bytes. They are not copied.

        Raises:
            RequestFailed: if the request fails, or if the response has an error status.
        """
        return self.send_to(
            method, f"{self._service.bucket_url}/{quote(key, safe='/-_.~')}", query=query, headers=headers, body=body
        )

    def send_to(
        self,
        method: str,
        url: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Buffer = b"",
    ) -> Response:
        """Send one request to any URL of the service.

        The URL must be escaped and must not have a query. See `send`.
        """
        import urllib3

        if query:
            pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items())
            url += "?" + "&".join([f"{name}={value}" for name, value in pairs])
        given = dict(headers or {})
        if self.has_digests and method == "PUT":
            given["content-md5"] = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        sent = dict(self._service.sign(method, url, given))
        if body or method in ("PUT", "POST"):  # services answer 411 if the header is missing, even for an empty body
            sent["content-length"] = str(len(body))
        try:
            pieces: Any = _pieces(body) if body else None  # urllib3's annotations lack memoryview
            response = self._connections().request(
                method, url, body=pieces, headers=sent, redirect=False, retries=False
            )
        except urllib3.exceptions.ProxyError as error:
            raise RequestFailed(_proxy_failure(error, proxy_of(url) or "")) from chainable(error)
        except urllib3.exceptions.NewConnectionError as error:  # a subclass of TimeoutError
            kind = FailureKind.HOST if is_unknown_host(str(error)) else FailureKind.CONNECTION
            raise RequestFailed(Failure(kind, None, "", _words(error))) from chainable(error)
        except urllib3.exceptions.TimeoutError as error:
            raise RequestFailed(Failure(FailureKind.TIMEOUT, None, "", _words(error))) from chainable(error)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise RequestFailed(Failure(FailureKind.CONNECTION, None, "", _words(error))) from chainable(error)
        data = response.data
        if response.status >= 300:
            raise RequestFailed(
                failure_of_response(
                    response.status,
                    data,
                    self._service.refusals,
                    response.headers.get("x-amz-bucket-region", ""),
                )
            )
        return Response(response.status, {name.lower(): value for name, value in response.headers.items()}, data)

    def _connections(self) -> urllib3.PoolManager:
        with self._lock:
            if self._pools is None:
                self._pools = self._open()
            return self._pools

    def _open(self) -> urllib3.PoolManager:
        import urllib3

        logging.getLogger("urllib3.connectionpool").addFilter(_redact)
        tuning, bundle = self._service.tuning, self._service.ca_bundle
        if bundle:
            read_certificates(bundle)
        timeout = urllib3.Timeout(connect=tuning.connect_timeout_seconds, read=tuning.timeout_seconds)
        if proxy := proxy_of(self._service.bucket_url):
            return urllib3.ProxyManager(
                proxy, maxsize=tuning.concurrency, timeout=timeout, retries=False, ca_certs=bundle
            )
        return urllib3.PoolManager(maxsize=tuning.concurrency, timeout=timeout, retries=False, ca_certs=bundle)


def _proxy_failure(error: BaseException, proxy: str) -> Failure:
    name, refused = redacted_location(proxy), _TUNNEL.search(str(error))
    if refused is None:
        return Failure(FailureKind.CONNECTION, None, "", f"cannot connect to the proxy {name}: {_words(error)}")
    status, words = int(refused[1]), f"{refused[2].strip()}, from the proxy {name}"
    return Failure(FailureKind.PROXY if status < 500 else FailureKind.CONNECTION, status, "", words)


def proxy_of(url: str) -> str | None:
    """Return the URL of the proxy for requests to a URL, from the environment; None for a direct connection."""
    import urllib.request  # slow import, needed only for the first request

    host = urlsplit(url)
    proxy = urllib.request.getproxies().get(host.scheme)
    return proxy if proxy and not urllib.request.proxy_bypass(host.hostname or "") else None


def _redact(record: logging.LogRecord) -> bool:
    """Redact a record of urllib3, which logs URLs with their queries at level DEBUG. Always return True."""
    if isinstance(record.args, tuple):
        record.args = tuple([redacted(item) if isinstance(item, str) else item for item in record.args])
    return True


def _pieces(body: Buffer) -> Iterator[memoryview]:
    view = memoryview(body)
    for start in range(0, len(view), _SEND_BYTES):
        yield view[start : start + _SEND_BYTES]


def _words(error: BaseException) -> str:
    """Return the message of a connection error, without the repr of urllib3 objects."""
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, BaseException) else error
    text = " ".join(str(cause).split())
    return text.rpartition("): ")[2] or type(cause).__name__


T = TypeVar("T")

PUT_ID_KEY: Final = "ckptcoreput"
"""Metadata key with the id of the put that wrote an object. Azure allows only letters, digits and underscores.

If a response was lost, the id shows whether the put succeeded.
"""


@dataclass(frozen=True, slots=True)
class ObjectState:
    """State of an existing object.

    Attributes:
        tag: tag of the current version, for conditional puts.
        put_id: id of the put that wrote the object; empty if unknown.
    """

    tag: str
    put_id: str


class BucketRequests:
    """Requests of this process to one bucket, with retries. Thread-safe.

    Attributes:
        service: the bucket's service.
        limit: limit of concurrent requests.
        plain: single HTTP requests without retries. Pass them to `run` for retries.
    """

    def __init__(self, service: Service) -> None:
        """Initialise without sending a request."""
        self.service = service
        self.limit = AdaptiveLimit(service.tuning.concurrency, service.url)
        self.plain = PlainRequests(service)
        self._renewals = 0

    def run(self, request: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
        """Send a request with obstore or HTTP, and retry transient failures; see `try_request`.

        The request is sent once more in two cases: if the service refuses the credentials and new
        ones are found, or if it requires a digest of each upload.
        """
        used: object = None
        had_digests, renewals = self.plain.has_digests, self._renewals

        def with_credentials() -> T:
            nonlocal used
            used = self.service.prepare()
            return request()

        try:
            return self._try(with_credentials, check)
        except RequestFailed as error:
            if error.failure.kind is FailureKind.DIGEST and not had_digests:
                self.plain.has_digests = True
            elif not self._mend(error.failure, used, renewals):
                raise
        return self._try(with_credentials, check)

    def _mend(self, failure: Failure, used: object, renewals: int) -> bool:
        """Return True if a failed request may succeed now.

        `renewals` is the number of renewals when the request began.
        """
        if failure.kind is FailureKind.CREDENTIALS and failure.status is not None:
            if self.service.renew(used):
                self.forget_store()
                self._renewals += 1
                return True
            return self._renewals != renewals  # another thread renewed the credentials meanwhile
        if failure.kind is FailureKind.REGION and not failure.code:
            # obstore drops the details of a redirection. Any other request gets the same response,
            # so send one with HTTP to get the details.
            self._try(lambda: self.plain.send("GET", query={"list-type": "2", "max-keys": "1"}), lambda: None)
        return False

    def _try(self, request: Callable[[], T], check: Callable[[], None]) -> T:
        return try_request(lambda: self._converting_errors(request), self.service.tuning.retries, self.limit, check)

    def _converting_errors(self, request: Callable[[], T]) -> T:
        """Run a request with obstore or HTTP, and convert errors of obstore to `RequestFailed`."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except (RequestFailed, CheckpointError):
            raise
        except (BaseError, FileNotFoundError, PermissionError, OSError) as error:
            failure = failure_of_text(str(error), self.service.refusals)
            if failure.kind is FailureKind.OTHER and isinstance(error, FileNotFoundError):
                failure = Failure(FailureKind.MISSING, None, "", failure.message)
            if failure.kind is FailureKind.PROXY:
                # obstore drops the response of the proxy. Any other request gets the same response,
                # so send one with HTTP, which raises an error with the details.
                self.plain.send("GET", query={"list-type": "2", "max-keys": "1"})
                failure = replace(failure, kind=FailureKind.CONNECTION)  # the proxy let this request pass
            raise RequestFailed(failure) from chainable(error)

    def forget_store(self) -> None:
        """Drop objects that hold the old credentials. Subclasses with such objects override this."""

    def run_head(self, key: str, request: Callable[[], T]) -> T:
        """Send a HEAD request for an object.

        If it fails without a reason, send a GET request, whose response has a body with the reason. If
        the GET request succeeds, send the HEAD request again.
        """
        try:
            return self.run(request)
        except RequestFailed as error:
            failure = error.failure
            if failure.kind is FailureKind.MISSING or failure.status is None or failure.code:
                raise
        try:
            self.run(lambda: self.plain.send("GET", key, headers={"range": "bytes=0-0"}))
        except RequestFailed as error:
            if error.failure.kind is not FailureKind.RANGE:  # RANGE means that the object is empty
                raise
        return self.run(request)

    def head(self, key: str) -> ObjectState | None:
        """Return the tag and put id of an object, or None if it does not exist."""
        try:
            headers = self.run_head(key, lambda: self.plain.send("HEAD", key)).headers
        except RequestFailed as error:
            if error.failure.kind is FailureKind.MISSING:
                return None
            raise
        return ObjectState(self._tag(headers), headers.get(self.service.metadata_prefix + PUT_ID_KEY, ""))

    def _tag(self, headers: Mapping[str, str]) -> str:
        return self.service.tag(headers.get("etag"), headers.get("x-goog-generation"))

    def tag_if_put_by(self, key: str, put_id: str) -> str | None:
        """Return the tag of an object if the put with this id wrote it. Otherwise return None."""
        there = self.head(key)
        return there.tag if there is not None and there.put_id == put_id else None


_ERRORS: Final[dict[FailureKind, type[StorageError]]] = {
    FailureKind.MISSING: ObjectNotFoundError,
    FailureKind.NO_BUCKET: BucketNotFoundError,
    FailureKind.CONDITION: ConditionFailedError,
    FailureKind.CREDENTIALS: StorageCredentialsError,
    FailureKind.SETTINGS: StorageCredentialsError,
    FailureKind.PERMISSION: StoragePermissionError,
    FailureKind.RETAINED: StoragePermissionError,
    FailureKind.ARCHIVED: ObjectUnavailableError,
    FailureKind.KEY: ObjectUnavailableError,
    FailureKind.REGION: WrongRegionError,
    FailureKind.CLOCK: ClockSkewError,
    FailureKind.FULL: StorageFullError,
    FailureKind.THROTTLED: StorageThrottledError,
    FailureKind.TIMEOUT: StorageTimeoutError,
}


def error_of(failed: RequestFailed, service: Service, what: str) -> StorageError:
    """Return the error for a failed request.

    Args:
        failed: the failure.
        service: the service that failed.
        what: operation in the infinitive, such as ``read s3://bucket/a``.
    """
    failure = failed.failure
    kind = failure.kind
    tries = f" ({failed.tried.tries} tries in {failed.tried.seconds:.1f} s)" if failed.tried.tries > 1 else ""
    refusal = refusal_of(failure.code, service.refusals)
    cause, remedy = (refusal.cause, refusal.remedy) if refusal is not None else ("", "")
    if kind is FailureKind.PROXY:
        remedy = _proxy_remedy(service)
    if kind is FailureKind.HOST:
        failure = replace(failure, kind=FailureKind.CONNECTION)  # the remedy is the same
    remedy = remedy or service.remedy(failure)
    text = f"cannot {what}: {cause or kind.value}; found {failure.description.removesuffix('.')}{tries}. {remedy}"
    return _ERRORS.get(kind, StorageError)(text)


def _proxy_remedy(service: Service) -> str:
    proxy = proxy_of(service.bucket_url)
    named = "the proxy" if proxy is None else f"the proxy {redacted_location(proxy)}"
    scheme, host = urlsplit(service.bucket_url).scheme.upper(), urlsplit(service.bucket_url).hostname
    return (
        f"Check the user and password for {named} in {scheme}_PROXY, allow it to connect to {host}, or add that host "
        "to NO_PROXY"
    )


@converts_errors
def converted_errors(service: Service, what: str) -> Iterator[None]:
    """Convert a `RequestFailed` of the ``with`` block with `error_of`."""
    try:
        yield
    except RequestFailed as failed:
        raise error_of(failed, service, what) from failed
