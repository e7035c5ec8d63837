"""Buckets: objects by full key, read and written with obstore or plain HTTP."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ckptcore.events import logger_named
from ckptcore.protocols import IfTag, PutCondition
from ckptcore_obstore.bucket_requests import PUT_ID_KEY, BucketRequests
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed, failure_of_text
from ckptcore_obstore.services import Service
from ckptcore_obstore.uploads import ListPage, PendingUpload, Upload, list_objects, list_uploads, upload_id_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_LOG: Final = logger_named("ckptcore.storage")

_MAX_DELETED_KEYS: Final = 1000
"""Maximum number of keys in one delete request.

See https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html.
"""

_REFUSALS: Final = (FailureKind.PERMISSION, FailureKind.RETAINED, FailureKind.UNSUPPORTED)
"""Kinds of failures of a service that does not allow uploads to be listed, aborted or deleted."""

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-")
"""RFC 9110, section 14.4."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Data read from an object.

    Attributes:
        data: the bytes.
        tag: tag of the version that was read, for conditional puts.
    """

    data: memoryview
    tag: str


class Bucket(BucketRequests):
    """Objects of a bucket by full key. Thread-safe. Use it only in the process that created it.

    Every method retries transient failures and then raises `RequestFailed`.

    Attributes:
        has_temporary: True if uploads have temporary objects; see `CopiedUpload`.
    """

    has_temporary: ClassVar[bool] = False

    def __init__(self, service: Service) -> None:
        """Initialise without sending a request."""
        super().__init__(service)
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None
        self._unquoted_tags = False
        self._warned: set[str] = set()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> ReadResult:
        """Read bytes `start` to `stop` of an object. At least one of these bytes must exist."""
        if not _obstore_accepts(key):
            return self.run(lambda: self._read_plain(key, start, stop))
        return self.run(lambda: self._read(key, start, stop))

    def _read(self, key: str, start: int, stop: int | None) -> ReadResult:
        import obstore

        options: Any = {}
        if stop is not None:
            options = {"range": (start, stop)}
        elif start:
            options = {"range": {"offset": start}}
        result = obstore.get(self._obstore(), key, options=options)
        meta = result.meta
        return ReadResult(memoryview(result.bytes()), self.service.tag(meta["e_tag"], meta["version"]))

    def _read_plain(self, key: str, start: int, stop: int | None) -> ReadResult:
        headers = {}
        is_part = bool(start) or stop is not None
        if is_part:
            headers["range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        response = self.plain.send("GET", key, headers=headers)
        if is_part:
            # Check the range, as obstore does, because some services and caches send the whole
            # object.
            content_range = response.headers.get("content-range", "")
            sent = _CONTENT_RANGE.match(content_range) if response.status == 206 else None
            nbytes = len(response.body)
            if sent is None or int(sent[1]) != start or nbytes > (stop or start + nbytes) - start:
                words = f"the response to {headers['range']} has {nbytes} bytes ({content_range or 'the whole object'})"
                raise RequestFailed(Failure(FailureKind.OTHER, response.status, "", words))
        return ReadResult(memoryview(response.body), self._tag(response.headers))

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return self.run_head(key, lambda: self._size(key))

    def _size(self, key: str) -> int:
        if not _obstore_accepts(key):
            return int(self.plain.send("HEAD", key).headers["content-length"])
        import obstore

        return obstore.head(self._obstore(), key)["size"]

    def put(self, key: str, data: bytes | memoryview, condition: PutCondition | None) -> str:
        """Put an object in one request. Return its new tag."""
        put_id = uuid.uuid4().hex
        try:
            return self.run(lambda: self._put(key, data, condition, put_id))
        except RequestFailed as error:
            if isinstance(condition, IfTag) and error.failure.kind is FailureKind.MISSING:
                # S3 answers 404 if the condition requires a tag and the object is missing.
                error.failure = replace(error.failure, kind=FailureKind.CONDITION)
            if condition is None or error.failure.kind is not FailureKind.CONDITION:
                raise
            # An earlier try, or a duplicate sent by the network, may have succeeded, but its
            # response was lost.
            there = self.head(key)
            if there is not None and there.put_id == put_id:
                return there.tag
            if there is None or not isinstance(condition, IfTag) or there.tag != condition.tag:
                raise
            if self._unquoted_tags or not condition.tag.startswith('"'):
                raise
            # The object has the expected tag: the service compares tags without quotation marks.
            tag = self.run(lambda: self._put(key, data, IfTag(condition.tag.strip('"')), put_id))
            self._unquoted_tags = True
            return tag

    def _put(self, key: str, data: bytes | memoryview, condition: PutCondition | None, put_id: str) -> str:
        service = self.service
        if self._unquoted_tags and isinstance(condition, IfTag):
            condition = IfTag(condition.tag.strip('"'))
        if self.plain.has_digests or not _obstore_accepts(key):
            headers = {} if condition is None else dict(service.condition_headers(condition))
            headers |= service.upload_headers
            headers[service.metadata_prefix + PUT_ID_KEY] = put_id
            return self._tag(self.plain.send("PUT", key, headers=headers, body=data).headers)
        import obstore

        mode: Any = "overwrite" if condition is None else service.put_mode(condition)
        attributes: Any = {PUT_ID_KEY: put_id}
        result = obstore.put(self._obstore(), key, data, mode=mode, attributes=attributes, use_multipart=False)
        return service.tag(result["e_tag"], result["version"])

    def begin_upload(self, key: str, *, if_absent: bool) -> PendingUpload:
        """Begin an upload in parts.

        `if_absent` is the value that the caller will pass to `PendingUpload.complete`.
        """
        return Upload.begin(self, key)

    def abort_uploads(self, prefix: str) -> int:
        """Abort all uploads to keys with a prefix, and delete their temporary objects.

        Completing such an upload then fails.

        Return the number of uploads. If the service does not list, abort or delete uploads, they
        remain, and one warning is logged. Remaining uploads do no harm: new objects do not replace
        others, and no root refers to an object of another save.
        """
        uploads, temporary = self.find_uploads(prefix)
        count = 0
        with self.warning_of_uploads():
            for upload in uploads:
                upload.abort()
                count += 1
        return count + (len({upload_id_of(key) for key in temporary}) if self.delete_temporary(temporary) else 0)

    def find_uploads(self, prefix: str) -> tuple[Sequence[PendingUpload], Sequence[str]]:
        """Return the unfinished uploads to keys with a prefix, and the keys of temporary objects."""
        uploads: Sequence[PendingUpload] = ()
        with self.warning_of_uploads():
            uploads = list(list_uploads(self, prefix))
        if not self.has_temporary:
            return uploads, ()
        return uploads, [key for page in self.list_pages(prefix) for key in page.keys if self.is_temporary(key)]

    def delete_temporary(self, keys: Sequence[str], *, is_done: bool = False) -> bool:
        """Delete temporary objects of uploads. Return False if they cannot be deleted, and log one warning.

        Args:
            keys: keys of the temporary objects.
            is_done: True if the upload succeeded, so that nothing depends on the deletion.

        Raises:
            RequestFailed: if the service failed, and `is_done` is False.
        """
        try:
            self.delete(keys)
        except RequestFailed as error:
            if not is_done and error.failure.kind not in _REFUSALS:
                raise
            self._warn(
                "temporary objects of uploads, with .ckptcore-upload- in their names, cannot be deleted, and the "
                "service bills for them",
                error, "delete them with other credentials",
            )  # fmt: skip
            return False
        return True

    @contextmanager
    def warning_of_uploads(self) -> Iterator[None]:
        """Log a warning instead of an error if the service does not list or abort uploads."""
        try:
            yield
        except RequestFailed as error:
            if error.failure.kind not in _REFUSALS:
                raise
            self._warn(
                "unfinished uploads of failed saves cannot be aborted, and the service may bill for them",
                error, "set a lifecycle rule of the bucket that aborts incomplete uploads",
            )  # fmt: skip

    def _warn(self, what: str, error: RequestFailed, remedy: str) -> None:
        """Log a warning. Log each warning only once."""
        if what not in self._warned:
            self._warned.add(what)
            _LOG.warning(
                "%s: %s: %s. %s. Or %s", self.service.url, what, error, self.service.remedy(error.failure), remedy
            )

    def list_pages(self, prefix: str, delimiter: str = "") -> Iterator[ListPage]:
        """List the objects whose keys have a prefix; see `list_objects`."""
        return list_objects(self, prefix, delimiter)

    def is_temporary(self, key: str) -> bool:
        """Return True for the key of a temporary object of an upload. Lists omit these objects."""
        return self.has_temporary and upload_id_of(key) is not None

    def broken_rule(self, key: str) -> str | None:
        """Return the service's rule for keys that a key breaks.

        Return None if the service accepts the key unchanged.
        """
        return None

    def delete(self, keys: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        """Delete objects. A missing object is not an error.

        `check` is called before each try.
        """
        taken = [key for key in keys if _obstore_accepts(key)]
        for start in range(0, len(taken), _MAX_DELETED_KEYS):
            some = taken[start : start + _MAX_DELETED_KEYS]
            try:
                self.run(partial(self._delete, some), check)
            except RequestFailed as error:
                if error.failure.kind is not FailureKind.UNSUPPORTED:
                    raise
                for key in some:  # some services cannot delete several objects at once
                    self.run(partial(self._delete_plain, key), check)
        for key in keys:
            if not _obstore_accepts(key):
                self.run(partial(self._delete_plain, key), check)

    def _delete(self, keys: list[str]) -> None:
        import obstore

        try:
            obstore.delete(self._obstore(), keys)
        except FileNotFoundError as error:
            if failure_of_text(str(error), self.service.refusals).kind is not FailureKind.MISSING:
                raise

    def _delete_plain(self, key: str) -> None:
        try:
            self.plain.send("DELETE", key)
        except RequestFailed as error:
            if error.failure.kind is not FailureKind.MISSING:
                raise

    def forget_store(self) -> None:
        """Open the store again for the next request, because obstore keeps the old credentials."""
        with self._lock:
            self._store = None

    def _obstore(self) -> ObjectStore:
        with self._lock:
            if self._store is None:
                self._store = self.service.open_store()
            return self._store


def _obstore_accepts(key: str) -> bool:
    """Return True if obstore works in this process and accepts the key.

    obstore does not accept ASCII control characters in a key
    (`object_store::path::PathPart::parse`).
    """
    from ckptcore_obstore.runtimes import runs_here

    return runs_here() and (key.isprintable() or not any(character < " " or character == "\x7f" for character in key))
