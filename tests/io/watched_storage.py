"""A storage that counts requests, can be slow, and fails at given calls."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence

from ckptcore.builtin.memory import MemoryStorages
from ckptcore.errors import StorageError
from ckptcore.protocols import (
    Buffer,
    ObjectWriter,
    PutCondition,
    StorageAddress,
    StorageBackend,
    StorageCapabilities,
    StorageOptions,
)


def memory_storage() -> StorageBackend:
    """Return a new, empty storage in memory."""
    return MemoryStorages().open("memory://test", StorageOptions())


class WatchedStorage(StorageBackend):
    """A storage that forwards all calls to another one, counts them, and can delay or fail them.

    Attributes:
        request_bytes, concurrency, part_bytes: capabilities of this storage.
        reads: every range that was read: (key, start, stop).
        read_calls: how often `get_into` was called.
        writes: every range that was written: (key, start, stop).
        opened: keys of objects that were opened for writing.
        aborted: keys of objects whose write was aborted.
        fail_read_at, fail_write_at: the number of the call that fails, counted from zero.
        jitter: the maximum random delay of a call, in seconds.
        busy: the number of calls that are running.
    """

    concurrency = 1
    part_bytes = 1

    def __init__(self, inner: StorageBackend, request_bytes: int = 1 << 20) -> None:
        self._inner = inner
        self.request_bytes = request_bytes
        self.reads: list[tuple[str, int, int]] = []
        self.read_calls = 0
        self.writes: list[tuple[str, int, int]] = []
        self.opened: list[str] = []
        self.aborted: list[str] = []
        self.fail_read_at: int | None = None
        self.fail_write_at: int | None = None
        self.jitter = 0.0
        self.busy = 0
        self._lock = threading.Lock()

    def delay(self) -> None:
        """Sleep for a random time of at most `jitter` seconds."""
        if self.jitter:
            time.sleep(random.uniform(0, self.jitter))

    @property
    def capabilities(self) -> StorageCapabilities:
        return StorageCapabilities(self.request_bytes, self.concurrency, self.part_bytes)

    @property
    def address(self) -> StorageAddress | None:
        return self._inner.address

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._inner.get(key, start, stop)

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        return self._inner.get_with_tag(key)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        with self._lock:
            number = self.read_calls
            self.read_calls += 1
            self.busy += 1
            self.reads.extend([(key, start, start + len(buffer)) for start, buffer in ranges])
        try:
            self.delay()
            if number == self.fail_read_at:
                raise StorageError(f"read {number} of {key!r} failed because the test said so")
            self._inner.get_into(key, ranges)
            self.delay()
        finally:
            with self._lock:
                self.busy -= 1

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        return self._inner.put(key, data, condition=condition)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        self.opened.append(key)
        return _WatchedWriter(self, key, self._inner.open_writer(key, size))

    def begin_write(self, key: str, start: int, stop: int) -> None:
        """Record a write, and fail if it is the chosen one."""
        with self._lock:
            number = len(self.writes)
            self.writes.append((key, start, stop))
        if number == self.fail_write_at:
            raise StorageError(f"write {number} of {key!r} failed because the test said so")

    def list(self, prefix: str = "") -> Iterator[str]:
        return self._inner.list(prefix)

    def list_names(self, prefix: str = "") -> Sequence[str]:
        return self._inner.list_names(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def sync(self, keys: Sequence[str]) -> None:
        self._inner.sync(keys)


class _WatchedWriter:
    def __init__(self, storage: WatchedStorage, key: str, inner: ObjectWriter) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner

    def write_at(self, offset: int, data: Buffer) -> None:
        self._storage.delay()
        self._storage.begin_write(self._key, offset, offset + len(data))
        self._inner.write_at(offset, data)
        self._storage.delay()

    def finish(self) -> None:
        self._inner.finish()

    def abort(self) -> None:
        self._storage.aborted.append(self._key)
        self._inner.abort()
