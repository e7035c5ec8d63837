"""The objects of a checkpoint while it is read: moved by the I/O threads, verified, and put into arrays."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.block_cache import BlockCache, RecentBlocks
from ckptcore.io.checksums import RecordedChecksums
from ckptcore.io.chunk_reads import read_boxes
from ckptcore.io.destinations import ObjectShape
from ckptcore.io.memory import map_pages
from ckptcore.io.read_tasks import ReadPart, ReadTask, plan_object
from ckptcore.io.requests import (
    SIZES,
    NearRanges,
    Sizes,
    near_ranges,
    reads_by_key,
    requests_of,
)
from ckptcore.io.threads import IOThreads, WorkerPool, ask_each
from ckptcore.model import ChunkRead, HostArray, ObjectRecord, ReadItem
from ckptcore.protocols import ChunkIndex, StorageAddress, StorageBackend

__all__ = ["ObjectReader"]

_RECENT_BYTES: Final = 32 << 20
"""Verified blocks that are kept: small reads beside each other, of slices or encoded chunks, need the rest of them."""

_SUPPOSED_BYTES: Final = 1 << 30
"""Most bytes that are allocated because the root states them, before the storage has confirmed them. The memory is not
touched, and is released if an object is missing or too short."""


class ObjectReader:
    """A `ckptcore.protocols.ReadStore` over a storage. Any thread.

    Attributes:
        objects: what is known of the objects, by key.
        bytes_read: bytes requested for chunks and slices, blocks read whole included.
        bytes_got: bytes got for all else: encoded chunks, and indexes that locate them.
        requests: ranges of bytes requested for chunks and slices.
        counting: held while these change.
    """

    def __init__(
        self,
        storage: StorageBackend,
        objects: Mapping[str, ObjectRecord],
        threads: IOThreads,
        *,
        verify: bool = True,
        strict: bool = False,
        progress: Callable[[int], None] | None = None,
        sizes: Sizes = SIZES,
    ) -> None:
        """Read from `storage`.

        Args:
            storage: where the objects are.
            objects: what is known of them, by key; may be hostile. Objects without checksums are read without
                verification, except for chunks with a checksum behind them.
            threads: read chunks, together with the calling thread.
            verify: compare checksums.
            strict: refuse other objects; else they are read without verification.
            progress: called with a number of bytes each time that many more are in their arrays, from any thread.
            sizes: how much is moved at a time.
        """
        self._storage = storage
        self.objects = objects
        self._threads = threads
        self._verify = verify
        self._strict = strict
        self._progress = progress
        suited = requests_of(storage)
        self._concurrency = suited.concurrency
        self._request_bytes = suited.request_bytes
        self._far = threads.at_once(self._concurrency) > threads.count
        self._sizes = sizes.for_requests(self._request_bytes) if self._far else sizes
        # While a request waits for its first byte, a far storage delivers a good part of another one.
        self._gap_bytes = self._request_bytes // (4 if self._far else 16)
        self._sums: dict[str, RecordedChecksums] = {}
        self._recent = RecentBlocks(max(2, _RECENT_BYTES // self._sizes.block))
        self.counting = threading.Lock()
        self.bytes_read = 0
        self.bytes_got = 0
        self.requests = 0

    @property
    def address(self) -> StorageAddress | None:
        """The address for native I/O, or None."""
        return self._storage.address

    def size(self, key: str) -> int:
        """Return the bytes of an object.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: the object is refused.
        """
        record = self._record(key)
        return self._storage.size(key) if record is None else record.size

    def stored_sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Return the bytes of objects by asking the storage, not their records; many at once if that is faster.

        Raises:
            ObjectNotFoundError
        """
        asked = list(keys)
        if self._far and len(asked) > 1:
            sizes = ask_each(self._threads, asked, self._storage.size, parallelism=self._concurrency)
        else:
            sizes = [self._storage.size(key) for key in asked]
        return dict(zip(asked, sizes, strict=True))

    def size_limits(self, keys: Iterable[str]) -> dict[str, int]:
        """Return limits of the bytes of objects, for callers that allocate memory before they read.

        For small objects on a far storage this is the recorded size, up to a limit for all of them together: the one
        request that reads such an object tells if the size is right. The storage is asked for the sizes of others.

        Raises:
            ObjectNotFoundError
        """
        asked = list(keys)
        supposed: dict[str, int] = {}
        if self._far:
            left = _SUPPOSED_BYTES
            recorded = [record for key in asked if (record := self.objects.get(key)) is not None]
            for record in sorted(recorded, key=lambda record: record.size):
                left -= record.size
                if left < 0 or record.size > self._request_bytes:
                    break
                supposed[record.key] = record.size
        return {**supposed, **self.stored_sizes([key for key in asked if key not in supposed])}

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``."""
        return self._storage.list_names(prefix)

    def _record(self, key: str) -> ObjectRecord | None:
        """Return what is known of an object; None if nothing is, and it may be read."""
        record = self.objects.get(key)
        if record is None and self._strict:
            raise CorruptCheckpointError(
                f"{key!r} is asked for, but the root does not list this object: expected one of the "
                f"{len(self.objects)} that it lists, found a name that it does not know, so what describes the "
                "arrays is damaged: restore the checkpoint from a copy, or load another one",
                key=key,
            )
        return record

    def _checksums(self, key: str) -> RecordedChecksums | None:
        record = self._record(key)
        if record is None or not self._verify or not record.checksums:
            return None
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = RecordedChecksums(record, block_bytes=self._sizes.block)
        return sums

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of an object; fewer if it ends before.

        Raises:
            ObjectNotFoundError, ChecksumError
            CorruptCheckpointError: it is shorter than was recorded, or refused.
        """
        sums = self._checksums(key)
        if sums is None:
            data = self._storage.get(key, start, stop)
            self._count(len(data))
            if (record := self.objects.get(key)) is not None:
                end = record.size if stop is None else min(stop, record.size)
                if start + len(data) < end:
                    raise _too_short(key, start, end, len(data))
            return data
        size = self.objects[key].size
        stop = size if stop is None else min(stop, size)
        if start >= stop:
            return b""
        block = self._sizes.block
        begin, end = start // block * block, min(-(-stop // block) * block, size)
        # The blocks at the ends, of which a part is requested, may be kept from reads beside this one.
        head = self._recent.find(key, begin) if begin < start or stop < min(begin + block, size) else None
        low = begin if head is None else min(begin + block, size)
        foot = self._recent.find(key, (end - 1) // block * block) if stop < end and low < end else None
        high = end if foot is None else (end - 1) // block * block
        read = self._read_blocks(key, low, high, sums) if low < high else b""
        for edge in {begin, (end - 1) // block * block}:
            edge_stop = min(edge + block, size)
            if low <= edge < high and (edge < start or stop < edge_stop):
                self._recent.keep(key, edge, read[edge - low : edge_stop - low])
        data = read if head is None and foot is None else b"".join((head or b"", read, foot or b""))
        return data if begin == start and end == stop else data[start - begin : stop - begin]

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        """Return what `get` does for each range, or None if there is no such object. Requests near ranges together.

        Raises:
            ChecksumError
            CorruptCheckpointError: an object is shorter than was recorded, or refused.
        """
        groups = list(near_ranges(ranges, self._gap_bytes, self._request_bytes))
        if self._far and len(groups) > 1:
            asked = ask_each(self._threads, groups, self._get_if_there, parallelism=self._concurrency)
        else:
            asked = [self._get_if_there(group) for group in groups]
        found: list[bytes | None] = [None] * len(ranges)
        for group, data in zip(groups, asked, strict=True):
            if data is None:
                continue
            for number in group.numbers:
                _, start, stop = ranges[number]
                found[number] = data[start - group.start : None if stop is None else stop - group.start]
        return found

    def _get_if_there(self, group: NearRanges) -> bytes | None:
        try:
            return self.get(group.key, group.start, group.stop)
        except ObjectNotFoundError:
            return None

    def _count(self, nbytes: int) -> None:
        with self.counting:
            self.bytes_got += nbytes

    def _read_blocks(self, key: str, begin: int, end: int, sums: RecordedChecksums) -> bytes:
        """Return whole blocks of an object, verified."""
        data = self._storage.get(key, begin, end)
        self._count(len(data))
        if len(data) != end - begin:
            raise _too_short(key, begin, end, len(data))
        sums.verify(begin, memoryview(data))
        return data

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Generator[int, None, None]:
        """Fill targets; yields the number of a target once all its chunks here are read and verified.

        A chunk is verified by the checksums of the blocks of its object. If the object has none, or the blocks are
        clearly more bytes, it is read whole and verified by the checksum behind it.

        The thread that asks for the next number reads too. When this ends, however it does, no thread writes into a
        target any more.

        Raises:
            ObjectNotFoundError, ChecksumError
            CorruptCheckpointError: an object ends too early or is refused, or its description makes no sense.
        """
        by_key: dict[str, list[ChunkRead]] = {}
        waiting: dict[int, int] = {}
        for read in reads:
            by_key.setdefault(read.key, []).append(read)
            for number, _, _ in read.targets:
                waiting[number] = 0
        unknown = [key for key in by_key if self._record(key) is None]
        sizes = self.stored_sizes(unknown) if unknown else {}
        tasks: deque[ReadTask] = deque()
        sums: dict[str, RecordedChecksums | None] = {}
        for key, of_key in by_key.items():
            sums[key] = self._checksums(key)
            size = sizes[key] if key in sizes else self.objects[key].size
            tasks.extend(self._plan(key, size, of_key, sums[key] is not None))
        nbytes = 0
        for task in tasks:
            nbytes += task.nbytes
            for number in task.numbers:
                waiting[number] += 1
            for number in task.checked_numbers:
                waiting[number] += 1
        complete = [number for number, count in waiting.items() if count == 0]
        yield from complete
        if not tasks:
            return
        reading = _Reading(self, self._storage, tasks, sums, waiting, self._progress)
        pool: WorkerPool | None = None
        if len(tasks) > 1 and (self._far or nbytes >= self._sizes.inline):
            others = min(self._threads.at_once(self._concurrency), len(tasks)) - 1
            pool = self._threads.start(reading.work, others, self._concurrency)
        try:
            yield from reading.results(len(waiting) - len(complete))
        finally:
            reading.stopped = True
            if pool is not None:
                pool.join()

    def _plan(self, key: str, size: int, reads: Sequence[ChunkRead], recorded: bool) -> list[ReadTask]:
        """Plan the reads of an object of `size` bytes, of whose blocks checksums are recorded or not."""
        sizes, request, gap = self._sizes, self._request_bytes, self._gap_bytes
        shape = plain = ObjectShape(key, size, 1, max(sizes.task, request), gap, sizes)
        if recorded:
            # Blocks that are hashed right after they are read are still in cache.
            shape = ObjectShape(
                key, size, sizes.block, max(sizes.block, request // sizes.block * sizes.block), gap, sizes
            )
        return plan_object(shape, plain, reads, verify=self._verify)

    def read_boxes(self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> Iterator[int]:
        """See `ckptcore.io.chunk_reads.read_boxes`."""
        return read_boxes(index, items, buffers, self)

    def hold(self, key: str) -> BlockCache | None:
        """Open an object for many small reads, all of the object that is there now. None if the storage cannot.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: the object is refused.
        """
        sums = self._checksums(key)
        reader = self._storage.hold_open(key)
        if reads_by_key(reader):
            return None
        size, block = self.size(key), self._sizes.block
        return BlockCache(key, reader, size, sums, block_bytes=block, recent=self._recent, count=self._add_read)

    def _add_read(self, nbytes: int) -> None:
        with self.counting:
            self.bytes_read += nbytes
            self.requests += 1


class _Reading:
    """Tasks that several threads perform."""

    def __init__(
        self,
        reader: ObjectReader,
        storage: StorageBackend,
        tasks: deque[ReadTask],
        sums: Mapping[str, RecordedChecksums | None],
        waiting: dict[int, int],
        progress: Callable[[int], None] | None,
    ) -> None:
        self.stopped = False
        self._reader = reader
        self._objects = {key: storage.open_reader(key) for key in sums}
        self._tasks = tasks
        self._sums = sums
        self._waiting = waiting
        self._progress = progress
        self._counting = reader.counting
        self._done: queue.SimpleQueue[list[int] | BaseException] = queue.SimpleQueue()

    def work(self) -> None:
        """Perform tasks until none is left, reading is stopped or something fails. Never raises."""
        scratch = _Scratch()
        try:
            while (numbers := self._next(scratch)) is not None:
                if numbers:
                    self._done.put(numbers)
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits for results
            self.stopped = True
            self._done.put(error)

    def results(self, count: int) -> Iterator[int]:
        """Yield the next `count` targets that are complete. This thread performs tasks while there is none."""
        scratch = _Scratch()
        while count:
            numbers: list[int] | BaseException | None = None
            if self._done.empty():
                numbers = self._next(scratch)
            if numbers is None:
                numbers = self._done.get()
            if isinstance(numbers, BaseException):
                raise numbers
            count -= len(numbers)
            yield from numbers

    def _next(self, scratch: _Scratch) -> list[int] | None:
        """Perform the next task. Return the targets it completes; None without a task, or if reading was stopped."""
        try:
            task = self._tasks.popleft()
        except IndexError:
            return None
        sums = self._sums[task.key]
        taken = requests = 0
        checked: list[int] = []
        for parts in task.requests:
            if self.stopped:
                return None
            memory = parts[0].memory() if len(parts) == 1 else None
            if memory is not None:
                requests += self._read_direct(task, parts[0].start, memory, sums)
                taken += len(memory)
            else:
                requests += 1
                taken += self._read_parts(task.key, parts, sums, scratch, checked)
        if self.stopped:  # perhaps in the middle of an array
            return None
        complete = []
        with self._counting:
            self._reader.bytes_read += task.nbytes
            self._reader.requests += requests
            for number in itertools.chain(task.numbers, checked):
                left = self._waiting[number] - 1
                self._waiting[number] = left
                if left == 0:
                    complete.append(number)
        if self._progress is not None:
            self._progress(taken)
        return complete

    def _read_direct(self, task: ReadTask, start: int, memory: memoryview, sums: RecordedChecksums | None) -> int:
        """Read straight into an array, and verify pieces while they are in cache. Return the number of requests."""
        most = task.most
        position, stop, requests = start, start + len(memory), 0
        while position < stop and not self.stopped:
            end = min(stop, (position // most + 1) * most)
            piece = memory[position - start : end - start]
            self._read_into(task.key, ((position, piece),))
            requests += 1
            if sums is not None:
                sums.verify(position, piece)
            position = end
        return requests

    def _read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        try:
            self._objects[key].get_into(ranges)
        except CorruptCheckpointError as error:
            error.key = key  # a storage around this one may name the object by a longer key, which locates no arrays
            raise

    def _read_parts(
        self, key: str, parts: Sequence[ReadPart], sums: RecordedChecksums | None, scratch: _Scratch, checked: list[int]
    ) -> int:
        """Read parts that follow each other by one request, verify them, and copy to their destinations.

        Adds to `checked` the targets that waited for a chunk which is complete now. Returns the bytes copied.
        """
        start, stop = parts[0].start, parts[-1].stop
        spare = scratch.memory(stop - start)
        buffers: list[tuple[int, memoryview]] = []
        for part in parts:
            buffers.extend(part.buffers(spare[part.start - start : part.stop - start]))
        self._read_into(key, buffers)
        if parts[0].checks:  # all parts are of whole chunks
            for part in parts:
                for check in part.checks:
                    if check.compare(part.start, part.stop, buffers):
                        checked.extend(check.numbers)
        elif sums is not None:
            sums.verify_pieces(start, [buffer for _, buffer in buffers])
        taken = 0
        for part in parts:
            for destination, low, high in part.destinations:
                taken += destination.take(spare, start, low, high)
            for _, low, high in part.direct:
                taken += high - low
        return taken


class _Scratch:
    """Memory of one thread for bytes that go to several destinations."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def memory(self, nbytes: int) -> memoryview:
        """Return memory of this many bytes; overwritten by the next call."""
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = map_pages(nbytes).memory()
        return self._memory[:nbytes]


def _too_short(key: str, start: int, stop: int, found: int) -> CorruptCheckpointError:
    """Return the error for an object that ends before bytes that it was recorded to have."""
    return CorruptCheckpointError(
        f"{key!r} is too short: expected bytes {start} to {stop}, found {found} of them; "
        "it was cut off or replaced: restore it from a copy, or load another checkpoint",
        key=key,
        start=start + found,
        stop=stop,
    )
