"""HTTP requests that obstore lacks: uploads in parts, lists of uploads, and keys it rejects."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from ckptcore.protocols import Buffer
from ckptcore.redaction import chainable, redacted, redacted_location
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed, failure_of_response, is_unknown_host
from ckptcore_obstore.forks import reset_in_children
from ckptcore_obstore.services import Service, read_certificates

if TYPE_CHECKING:
    import urllib3

_TUNNEL: Final = re.compile(r"Tunnel connection failed: (\d{3}) ?([^'\")]*)")
"""The message of `http.client` if a proxy refuses to connect to a host."""

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
        has_digests: True to send a digest of each uploaded body. Buckets with Object Lock require it. Other services
            need none: TLS protects the transfer, and every load verifies checksums.
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
            body: contiguous bytes; not copied.

        Raises:
            RequestFailed: also for a response with an error status.
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

        See `send`. The URL must be escaped and have no query.
        """
        import urllib3

        if query:
            pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items())
            url += "?" + "&".join([f"{name}={value}" for name, value in pairs])
        given = dict(headers or {})
        if self.has_digests and method == "PUT":
            given["content-md5"] = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        sent = dict(self._service.sign(method, url, given))
        if body or method in ("PUT", "POST"):
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
    import urllib.request  # slow, and only the first request needs it

    host = urlsplit(url)
    proxy = urllib.request.getproxies().get(host.scheme)
    return proxy if proxy and not urllib.request.proxy_bypass(host.hostname or "") else None


def _redact(record: logging.LogRecord) -> bool:
    """Redact a record of urllib3, which logs URLs with their queries if its level is DEBUG. Always return True."""
    if isinstance(record.args, tuple):
        record.args = tuple([redacted(one) if isinstance(one, str) else one for one in record.args])
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
