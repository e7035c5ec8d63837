"""Transfers of objects from one storage to another, with verification of checksums."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptcore.errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.checksums import BlockChecksums, RecordedChecksums
from ckptcore.io.memory import map_pages
from ckptcore.io.threads import SIZES, IOThreads, Sizes, for_each, requests_of
from ckptcore.model import ObjectRecord
from ckptcore.protocols import ObjectWriter, RangeReader, StorageBackend


@dataclass(slots=True)
class TransferCounts:
    """Progress of a transfer.

    Attributes:
        sent_bytes: bytes that were written to the destination.
        read_back_bytes: bytes that were read at the destination.
        requests: number of ranges read, ranges written, and objects opened and completed.
    """

    sent_bytes: int = 0
    read_back_bytes: int = 0
    requests: int = 0


class Transfer:
    """Copies objects from one storage to another on the I/O threads. Call it from one thread.

    Each I/O thread has one slice of an object in memory, or two when it compares an object without checksums with the
    source.

    Attributes:
        counts: the progress.
    """

    def __init__(
        self,
        source: StorageBackend,
        destination: StorageBackend,
        threads: IOThreads,
        *,
        sent: Callable[[int], None],
        is_stopped: Callable[[], bool],
        sizes: Sizes = SIZES,
    ) -> None:
        """Prepare a transfer.

        Args:
            source: the storage to read from.
            destination: the storage to write to, under the same keys.
            threads: the threads that copy bytes, together with the calling thread.
            sent: called with the number of bytes of each write, from any thread.
            is_stopped: called before each slice. True stops the transfer.
            sizes: sizes of slices and blocks.
        """
        self._source = source
        self._destination = destination
        self._threads = threads
        self._sent = sent
        self._is_stopped = is_stopped
        self._sizes = sizes
        of_source, of_destination = requests_of(source), requests_of(destination)
        self._parallelism: Final = max(of_source.concurrency, of_destination.concurrency)
        # A slice is a multiple of the part size and of the block size. So one thread has all bytes of each checksum.
        whole = math.lcm(sizes.block, of_destination.part_bytes)
        self._slice_bytes: Final = -(-max(sizes.task, of_source.request_bytes) // whole) * whole
        self._buffers: list[memoryview] = []
        self._lock = threading.Lock()
        self.counts = TransferCounts()

    def send(self, records: Sequence[ObjectRecord]) -> list[ObjectRecord]:
        """Copy objects, several at a time, and several slices of one object at a time.

        Args:
            records: the objects, with their correct sizes. Objects with checksums are verified before they are written.

        Returns:
            The records of the objects, with the given checksums, or else with checksums of the copied bytes.

        Raises:
            ChecksumError: if an object at the source is damaged.
            CorruptCheckpointError: if an object at the source is too short.
            CancelledError: if the transfer was stopped.
            StorageError: the first error of a thread. Complete objects are kept, others are aborted.
        """
        transfers = [_ObjectTransfer(record, self._source, self._destination, self._sizes) for record in records]

        def send_slice(part: tuple[int, int, int]) -> None:
            self._send_slice(transfers[part[0]], part[1], part[2])

        try:
            for_each(self._threads, self._slices(records), send_slice, parallelism=self._parallelism)
        finally:
            for transfer in transfers:
                transfer.abort_unless_complete()
            self._buffers.clear()
        return [transfer.record_with_checksums() for transfer in transfers]

    def _slices(self, records: Sequence[ObjectRecord]) -> Iterator[tuple[int, int, int]]:
        """Yield object number, start and stop of each slice. An empty object has one empty slice."""
        for number, record in enumerate(records):
            for start in range(0, max(1, record.size), self._slice_bytes):
                if self._is_stopped():
                    raise CancelledError("the copy was stopped. Copy again to resume it")
                yield number, start, min(start + self._slice_bytes, record.size)

    def _send_slice(self, transfer: _ObjectTransfer, start: int, stop: int) -> None:
        buffer = self._take_buffer()
        data = buffer[: stop - start]
        requests = transfer.send(start, data)
        self._buffers.append(buffer)
        self._count(requests, sent=len(data))
        self._sent(len(data))

    def _take_buffer(self) -> memoryview:
        try:
            return self._buffers.pop()
        except IndexError:
            return map_pages(self._slice_bytes).memory()

    def _count(self, requests: int, *, sent: int = 0, read_back: int = 0) -> None:
        with self._lock:
            self.counts.requests += requests
            self.counts.sent_bytes += sent
            self.counts.read_back_bytes += read_back

    def read_back(self, records: Sequence[ObjectRecord]) -> dict[str, CheckpointError]:
        """Read objects at the destination, and compare them with their checksums, or with the source if they have none.

        Returns:
            The errors by key of the object. Correct objects have none.

        Raises:
            CancelledError: if the transfer was stopped.
            CheckpointError: the first error of the source, or of a thread.
        """
        wrong: dict[str, CheckpointError] = {}
        sums = [
            RecordedChecksums(record, block_bytes=self._sizes.block) if record.checksums else None for record in records
        ]

        def compare(part: tuple[int, int, int]) -> None:
            number, start, stop = part
            key = records[number].key
            if key in wrong or start == stop:
                return
            buffer = self._take_buffer()
            data = buffer[: stop - start]
            try:
                # Do not use an open reader, because the object may have been replaced since it was opened.
                self._destination.get_into(key, [(start, data)])
                if (recorded := sums[number]) is not None:
                    recorded.verify(start, data)
                else:
                    self._compare_with_source(key, start, data)
            except (CorruptCheckpointError, ObjectNotFoundError) as error:
                wrong[key] = error
            self._buffers.append(buffer)
            self._count(1, read_back=len(data))

        try:
            for_each(self._threads, self._slices(records), compare, parallelism=self._parallelism)
        finally:
            self._buffers.clear()
        return wrong

    def _compare_with_source(self, key: str, start: int, data: memoryview) -> None:
        buffer = self._take_buffer()
        expected = buffer[: len(data)]
        self._source.get_into(key, [(start, expected)])
        same = bool(np.array_equal(np.frombuffer(data, np.uint8), np.frombuffer(expected, np.uint8)))
        self._buffers.append(buffer)
        self._count(1)
        if not same:
            raise CorruptCheckpointError(
                f"{key!r} differs from the source in bytes {start} to {start + len(data)}: one of them changed since "
                "the copy",
                key=key,
                start=start,
                stop=start + len(data),
            )


class _ObjectTransfer:
    """The transfer of one object. Thread-safe."""

    def __init__(self, record: ObjectRecord, source: StorageBackend, destination: StorageBackend, sizes: Sizes) -> None:
        self._record = record
        self._source = source
        self._destination = destination
        self._sizes = sizes
        self._lock = threading.Lock()
        self._reader: RangeReader | None = None
        self._writer: ObjectWriter | None = None
        self._left = record.size
        self._complete = False
        self._recorded: RecordedChecksums | None = None
        self._sums: BlockChecksums | None = None

    def send(self, start: int, data: memoryview) -> int:
        """Read, verify and write a slice. The last slice completes the object. Return the number of requests."""
        requests = 0
        with self._lock:
            # The first slice opens the object, so that few objects are open at the same time.
            if self._writer is None:
                self._reader = self._source.open_reader(self._record.key)
                if self._record.checksums:
                    self._recorded = RecordedChecksums(self._record, block_bytes=self._sizes.block)
                else:
                    self._sums = BlockChecksums(self._record.size, block_bytes=self._sizes.block)
                self._writer = self._destination.open_writer(self._record.key, self._record.size)
                requests += 1
            reader, writer, sums = self._reader, self._writer, self._sums
        if data:
            assert reader is not None
            reader.get_into([(start, data)])
            if self._recorded is not None:
                self._recorded.verify(start, data)
            elif sums is not None:
                sums.add(start, data)
            writer.write_at(start, data)
            requests += 2
        with self._lock:
            self._left -= len(data)
            is_last = not self._left
        if is_last:
            writer.finish()
            self._complete = True
            self._reader = self._recorded = None
            requests += 1
        return requests

    def abort_unless_complete(self) -> None:
        """Abort the object if it is not complete. No other thread may send slices of it."""
        if self._writer is not None and not self._complete:
            self._writer.abort()
        self._reader = self._writer = None

    def record_with_checksums(self) -> ObjectRecord:
        """Return the record of a complete object, with checksums."""
        return self._record if self._sums is None else self._record._replace(checksums=self._sums.encode())
