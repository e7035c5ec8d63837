"""`ObjectStoreDirectory`: a directory of a bucket as a ckptcore storage."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

import numpy as np

from ckptcore.errors import CorruptCheckpointError, InvalidLocationError, StorageError, StorageFullError
from ckptcore.model import check_directory_key, check_key
from ckptcore.protocols import PutCondition, StorageAddress, StorageBackend, StorageCapabilities
from ckptcore_obstore.bucket_requests import converted_errors, error_of
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import FailureKind, RequestFailed
from ckptcore_obstore.writer import PartWriter


class ObjectStoreDirectory(StorageBackend):
    """Objects in a directory of a bucket. Thread-safe."""

    def __init__(self, bucket: Bucket, directory: str) -> None:
        """Initialise without sending a request.

        `directory` is a key without ``/`` at the end, or empty for the whole bucket.
        """
        self._bucket = bucket
        self._service = bucket.service
        tuning = bucket.service.tuning
        self._capabilities = StorageCapabilities(tuning.request_bytes, tuning.concurrency, tuning.part_bytes)
        self._prefix = self._checked(check_directory_key(directory)) + "/" if directory else ""
        self._url = f"{bucket.service.url}/{self._prefix}"

    def __repr__(self) -> str:
        return f"ObjectStoreDirectory({self._url!r})"

    @property
    def bucket(self) -> Bucket:
        """The bucket, for further requests."""
        return self._bucket

    @property
    def capabilities(self) -> StorageCapabilities:
        """Request sizes and concurrency, from the options of the service."""
        return self._capabilities

    @property
    def address(self) -> StorageAddress | None:
        """Address for native I/O."""
        return self._service.address(self._prefix)

    def _full_key(self, key: str) -> str:
        return self._checked(self._prefix + check_key(key))

    def _checked(self, key: str) -> str:
        """Return a full key. Check that the service stores it unchanged.

        Raises:
            InvalidLocationError: if the service would change or refuse the key.
        """
        if (rule := self._bucket.broken_rule(_check_encodable(key))) is not None:
            raise InvalidLocationError(
                f"invalid key {key[:200]!r} in {self._service.url}: {rule}; save with another layout, such as "
                "'safetensors' or 'ocdbt', whose names of files do not contain those of values, or use another name"
            )
        return key

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read bytes `start` to `stop` of an object, or fewer at its end."""
        whole = self._full_key(key)
        if stop is not None and stop <= start:
            self.size(key)
            return b""
        try:
            return bytes(self._bucket.read(whole, start, stop).data)
        except RequestFailed as failed:
            if failed.failure.kind is FailureKind.RANGE:
                return b""
            raise self._error(failed, "read", key) from failed

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """Read a small object. Return its data and its tag for conditional puts."""
        whole = self._full_key(key)
        with converted_errors(self._service, f"read {self._url}{key}"):
            result = self._bucket.read(whole)
        return bytes(result.data), result.tag

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset. One request reads ranges with small gaps between them."""
        whole = self._full_key(key)
        wanted = sorted([piece for piece in ranges if len(piece[1])], key=lambda piece: piece[0])
        if not wanted:
            self.size(key)
            return
        for group in self._grouped(wanted):
            self._fill(key, whole, group)

    def _grouped(self, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[Sequence[tuple[int, memoryview]]]:
        """Group sorted ranges. One request reads each group."""
        tuning = self._service.tuning
        group = [ranges[0]]
        first, end = ranges[0][0], ranges[0][0] + len(ranges[0][1])
        for start, buffer in ranges[1:]:
            stop = start + len(buffer)
            if start - end > tuning.gap_bytes or max(stop, end) - first > tuning.request_bytes:
                yield group
                group, first, end = [], start, start
            group.append((start, buffer))
            end = max(end, stop)
        yield group

    def _fill(self, key: str, whole: str, group: Sequence[tuple[int, memoryview]]) -> None:
        first = group[0][0]
        stop = max(start + len(buffer) for start, buffer in group)
        try:
            data = self._bucket.read(whole, first, stop).data
        except RequestFailed as failed:
            if failed.failure.kind is not FailureKind.RANGE:
                raise self._error(failed, "read", key) from failed
            data = memoryview(b"")
        if len(data) < stop - first:
            there = first + len(data) if len(data) else min(first, self.size(key))
            start, short = next((start, buffer) for start, buffer in group if start + len(buffer) > there)
            raise CorruptCheckpointError(
                f"{self._url}{key} is too short: expected bytes {start} to "
                f"{start + len(short)}, found {there} bytes in total. Load another checkpoint",
                key=key,
                start=min(start, there),
                stop=start + len(short),
            )
        source = np.frombuffer(data, np.uint8)
        for start, buffer in group:
            np.frombuffer(buffer, np.uint8)[:] = source[start - first : start - first + len(buffer)]

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        whole = self._full_key(key)
        try:
            return self._bucket.size(whole)
        except RequestFailed as failed:
            raise self._error(failed, "find", key) from failed

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object in one request. Return its new tag."""
        whole = self._full_key(key)
        try:
            return self._bucket.put(whole, data, condition)
        except RequestFailed as failed:
            error = self._error(failed, "put", key)
            if failed.tried.may_be_done and isinstance(error, StorageFullError | PermissionError):
                # Callers take these types as proof that nothing was written. Here an earlier try
                # may have written the object.
                raise StorageError(f"{error}. An earlier try may have succeeded") from failed
            raise error from failed

    def open_writer(self, key: str, size: int | None = None) -> PartWriter:
        """Begin an object that is written in pieces.

        No request is made until a part is complete.
        """
        return PartWriter(self._bucket, self._full_key(key), size, only_new=False)

    def open_new(self, key: str, size: int | None = None) -> PartWriter:
        """Begin an object that must not exist. `finish` fails if the object exists. See `open_writer`."""
        return PartWriter(self._bucket, self._full_key(key), size, only_new=True)

    def list(self, prefix: str = "") -> Iterator[str]:
        """List the keys of all objects in a directory, sorted."""
        return iter(sorted(self.list_sizes(prefix)))

    def list_sizes(self, prefix: str = "") -> Mapping[str, int]:
        """List the sizes in bytes of all objects in a directory, by key. One request per 1000 objects."""
        below = self._below(prefix)
        sizes: dict[str, int] = {}
        with converted_errors(self._service, f"list {self._service.url}/{below}"):
            for page in self._bucket.list_pages(below):
                keys = [key[len(self._prefix) :] for key in page.keys]
                sizes.update(zip(keys, page.sizes, strict=True))
        return {key: size for key, size in sizes.items() if self._is_listed(key)}

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """List the names in a directory, sorted. Names of directories end in ``/``."""
        below = self._below(prefix)
        names: set[str] = set()
        with converted_errors(self._service, f"list {self._service.url}/{below}"):
            for page in self._bucket.list_pages(below, "/"):
                names.update([key[len(below) :] for key in page.keys])
                names.update([key[len(below) :] for key in page.prefixes])
        return sorted([name for name in names if self._is_listed(name.removesuffix("/"))])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, up to a thousand per request. A missing object is not an error."""
        self.delete_while(keys, lambda: None)

    def delete_while(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        """Delete objects, and call `check` before each try of a request. See `delete`."""
        whole = [self._full_key(key) for key in keys]
        if whole:
            with converted_errors(self._service, f"delete from {self._url}"):
                self._bucket.delete(whole, check)

    def abort_uploads(self, prefix: str = "") -> int:
        """Abort all unfinished uploads in a directory. Completing such an upload then fails.

        Return the number of uploads.
        """
        below = self._below(prefix)
        with converted_errors(self._service, f"abort uploads to {self._service.url}/{below}"):
            return self._bucket.abort_uploads(below)

    def sync(self, keys: Sequence[str]) -> None:
        """Only check the keys, because a put is durable as soon as the service answers it."""
        for key in keys:
            check_key(key)

    def _is_listed(self, key: str) -> bool:
        return _is_supported_key(key) and not self._bucket.is_temporary(key)

    def _below(self, prefix: str) -> str:
        directory = check_directory_key(prefix)
        return self._checked(self._prefix + directory) + "/" if directory else self._prefix

    def _error(self, failed: RequestFailed, verb: str, key: str) -> Exception:
        return error_of(failed, self._service, f"{verb} {self._url}{key}")


def _check_encodable(key: str) -> str:
    """Return the key if it can be encoded in UTF-8, as object stores require.

    Raises:
        InvalidLocationError: if it cannot be encoded.
    """
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidLocationError(
            f"invalid key {key[:200]!r}: object stores need keys in UTF-8; use another name for the location or file"
        ) from error
    return key


def _is_supported_key(key: str) -> bool:
    """Return False for keys of other software that this storage cannot represent."""
    parts = key.split("/")
    return not ({"", ".", ".."} & set(parts) or "\0" in key)


K = TypeVar("K", bound=Hashable)
B = TypeVar("B")

_MAX_BUCKETS: Final = 64


class OpenBuckets(Generic[K, B]):
    """A bounded cache of buckets. Thread-safe.

    Settings contain credentials, and a long-running process may get new credentials every hour or
    for each user. Therefore the cache drops the least recently used bucket. Directories that use a
    dropped bucket continue to work.
    """

    def __init__(self, max_buckets: int = _MAX_BUCKETS) -> None:
        """Create an empty cache."""
        self._max_buckets = max_buckets
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, K], B] = OrderedDict()

    def get(self, settings: K, open_bucket: Callable[[], B]) -> B:
        """Return the bucket for these settings. Open it if needed, without a request."""
        key = os.getpid(), settings  # a forked child cannot use the connections and locks of its parent
        with self._lock:
            bucket = self._open.get(key)
            if bucket is None:
                bucket = self._open[key] = open_bucket()
            self._open.move_to_end(key)
            if len(self._open) > self._max_buckets:
                self._open.popitem(last=False)
        return bucket
