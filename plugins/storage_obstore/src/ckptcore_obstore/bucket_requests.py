"""Requests to one bucket, with the connections, retries and limit that they share."""

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

__all__ = ["MARK", "BucketRequests", "Seen"]

T = TypeVar("T")

MARK: Final = "ckptcore-put"
"""Metadata of an object: which put wrote it. Tells who asks again after a lost answer that the object is its own."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An object that is there.

    Attributes:
        tag: what a condition can name.
        mark: of the put that wrote it; empty where it has none.
    """

    tag: str
    mark: str


class BucketRequests:
    """Requests of this process to one bucket, tried again where a failure may pass. Any thread.

    Attributes:
        service: where the bucket is.
        limit: of requests under way at a time.
        plain: single requests by HTTP; give them to `run`.
    """

    def __init__(self, service: Service) -> None:
        """Make no request."""
        self.service = service
        self.limit = AdaptiveLimit(service.tuning.concurrency, service.url)
        self.plain = PlainRequests(service)

    def run(self, request: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
        """Send a request by obstore or HTTP, again where its failure may pass; see `try_request`."""
        self.service.prepare()
        policy = self.service.tuning.retries
        try:
            return try_request(lambda: _translated(request), policy, self.limit, check)
        except RequestFailed as error:
            if error.failure.kind is FailureKind.REGION and not error.failure.code:
                # obstore does not tell what came with a redirection; the same answer comes to any request.
                try_request(
                    lambda: self.plain.send("GET", query={"list-type": "2", "max-keys": "1"}), policy, self.limit
                )
            raise

    def look(self, key: str) -> Seen | None:
        """The tag of an object and who put it; None if there is none."""
        try:
            headers = self.run(lambda: self.plain.send("HEAD", key)).headers
        except RequestFailed as error:
            if error.failure.kind is FailureKind.MISSING:
                return None
            raise
        return Seen(self._tag(headers), headers.get(self.service.metadata_prefix + MARK, ""))

    def _tag(self, headers: Mapping[str, str]) -> str:
        return self.service.tag(headers.get("etag"), headers.get("x-goog-generation"))

    def mine(self, key: str, mark: str) -> str | None:
        """The tag of an object if the put with this mark wrote it, else None."""
        there = self.look(key)
        return there.tag if there is not None and there.mark == mark else None


def _translated(request: Callable[[], T]) -> T:
    """Run a request of obstore; its errors become `RequestFailed`."""
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
