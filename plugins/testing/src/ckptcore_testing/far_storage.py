"""A simulated remote storage with latency, bandwidth and throttling."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore.builtin.memory import MemoryStorages
from ckptcore.errors import ObjectNotFoundError, StorageError
from ckptcore.protocols import Buffer, ObjectWriter, PutCondition, StorageBackend, StorageCapabilities, StorageOptions

FarRequestKind: TypeAlias = Literal["get", "head", "put", "begin", "part", "complete", "abort", "list", "delete"]
"""Kinds of requests. Objects that are written in parts have "begin", "part", "complete" and "abort"."""

_KEYS_PER_REQUEST: Final = 1000
"""Keys per request for listing and deleting, as in object stores."""


@dataclass(frozen=True, slots=True)
class FarRequest:
    """A request.

    Attributes:
        kind: the kind of request.
        key: the object, or the directory.
        start, stop: the byte range, if any.
    """

    kind: FarRequestKind
    key: str
    start: int = 0
    stop: int = 0


class FarStorage(StorageBackend):
    """A storage that behaves like a client of an object store. Thread-safe.

    Objects are uploaded in parts. A write of whole parts is sent before `write_at` returns. Other writes are buffered
    until a part is complete. If no part has been sent, and the object fits in one, `finish` sends it in one request.

    Attributes:
        concurrency, part_bytes, request_bytes: the capabilities.
        latency: seconds until a request is answered, in addition to the time of its transfer.
        bytes_per_second: bandwidth of one request. None: unlimited.
        most_at_once: maximum number of concurrent requests. More are throttled and retried. None: unlimited.
        requests: all requests since the last `forget`, in order of their start.
        refused: number of throttled attempts. A request can be throttled several times.
        peak_at_once: peak number of concurrent requests.
        held_bytes: number of buffered bytes, in incomplete parts and in complete parts that are not yet sent.
        peak_held_bytes: peak of `held_bytes`.
    """

    def __init__(
        self,
        inner: StorageBackend | None = None,
        *,
        concurrency: int = 16,
        part_bytes: int = 1 << 20,
        request_bytes: int = 1 << 20,
        latency: float = 0.0,
        bytes_per_second: float | None = None,
        most_at_once: int | None = None,
    ) -> None:
        """Store the objects in `inner`, by default in memory."""
        self._inner = MemoryStorages().open("memory://far", StorageOptions()) if inner is None else inner
        self.concurrency = concurrency
        self.part_bytes = part_bytes
        self.request_bytes = request_bytes
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.most_at_once = most_at_once
        self.requests: list[FarRequest] = []
        self.refused = 0
        self.peak_at_once = 0
        self.held_bytes = 0
        self.peak_held_bytes = 0
        self._at_once = 0
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> StorageCapabilities:
        """The efficient sizes and number of requests."""
        return StorageCapabilities(self.request_bytes, self.concurrency, self.part_bytes)

    def count(self, *kinds: FarRequestKind) -> int:
        """Return the number of requests of these kinds, by default of all kinds."""
        return len([request for request in list(self.requests) if not kinds or request.kind in kinds])

    def forget(self) -> None:
        """Reset the counts. Call this only while no request is running."""
        with self._lock:
            self.requests.clear()
            self.refused = self.peak_at_once = self.peak_held_bytes = 0

    @contextmanager
    def request(self, kind: FarRequestKind, key: str, start: int = 0, stop: int = 0) -> Iterator[None]:
        """Simulate a request: wait for the throttle, the latency and the transfer, and then run the body.

        The request counts as running until the body ends. Its transfer has ``stop - start`` bytes.
        """
        wait = max(self.latency, 0.0005)
        while True:
            with self._lock:
                if self.most_at_once is None or self._at_once < self.most_at_once:
                    self._at_once += 1
                    self.peak_at_once = max(self.peak_at_once, self._at_once)
                    self.requests.append(FarRequest(kind, key, start, stop))
                    break
                self.refused += 1
            time.sleep(wait)
            wait = min(2 * wait, 0.1)
        try:
            seconds = self.latency
            if self.bytes_per_second is not None:
                seconds += (stop - start) / self.bytes_per_second
            if seconds:
                time.sleep(seconds)
            yield
        finally:
            with self._lock:
                self._at_once -= 1

    def hold(self, nbytes: int) -> None:
        """Add `nbytes` to the number of buffered bytes. Negative for bytes that were sent or dropped."""
        with self._lock:
            self.held_bytes += nbytes
            self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`."""
        try:
            data = self._inner.get(key, start, stop)
        except ObjectNotFoundError:
            with self.request("get", key):  # a failed request counts, too
                raise
        with self.request("get", key, start, start + len(data)):
            return data

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`."""
        with self.request("get", key):
            return self._inner.get_with_tag(key)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`. Contiguous ranges are one request."""
        together: list[list[tuple[int, memoryview]]] = []
        stop = -1
        for offset, buffer in ranges:
            if offset != stop:
                together.append([])
            together[-1].append((offset, buffer))
            stop = offset + len(buffer)
        for buffers in together:
            last, buffer = buffers[-1]
            with self.request("get", key, buffers[0][0], last + len(buffer)):
                self._inner.get_into(key, buffers)

    def size(self, key: str) -> int:
        """See `StorageBackend`."""
        with self.request("head", key):
            return self._inner.size(key)

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        with self.request("put", key, 0, len(data)):
            return self._inner.put(key, data, condition=condition)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return _FarWriter(self, key, self._inner.open_writer(key, size), size)

    # --- names --------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`."""
        keys = list(self._inner.list(prefix))
        self._pages(len(keys), prefix)
        return iter(keys)

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`."""
        names = self._inner.list_names(prefix)
        self._pages(len(names), prefix)
        return names

    def list_sizes(self, prefix: str = "") -> Mapping[str, int]:
        """See `StorageBackend`."""
        return {key: self._inner.size(key) for key in self.list(prefix)}

    def _pages(self, count: int, prefix: str) -> None:
        for _ in range(max(1, -(-count // _KEYS_PER_REQUEST))):
            with self.request("list", prefix):
                pass

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        for start in range(0, len(keys), _KEYS_PER_REQUEST):
            some = keys[start : start + _KEYS_PER_REQUEST]
            with self.request("delete", some[0]):
                self._inner.delete(some)

    def sync(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`. Answered requests are durable."""
        self._inner.sync(keys)


class _FarWriter:
    """A writer that uploads an object in parts."""

    def __init__(self, storage: FarStorage, key: str, inner: ObjectWriter, size: int | None) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner
        self._size = size
        self._lock = threading.Lock()
        self._begun = False
        self._ended = False
        self._held: dict[int, dict[int, bytes]] = {}  # pieces by offset in the object, by part number
        self._stop = 0

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `ObjectWriter`."""
        part_bytes = self._storage.part_bytes
        stop = offset + len(data)
        if self._ended:
            raise ValueError(f"cannot write {self._key!r}: the writer is finished or aborted")
        with self._lock:
            self._stop = max(self._stop, stop)
        whole = offset % part_bytes == 0 and len(data) and (len(data) % part_bytes == 0 or stop == self._size)
        if whole and not (self._size is not None and self._size <= part_bytes):
            for start in range(0, len(data), part_bytes):
                self._send(offset + start, memoryview(data)[start : start + part_bytes])
            return
        position = offset
        while position < stop:
            number = position // part_bytes
            end = min(stop, (number + 1) * part_bytes)
            piece = bytes(memoryview(data)[position - offset : end - offset])
            with self._lock:
                held = self._held.setdefault(number, {})
                held[position] = piece
                complete = sum(map(len, held.values())) == part_bytes
                if complete:
                    del self._held[number]
            self._storage.hold(len(piece))
            if complete:
                self._send_held(held)
            position = end

    def _send_held(self, held: dict[int, bytes]) -> None:
        data = b"".join([piece for _, piece in sorted(held.items())])
        try:
            self._send(min(held), memoryview(data))
        finally:
            self._storage.hold(-len(data))

    def _send(self, start: int, data: memoryview) -> None:
        with self._lock:
            first, self._begun = not self._begun, True
            if first:
                with self._storage.request("begin", self._key):
                    pass
        with self._storage.request("part", self._key, start, start + len(data)):
            self._inner.write_at(start, data)

    def finish(self) -> None:
        """See `ObjectWriter`."""
        if self._ended:
            raise ValueError(f"cannot finish {self._key!r}: the writer is finished or aborted")
        held, self._held = self._held, {}
        if not self._begun and self._stop <= self._storage.part_bytes:
            pieces = [piece for pieces in held.values() for piece in pieces.items()]
            try:
                with self._storage.request("put", self._key, 0, self._stop):
                    for offset, piece in pieces:
                        self._inner.write_at(offset, piece)
                    self._inner.finish()
            finally:
                self._storage.hold(-sum([len(piece) for _, piece in pieces]))
            self._ended = True
            return
        last = self._stop // self._storage.part_bytes
        missing = sorted(held.keys() - {last})
        if missing:
            self._held = held
            raise StorageError(f"cannot complete {self._key!r}: bytes of part {missing[0]} are missing")
        for pieces_of_part in held.values():
            self._send_held(pieces_of_part)
        with self._storage.request("complete", self._key):
            self._inner.finish()
        self._ended = True

    def abort(self) -> None:
        """See `ObjectWriter`."""
        held, self._held = self._held, {}
        self._storage.hold(-sum([len(piece) for pieces in held.values() for piece in pieces.values()]))
        if self._begun and not self._ended:
            with self._storage.request("abort", self._key):
                pass
        self._ended = True
        self._inner.abort()
