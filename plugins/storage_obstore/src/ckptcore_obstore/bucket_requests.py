"""Requests to one bucket, which share connections, a retry policy and a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from ckptcore.errors import CheckpointError
from ckptcore.redaction import chainable
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed, failure_of_text
from ckptcore_obstore.limits import AdaptiveLimit
from ckptcore_obstore.plain_requests import PlainRequests
from ckptcore_obstore.retrying import try_request
from ckptcore_obstore.services import Service

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
        plain: single HTTP requests, to be sent with `run`.
    """

    def __init__(self, service: Service) -> None:
        """Initialise without sending a request."""
        self.service = service
        self.limit = AdaptiveLimit(service.tuning.concurrency, service.url)
        self.plain = PlainRequests(service)
        self._renewals = 0

    def run(self, request: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
        """Send a request of obstore or HTTP, and retry transient failures; see `try_request`.

        If the service refuses the credentials, and there are new ones, or if it wants a digest of each upload, the
        request is sent again.
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
        """Return True if a request that failed may succeed now. `renewals` is their number when it began."""
        if failure.kind is FailureKind.CREDENTIALS and failure.status is not None:
            if self.service.renew(used):
                self.forget_store()
                self._renewals += 1
                return True
            return self._renewals != renewals  # another thread has renewed them, after this one was signed
        if failure.kind is FailureKind.REGION and not failure.code:
            # obstore drops the details of a redirection. Any other request gets the same answer, so send one by HTTP.
            self._try(lambda: self.plain.send("GET", query={"list-type": "2", "max-keys": "1"}), lambda: None)
        return False

    def _try(self, request: Callable[[], T], check: Callable[[], None]) -> T:
        return try_request(lambda: self._converting_errors(request), self.service.tuning.retries, self.limit, check)

    def _converting_errors(self, request: Callable[[], T]) -> T:
        """Run a request of obstore or HTTP, and convert errors of obstore to `RequestFailed`."""
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
                # obstore drops the answer of the proxy. Any other request gets the same, so send one by HTTP.
                self.plain.send("GET", query={"list-type": "2", "max-keys": "1"})
                failure = replace(failure, kind=FailureKind.CONNECTION)  # it has passed
            raise RequestFailed(failure) from chainable(error)

    def forget_store(self) -> None:
        """Drop what has the old credentials."""

    def run_head(self, key: str, request: Callable[[], T]) -> T:
        """Send a HEAD request for an object. A response to it has no body with the reason of a failure, but one to a
        GET request has."""
        try:
            return self.run(request)
        except RequestFailed as error:
            failure = error.failure
            if failure.kind is FailureKind.MISSING or failure.status is None or failure.code:
                raise
        try:
            self.run(lambda: self.plain.send("GET", key, headers={"range": "bytes=0-0"}))
        except RequestFailed as error:
            if error.failure.kind is not FailureKind.RANGE:  # the object is empty
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
        """Return the tag of an object if the put with this id wrote it, else None."""
        there = self.head(key)
        return there.tag if there is not None and there.put_id == put_id else None
