"""Storages: a directory of a bucket as ckptcore's storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ckptcore.errors import CorruptCheckpointError, InvalidLocationError, StorageError, StorageFullError
from ckptcore.model import check_directory_key, check_key
from ckptcore.protocols import PutCondition, StorageAddress
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import FailureKind, RequestFailed
from ckptcore_obstore.listing import list_objects
from ckptcore_obstore.translating import error_of, telling
from ckptcore_obstore.writer import PartWriter

__all__ = ["ObjectStoreDirectory"]


class ObjectStoreDirectory:
    """The objects below a directory of a bucket. Any thread."""

    def __init__(self, bucket: Bucket, directory: str) -> None:
        """Make no request; `directory` is a key without ``/`` at its end, or empty for the bucket."""
        self._bucket = bucket
        self._service = bucket.service
        self._prefix = _spelled(check_directory_key(directory)) + "/" if directory else ""
        self._url = f"{bucket.service.url}/{self._prefix}"

    def __repr__(self) -> str:
        return f"ObjectStoreDirectory({self._url!r})"

    @property
    def bucket(self) -> Bucket:
        """With the requests of this process to it."""
        return self._bucket

    @property
    def request_bytes(self) -> int:
        """Bytes that one read should ask for."""
        return self._service.tuning.request_bytes

    @property
    def concurrency(self) -> int:
        """Requests that are worth having under way at once."""
        return self._service.tuning.concurrency

    @property
    def part_bytes(self) -> int:
        """What one request of an upload carries."""
        return self._service.tuning.part_bytes

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O."""
        return self._service.address(self._prefix)

    def _whole(self, key: str) -> str:
        return self._prefix + _spelled(check_key(key))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an object; fewer where it ends before."""
        whole = self._whole(key)
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
        """A small object whole, and the tag that a conditional put can name."""
        whole = self._whole(key)
        with telling(self._service, f"read {self._url}{key}"):
            found = self._bucket.read(whole)
        return bytes(found.data), found.tag

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on; ranges that are near to each other come by one request."""
        whole = self._whole(key)
        wanted = sorted([one for one in ranges if len(one[1])], key=lambda one: one[0])
        if not wanted:
            self.size(key)
            return
        for group in self._grouped(wanted):
            self._fill(key, whole, group)

    def _grouped(self, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[Sequence[tuple[int, memoryview]]]:
        """Ranges in order, those together that one request reads."""
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
                f"{self._url}{key} is too short: expected bytes {start} to {start + len(short)}, found {there} bytes in all. "
                "Load another checkpoint",
                key=key,
                start=min(start, there),
                stop=start + len(short),
            )
        source = np.frombuffer(data, np.uint8)
        for start, buffer in group:
            np.frombuffer(buffer, np.uint8)[:] = source[start - first : start - first + len(buffer)]

    def size(self, key: str) -> int:
        """Bytes of an object."""
        whole = self._whole(key)
        try:
            return self._bucket.size(whole)
        except RequestFailed as failed:
            raise self._error(failed, "find", key) from failed

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object by one request; returns its new tag."""
        whole = self._whole(key)
        try:
            return self._bucket.put(whole, data, condition)
        except RequestFailed as failed:
            error = self._error(failed, "put", key)
            if failed.tried.may_be_done and isinstance(error, StorageFullError | PermissionError):
                # Such an error says that nothing was changed, and nothing will be.
                raise StorageError(f"{error} An earlier try may have been done, or be on its way") from failed
            raise error from failed

    def open_writer(self, key: str, size: int | None = None) -> PartWriter:
        """Begin an object that is written in pieces; no request is made before a part is whole."""
        return PartWriter(self._bucket, self._whole(key), size, only_new=False)

    def open_new(self, key: str, size: int | None = None) -> PartWriter:
        """As `open_writer`; `finish` fails where an object is there by then."""
        return PartWriter(self._bucket, self._whole(key), size, only_new=True)

    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys of all objects below a directory, sorted."""
        below = self._below(prefix)
        keys = []
        with telling(self._service, f"list {self._service.url}/{below}"):
            for page in list_objects(self._bucket, below):
                keys += [key[len(self._prefix) :] for key in page.keys]
        return iter(sorted([key for key in keys if self._is_shown(key)]))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``."""
        below = self._below(prefix)
        names: set[str] = set()
        with telling(self._service, f"list {self._service.url}/{below}"):
            for page in list_objects(self._bucket, below, "/"):
                names.update([key[len(below) :] for key in page.keys])
                names.update([key[len(below) :] for key in page.prefixes])
        return sorted([name for name in names if self._is_shown(name.removesuffix("/"))])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, a thousand by one request; one that is not there is no error."""
        self.delete_while(keys, lambda: None)

    def delete_while(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        """As `delete`; `check` is called before each request, also where it is sent again."""
        whole = [self._whole(key) for key in keys]
        if whole:
            with telling(self._service, f"delete from {self._url}"):
                self._bucket.delete(whole, check)

    def abort_uploads(self, prefix: str = "") -> int:
        """Give up every unfinished upload in parts below a directory, so that its end fails; returns how many there were."""
        below = self._below(prefix)
        with telling(self._service, f"give up uploads to {self._service.url}/{below}"):
            return self._bucket.abort_uploads(below)

    def sync(self, keys: Sequence[str]) -> None:
        """Nothing: a service is as durable as it will be once it has answered, whoever asked."""
        for key in keys:
            check_key(key)

    def _is_shown(self, key: str) -> bool:
        return _is_ours(key) and not self._bucket.is_temporary(key)

    def _below(self, prefix: str) -> str:
        directory = _spelled(check_directory_key(prefix))
        return self._prefix + (directory + "/" if directory else "")

    def _error(self, failed: RequestFailed, verb: str, key: str) -> Exception:
        return error_of(failed, self._service, f"{verb} {self._url}{key}")


def _spelled(key: str) -> str:
    """The key itself, if it can be written in UTF-8, as the keys of object stores are.

    Raises:
        InvalidLocationError
    """
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidLocationError(
            f"the key {key[:200]!r} has a character that is not in UTF-8, which keys of object stores are in"
        ) from error
    return key


def _is_ours(key: str) -> bool:
    """Whether a key that other software may have made is one that this storage can name."""
    parts = key.split("/")
    return not ({"", ".", ".."} & set(parts) or "\0" in key)
