"""Buckets: the requests of this process to one bucket, with what they share: connections, retries, the limit."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ckptcore.errors import CheckpointError
from ckptcore.protocols import IfTag, PutCondition
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed, failure_of_text
from ckptcore_obstore.limits import AdaptiveLimit
from ckptcore_obstore.plain_requests import PlainRequests
from ckptcore_obstore.retrying import try_request
from ckptcore_obstore.services import Service
from ckptcore_obstore.uploads import MARK, PartUpload, Upload, list_uploads

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Bucket", "Found"]

T = TypeVar("T")

_DELETED_AT_ONCE: Final = 1000
"""Keys that one request deletes: https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html"""


class Found:
    """An object, or a part of one, as it was read.

    Attributes:
        data: the bytes.
        tag: what a condition can name.
        mark: of the put that wrote it; empty where it has none.
    """

    __slots__ = ("data", "mark", "tag")

    def __init__(self, data: memoryview, tag: str, mark: str) -> None:
        self.data = data
        self.tag = tag
        self.mark = mark


class Bucket:
    """The objects of a bucket by their whole keys. Any thread; after a fork each process has its own connections.

    Every method raises `RequestFailed` once it has tried as often as the service's tuning says.
    """

    def __init__(self, service: Service) -> None:
        """Make no request."""
        self.service = service
        self.limit = AdaptiveLimit(service.tuning.concurrency, service.url)
        self.plain = PlainRequests(service)
        self._lock = threading.Lock()
        self._store: tuple[int, ObjectStore] | None = None

    def run(self, request: Callable[[], T]) -> T:
        """Send a request by obstore or HTTP, again where its failure may pass."""
        return try_request(lambda: _translated(request), self.service.tuning.retries, self.limit)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Found:
        """Bytes `start` to `stop` of an object, of which at least one is there."""
        if not _obstore_names(key):
            return self.run(lambda: self._read_plain(key, start, stop))
        return self.run(lambda: self._read(key, start, stop))

    def _read(self, key: str, start: int, stop: int | None) -> Found:
        import obstore

        options: Any = {}
        if stop is not None:
            options = {"range": (start, stop)}
        elif start:
            options = {"range": {"offset": start}}
        result = obstore.get(self._obstore(), key, options=options)
        meta = result.meta
        data = memoryview(result.bytes())
        attributes: Any = result.attributes
        return Found(data, self.service.tag(meta["e_tag"], meta["version"]), str(attributes.get(MARK, "")))

    def _read_plain(self, key: str, start: int, stop: int | None) -> Found:
        headers = {}
        if start or stop is not None:
            headers["range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        answer = self.plain.send("GET", key, headers=headers)
        tag = self.service.tag(answer.headers.get("etag"), answer.headers.get("x-goog-generation"))
        return Found(memoryview(answer.body), tag, answer.headers.get(self.service.metadata_prefix + MARK, ""))

    def size(self, key: str) -> int:
        """Bytes of an object."""
        return self.run(lambda: self._size(key))

    def _size(self, key: str) -> int:
        if not _obstore_names(key):
            return int(self.plain.send("HEAD", key).headers["content-length"])
        import obstore

        return obstore.head(self._obstore(), key)["size"]

    def put(self, key: str, data: bytes | memoryview, condition: PutCondition | None) -> str:
        """Put an object by one request; its new tag."""
        mark = uuid.uuid4().hex
        tries = 0

        def request() -> str:
            nonlocal tries
            tries += 1
            return self._put(key, data, condition, mark)

        try:
            return self.run(request)
        except RequestFailed as error:
            gone = isinstance(condition, IfTag) and error.failure.kind is FailureKind.MISSING  # S3 answers 404 then
            if gone:
                error.failure = replace(error.failure, kind=FailureKind.CONDITION)
            if condition is None or error.failure.kind is not FailureKind.CONDITION:
                raise
            # An earlier try, or one that the network sent twice, may have put it though its answer was lost.
            own = self.mine(key, mark)
            if own is None:
                raise
            return own

    def _put(self, key: str, data: bytes | memoryview, condition: PutCondition | None, mark: str) -> str:
        service = self.service
        if not _obstore_names(key):
            headers = {} if condition is None else dict(service.condition_headers(condition))
            headers |= service.upload_headers
            headers[service.metadata_prefix + MARK] = mark
            answer = self.plain.send("PUT", key, headers=headers, body=data)
            return service.tag(answer.headers.get("etag"), answer.headers.get("x-goog-generation"))
        import obstore

        mode: Any = "overwrite" if condition is None else service.put_mode(condition)
        attributes: Any = {MARK: mark}
        result = obstore.put(self._obstore(), key, data, mode=mode, attributes=attributes, use_multipart=False)
        return service.tag(result["e_tag"], result["version"])

    def mine(self, key: str, mark: str) -> str | None:
        """The tag of an object if the put with this mark wrote it, else None."""
        try:
            answer = self.run(lambda: self.plain.send("HEAD", key))
        except RequestFailed as error:
            if error.failure.kind is FailureKind.MISSING:
                return None
            raise
        if answer.headers.get(self.service.metadata_prefix + MARK) != mark:
            return None
        return self.service.tag(answer.headers.get("etag"), answer.headers.get("x-goog-generation"))

    def begin_upload(self, key: str, *, if_absent: bool) -> PartUpload:
        """Begin an object that comes in parts; `if_absent`: what its `complete` will be asked for."""
        return Upload.begin(self, key)

    def abort_uploads(self, prefix: str) -> int:
        """Give up every upload in parts to a key that begins with a prefix, so that its end fails; how many there were."""
        count = 0
        for upload in list(list_uploads(self, prefix)):
            upload.abort()
            count += 1
        return count

    def is_temporary(self, key: str) -> bool:
        """Whether an object is only a piece of one that is being written, which lists leave out."""
        return False

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error."""
        named = [key for key in keys if _obstore_names(key)]
        for start in range(0, len(named), _DELETED_AT_ONCE):
            some = named[start : start + _DELETED_AT_ONCE]
            self.run(lambda some=some: self._delete(some))  # type: ignore[misc]
        for key in keys:
            if not _obstore_names(key):
                self.run(lambda key=key: self.plain.send("DELETE", key))  # type: ignore[misc]

    def _delete(self, keys: list[str]) -> None:
        import obstore

        try:
            obstore.delete(self._obstore(), keys)
        except FileNotFoundError as error:
            if failure_of_text(str(error)).kind is not FailureKind.MISSING:
                raise

    def _obstore(self) -> ObjectStore:
        with self._lock:
            if self._store is None or self._store[0] != os.getpid():
                self._store = os.getpid(), self.service.open_store()
            return self._store[1]


def _obstore_names(key: str) -> bool:
    """Whether object_store takes a key: no part of it has an ASCII control character (`object_store::path::PathPart::parse`)."""
    return key.isprintable() or not any(character < " " or character == "\x7f" for character in key)


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
        raise RequestFailed(failure) from error
