"""Transfers: objects that go from one storage to another as they are, and are checked on their way."""

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
from ckptcore.io.requests import SIZES, Sizes, requests_of
from ckptcore.io.threads import IOThreads, run_each
from ckptcore.model import ObjectRecord
from ckptcore.protocols import ObjectWriter, RangeReader, StorageBackend

__all__ = ["Transfer", "TransferCounts"]


@dataclass(slots=True)
class TransferCounts:
    """What a transfer has done so far.

    Attributes:
        sent_bytes: bytes that were written at the destination.
        read_back_bytes: bytes that were read there.
        requests: ranges read, pieces written, objects begun and completed.
    """

    sent_bytes: int = 0
    read_back_bytes: int = 0
    requests: int = 0


class Transfer:
    """Objects on their way from one storage to another. One thread asks, and all threads that move bytes work.

    Each thread holds one piece of an object at a time, two where objects are compared; nothing else of them is in
    memory.

    Attributes:
        counts: what was done so far.
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
        """Send nothing yet.

        Args:
            source: where objects are read.
            destination: where they are written, under the same keys.
            threads: what moves bytes, together with the calling thread.
            sent: called with a number of bytes each time that many more are written, from any thread.
            is_stopped: asked before each piece whether to give up.
            sizes: how much is moved at a time.
        """
        self._source = source
        self._destination = destination
        self._threads = threads
        self._sent = sent
        self._is_stopped = is_stopped
        self._sizes = sizes
        of_source, of_destination = requests_of(source), requests_of(destination)
        self._parallelism: Final = max(of_source.concurrency, of_destination.concurrency)
        # Whole blocks, so that no checksum is of bytes that two threads have, and whole parts of an upload.
        whole = math.lcm(sizes.block, of_destination.part_bytes)
        self._piece_bytes: Final = -(-max(sizes.task, of_source.request_bytes) // whole) * whole
        self._buffers: list[memoryview] = []
        self._lock = threading.Lock()
        self.counts = TransferCounts()

    def send(self, records: Sequence[ObjectRecord]) -> list[ObjectRecord]:
        """Copy objects, several and several pieces of one at once.

        Args:
            records: the objects, of sizes that they have. What has checksums is compared with them before it is
                written.

        Returns:
            The objects with their checksums: those that were given, and else those of the bytes that passed.

        Raises:
            ChecksumError: an object at the source is damaged.
            CorruptCheckpointError: an object there ends too early.
            CancelledError: it was stopped.
            StorageError: the first error of a thread. What is complete stays; what is not is given up.
        """
        sendings = [_Sending(record, self._source, self._destination, self._sizes) for record in records]

        def send_piece(piece: tuple[int, int, int]) -> None:
            self._send_piece(sendings[piece[0]], piece[1], piece[2])

        try:
            run_each(self._threads, self._pieces(records), send_piece, parallelism=self._parallelism)
        finally:
            for sending in sendings:
                sending.give_up()
            self._buffers.clear()
        return [sending.checked_record() for sending in sendings]

    def _pieces(self, records: Sequence[ObjectRecord]) -> Iterator[tuple[int, int, int]]:
        """The number of the object, start and stop of each piece; an empty object has an empty one."""
        for number, record in enumerate(records):
            for start in range(0, max(1, record.size), self._piece_bytes):
                self._expect_going_on()
                yield number, start, min(start + self._piece_bytes, record.size)

    def _expect_going_on(self) -> None:
        if self._is_stopped():
            raise CancelledError("the copy was stopped; copying again goes on with it")

    def _send_piece(self, sending: _Sending, start: int, stop: int) -> None:
        buffer = self._take_buffer()
        data = buffer[: stop - start]
        requests = sending.send(start, data)
        self._buffers.append(buffer)
        self._count(requests, sent=len(data))
        self._sent(len(data))

    def _take_buffer(self) -> memoryview:
        try:
            return self._buffers.pop()
        except IndexError:
            return map_pages(self._piece_bytes).memory()

    def _count(self, requests: int, *, sent: int = 0, read_back: int = 0) -> None:
        with self._lock:
            self.counts.requests += requests
            self.counts.sent_bytes += sent
            self.counts.read_back_bytes += read_back

    def read_back(self, records: Sequence[ObjectRecord]) -> dict[str, CheckpointError]:
        """Read objects at the destination, and compare them with their checksums, or with the source where they have none.

        Returns:
            By key, what is wrong; nothing of objects that are what they should be.

        Raises:
            CancelledError: it was stopped.
            CheckpointError: the first error of the source, or of a thread.
        """
        wrong: dict[str, CheckpointError] = {}
        sums = [
            RecordedChecksums(record, block_bytes=self._sizes.block) if record.checksums else None for record in records
        ]

        def compare(piece: tuple[int, int, int]) -> None:
            number, start, stop = piece
            key = records[number].key
            if key in wrong or start == stop:
                return
            buffer = self._take_buffer()
            data = buffer[: stop - start]
            try:
                # By its key each time: what is there may have been written anew since it was opened.
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
            run_each(self._threads, self._pieces(records), compare, parallelism=self._parallelism)
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
                f"{key!r} differs from the source in bytes {start} to {start + len(data)}; it changed there or here "
                "since it was copied: copy it again",
                key=key,
                start=start,
                stop=start + len(data),
            )


class _Sending:
    """One object on its way. Any thread."""

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
        """Read, check and write a piece, and complete the object with its last one; how many requests that took."""
        requests = 0
        with self._lock:
            # Not before, so that few objects are open at once.
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

    def give_up(self) -> None:
        """Remove what is not complete; of one that is complete this does nothing. No thread sends any more."""
        if self._writer is not None and not self._complete:
            self._writer.abort()
        self._reader = self._writer = None

    def checked_record(self) -> ObjectRecord:
        """The object with its checksums; when it is complete."""
        return self._record if self._sums is None else self._record._replace(checksums=self._sums.encode())
