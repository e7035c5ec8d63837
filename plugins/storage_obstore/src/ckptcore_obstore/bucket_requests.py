"""Requests to one bucket, which share connections, a retry policy and a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptcore.errors import CheckpointError
from ckptcore.redaction import chainable
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed, failure_of_text
from ckptcore_obstore.limits import AdaptiveLimit
from ckptcore_obstore.plain_requests import PlainRequests
from ckptcore_obstore.retrying import try_request
from ckptcore_obstore.services import Service

__all__ = ["PUT_ID_KEY", "BucketRequests", "ObjectState"]

T = TypeVar("T")

PUT_ID_KEY: Final = "ckptcore-put"
"""Metadata key with the id of the put that wrote an object.

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

    def run(self, request: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
        """Send a request of obstore or HTTP, and retry transient failures; see `try_request`."""
        self.service.prepare()
        policy = self.service.tuning.retries
        try:
            return try_request(lambda: _converting_errors(request), policy, self.limit, check)
        except RequestFailed as error:
            if error.failure.kind is FailureKind.REGION and not error.failure.code:
                # obstore drops the details of a redirection. Any other request gets the same
                # answer, so send one by HTTP.
                try_request(
                    lambda: self.plain.send("GET", query={"list-type": "2", "max-keys": "1"}), policy, self.limit
                )
            raise

    def head(self, key: str) -> ObjectState | None:
        """Return the tag and put id of an object, or None if it does not exist."""
        try:
            headers = self.run(lambda: self.plain.send("HEAD", key)).headers
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


def _converting_errors(request: Callable[[], T]) -> T:
    """Run a request of obstore or HTTP, and convert errors of obstore to `RequestFailed`."""
    from obstore.exceptions import BaseError

    try:
        return request()
    except (RequestFailed, CheckpointError):
        raise
    except (BaseError, FileNotFoundError, PermissionError, OSError) as error:
        failure = failure_of_text(str(error))
        if failure.kind is FailureKind.OTHER and isinstance(error, FileNotFoundError):
            failure = Failure(FailureKind.MISSING, None, "", failure.message)
        raise RequestFailed(failure) from chainable(error)
