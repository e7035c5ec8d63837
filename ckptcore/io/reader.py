"""Reads of the objects of a checkpoint: I/O threads fetch bytes, verify them and copy them into arrays."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.checksums import RecordedChecksums
from ckptcore.io.chunk_reads import read_boxes
from ckptcore.io.memory import map_pages
from ckptcore.io.read_tasks import ReadPart, ReadTask, plan_object
from ckptcore.io.threads import (
    SIZES,
    CoalescedRange,
    IOThreads,
    ObjectShape,
    Sizes,
    WorkerPool,
    coalesce,
    map_ordered,
    requests_of,
)
from ckptcore.model import ChunkRead, HostArray, ObjectRecord, ReadItem
from ckptcore.protocols import ChunkIndex, StorageAddress, StorageBackend
from ckptcore.protocols.storage import RangeReader, ReaderByKey

S = TypeVar("S")
T = TypeVar("T")

if TYPE_CHECKING:
    from ckptcore.io.block_cache import BlockCache, RecentBlocks

_RECENT_BYTES: Final = 32 << 20
"""Bytes of verified blocks that are cached, because small reads close to each other need parts of the same block."""

_UNCONFIRMED_BYTES: Final = 1 << 30
"""Maximum bytes that are allocated for sizes that only the root states and the storage has not confirmed. The memory is
not touched, and is released if an object is missing or too short."""


class ObjectReader:
    """A `ckptcore.protocols.ReadStore` over a storage. Thread-safe.

    Attributes:
        objects: records of the objects, by key.
        bytes_read: bytes requested for chunks and slices, including the rest of blocks.
        bytes_got: bytes of all other reads: encoded chunks, and the indexes that locate them.
        requests: ranges of bytes requested for chunks and slices.
        counting: the lock for the three counters.
        progress: called from any thread with the number of bytes that were copied into arrays.
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
            storage: the storage of the objects.
            objects: records of the objects, by key; may be hostile. Objects without checksums are not verified, except
                for chunks with an inline checksum.
            threads: read chunks, together with the calling thread.
            verify: compare checksums.
            strict: refuse objects without a record. Otherwise they are read without verification.
            progress: see the attribute.
            sizes: the sizes of tasks and blocks.
        """
        self._storage = storage
        self.objects = objects
        self._threads = threads
        self._verify = verify
        self._strict = strict
        self.progress = progress
        suited = requests_of(storage)
        self._concurrency = suited.concurrency
        self._request_bytes = suited.request_bytes
        self._is_remote = threads.parallelism(self._concurrency) > threads.count
        self._sizes = sizes.for_requests(self._request_bytes) if self._is_remote else sizes
        # Read larger gaps from a remote storage: while it prepares the answer to one more request, it could deliver a
        # large part of another answer.
        self._gap_bytes = self._request_bytes // (4 if self._is_remote else 16)
        self._sums: dict[str, RecordedChecksums] = {}
        self.counting = threading.Lock()
        self.bytes_read = 0
        self.bytes_got = 0
        self.requests = 0

    @functools.cached_property
    def _recent(self) -> RecentBlocks:
        from ckptcore.io.block_cache import RecentBlocks  # only reads of parts of objects need it

        return RecentBlocks(max(2, _RECENT_BYTES // self._sizes.block))

    @property
    def address(self) -> StorageAddress | None:
        """The address for native I/O, or None."""
        return self._storage.address

    def size(self, key: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: the object has no record, and the reader is `strict`.
        """
        record = self._record(key)
        return self._storage.size(key) if record is None else record.size

    def stored_sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Return the sizes of objects in bytes as the storage states them, with concurrent requests if that is faster.

        Raises:
            ObjectNotFoundError
        """
        asked = list(keys)
        return dict(zip(asked, self._ask_each(asked, self._storage.size), strict=True))

    def _ask_each(self, items: Sequence[S], ask: Callable[[S], T]) -> Sequence[T]:
        """Return the result of a request for each item, with concurrent requests if that is faster."""
        if self._is_remote and len(items) > 1:
            return map_ordered(self._threads, items, ask, parallelism=self._concurrency)
        return [ask(item) for item in items]

    def size_limits(self, keys: Iterable[str]) -> dict[str, int]:
        """Return upper limits for the sizes of objects in bytes, for callers that allocate memory before they read.

        For small objects on a remote storage, the limit is the recorded size, because the request that reads such an
        object checks the size. The sum of such sizes is limited. The storage is asked for all other sizes.

        Raises:
            ObjectNotFoundError
        """
        asked = list(keys)
        unconfirmed: dict[str, int] = {}
        if self._is_remote:
            left = _UNCONFIRMED_BYTES
            recorded = [record for key in asked if (record := self.objects.get(key)) is not None]
            for record in sorted(recorded, key=lambda record: record.size):
                left -= record.size
                if left < 0 or record.size > self._request_bytes:
                    break
                unconfirmed[record.key] = record.size
        return {**unconfirmed, **self.stored_sizes([key for key in asked if key not in unconfirmed])}

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Return the names one level below a directory, sorted. Names of directories end in ``/``."""
        return self._storage.list_names(prefix)

    def _record(self, key: str) -> ObjectRecord | None:
        """Return the record of an object; None if it has no record and may be read."""
        record = self.objects.get(key)
        if record is None and self._strict:
            raise CorruptCheckpointError(
                f"{key!r} is not one of the {len(self.objects)} objects that the root lists: the metadata of the "
                "arrays is damaged. Restore the checkpoint from a copy, or load another one",
                key=key,
            )
        return record

    def _checksums(self, key: str) -> RecordedChecksums | None:
        record = self._record(key)
        if record is None or not self._verify or not record.checksums:
            return None
        sums = self._sums.get(key)
        if sums is None:  # two threads may both set it, to equal objects
            sums = self._sums[key] = RecordedChecksums(record, block_bytes=self._sizes.block)
        return sums

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of an object; fewer if it ends earlier.

        Raises:
            ObjectNotFoundError, ChecksumError
            CorruptCheckpointError: the object is shorter than recorded, or has no record and the reader is `strict`.
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
        # Another request takes longer than the rest of a large block, which the next read may need.
        block = self._sizes.block if self._is_remote else sums.block_bytes
        begin, end = start // block * block, min(-(-stop // block) * block, size)
        # If only a part of the first or last block is requested, a read of its other part may have cached the block.
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

    def get_blocks(self, key: str, begin: int, end: int) -> bytes:
        """Return whole blocks of an object, and read only these. It raises what `get` raises."""
        sums = self._checksums(key)
        return self.get(key, begin, end) if sums is None else self._read_blocks(key, begin, end, sums)

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        """Return the result of `get` for each range, or None if there is no such object. Coalesces close ranges.

        Raises:
            ChecksumError
            CorruptCheckpointError: an object is shorter than recorded, or has no record and the reader is `strict`.
        """
        groups = list(coalesce(ranges, self._gap_bytes, self._request_bytes))
        results: list[bytes | None] = [None] * len(ranges)
        for group, data in zip(groups, self._ask_each(groups, self._get_or_none), strict=True):
            if data is None:
                continue
            for number in group.numbers:
                _, start, stop = ranges[number]
                results[number] = data[start - group.start : None if stop is None else stop - group.start]
        return results

    def _get_or_none(self, group: CoalescedRange) -> bytes | None:
        try:
            return self.get(group.key, group.start, group.stop)
        except ObjectNotFoundError:
            return None

    def _count(self, nbytes: int) -> None:
        with self.counting:
            self.bytes_got += nbytes

    def _read_blocks(self, key: str, begin: int, end: int, sums: RecordedChecksums) -> bytes:
        """Read and verify whole blocks of an object."""
        data = self._storage.get(key, begin, end)
        self._count(len(data))
        if len(data) != end - begin:
            raise _too_short(key, begin, end, len(data))
        sums.verify(begin, memoryview(data))
        return data

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Generator[int, None, None]:
        """Fill targets; yields the number of a target once all its chunks in `reads` are read and verified.

        A chunk is verified by the checksums of the blocks of its object. There are two exceptions for a chunk with an
        inline checksum: if the object has no block checksums, or if whole blocks have clearly more bytes than the
        chunk, it is read whole and verified by its inline checksum. Without any checksum, a chunk is not verified.

        The thread that asks for the next number reads too. After the end of this generator, even by an error, no thread
        writes into a target.

        Raises:
            ObjectNotFoundError, ChecksumError
            CorruptCheckpointError: an object ends too early, has invalid metadata, or has no record and the reader is
                `strict`.
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
            tasks.extend(self._plan(key, size, of_key, sums[key]))
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
        reading = _ChunkReading(self, tasks, sums, waiting)
        pool: WorkerPool | None = None
        # Waking other threads takes longer than a small local read.
        if len(tasks) > 1 and (self._is_remote or nbytes >= self._sizes.inline):
            others = min(self._threads.parallelism(self._concurrency), len(tasks)) - 1
            pool = self._threads.start(reading.work, others, self._concurrency)
        try:
            yield from reading.results(len(waiting) - len(complete))
        finally:
            reading.stopped = True
            if pool is not None:
                pool.join()

    def _plan(self, key: str, size: int, reads: Sequence[ChunkRead], sums: RecordedChecksums | None) -> list[ReadTask]:
        """Plan the reads of an object of `size` bytes. `sums` are the recorded checksums of its blocks."""
        sizes, request, gap = self._sizes, self._request_bytes, self._gap_bytes
        shape = plain = ObjectShape(key, size, 1, max(sizes.task, request), gap, sizes)
        if sums is not None:
            # Request few blocks at a time: a block that is hashed right after its read is still in the cache.
            shape = ObjectShape(
                key, size, sums.block_bytes, max(sizes.block, request // sizes.block * sizes.block), gap, sizes
            )
        return plan_object(shape, plain, reads, verify=self._verify)

    def start(self, work: Callable[[], None]) -> None:
        """See `ckptcore.protocols.ReadStore.start`."""
        self._threads.submit(work)

    def read_boxes(self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> Iterator[int]:
        """See `ckptcore.io.chunk_reads.read_boxes`."""
        return read_boxes(index, items, buffers, self)

    def open_cached(self, key: str) -> BlockCache | None:
        """Open the current version of an object for many small reads; None if the storage cannot keep it open.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: the object has no record, and the reader is `strict`.
        """
        sums = self._checksums(key)
        reader = self._storage.open_stamped(key)
        if isinstance(reader, ReaderByKey):  # a later read could find another object
            return None
        size = self.size(key)
        block = self._sizes.block if sums is None or self._is_remote else sums.block_bytes  # see `get`
        from ckptcore.io.block_cache import BlockCache  # only open checkpoints need it

        return BlockCache(key, reader, size, sums, block_bytes=block, recent=self._recent, count=self._add_read)

    def _add_read(self, nbytes: int) -> None:
        with self.counting:
            self.bytes_read += nbytes
            self.requests += 1


class _ChunkReading:
    """Read tasks that several threads perform."""

    def __init__(
        self,
        reader: ObjectReader,
        tasks: deque[ReadTask],
        sums: Mapping[str, RecordedChecksums | None],
        waiting: dict[int, int],
    ) -> None:
        self.stopped = False
        self._reader = reader
        self._progress = reader.progress  # a later load may set another function
        self._tasks = tasks
        # Objects are open only from their first to their last task, because a process can open a limited number.
        self._objects: dict[str, RangeReader] = {}
        self._left = Counter([task.key for task in tasks])
        self._opening = threading.Lock()
        self._sums = sums
        self._waiting = waiting
        self._done: queue.SimpleQueue[list[int] | BaseException] = queue.SimpleQueue()

    def work(self) -> None:
        """Perform tasks until none is left, the reading is stopped or a task fails. Never raises."""
        scratch = _Scratch()
        try:
            while (numbers := self._next(scratch)) is not None:
                if numbers:
                    self._done.put(numbers)
        except BaseException as error:  # noqa: BLE001  # raised by `results`
            self.stopped = True
            self._done.put(error)

    def results(self, count: int) -> Iterator[int]:
        """Yield the next `count` complete targets. This thread performs tasks while no target is complete."""
        scratch = _Scratch()
        while count:
            numbers: list[int] | BaseException | None = None
            # The caller builds leaves from complete targets, so it gets them before this thread reads more.
            if self._done.empty():
                numbers = self._next(scratch)
            if numbers is None:
                numbers = self._done.get()
            if isinstance(numbers, BaseException):
                raise numbers
            count -= len(numbers)
            yield from numbers

    def _next(self, scratch: _Scratch) -> list[int] | None:
        """Perform the next task. Return the targets that it completes; None if no task is left, or after a stop."""
        try:
            task = self._tasks.popleft()  # atomic, so threads take tasks without a lock
        except IndexError:
            return None
        sums = self._sums[task.key]
        taken = 0
        checked: list[int] = []
        for parts in task.requests:
            if self.stopped:
                return None
            taken += self._read_parts(task.key, parts, sums, scratch, checked)
        with self._opening:
            self._left[task.key] -= 1
            if not self._left[task.key]:
                self._objects.pop(task.key, None)
        if self.stopped:  # an array may be incomplete
            return None
        complete = []
        with self._reader.counting:
            self._reader.bytes_read += task.nbytes
            self._reader.requests += len(task.requests)
            for number in itertools.chain(task.numbers, checked):
                left = self._waiting[number] - 1
                self._waiting[number] = left
                if left == 0:
                    complete.append(number)
        if self._progress is not None:
            self._progress(taken)
        return complete

    def _read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        reader = self._objects.get(key)
        if reader is None:
            with self._opening:
                if (reader := self._objects.get(key)) is None:
                    reader = self._objects[key] = self._reader._storage.open_reader(key)
        try:
            reader.get_into(ranges)
        except CorruptCheckpointError as error:
            error.key = key  # a wrapping storage may name the object by a longer key, which matches no array
            raise

    def _read_parts(
        self, key: str, parts: Sequence[ReadPart], sums: RecordedChecksums | None, scratch: _Scratch, checked: list[int]
    ) -> int:
        """Read adjacent parts by one request, verify them, and copy them to their destinations.

        Adds to `checked` the targets whose last chunk is verified now. Returns the number of bytes copied.
        """
        start, stop = parts[0].start, parts[-1].stop
        spare = scratch.memory(stop - start)
        buffers: list[tuple[int, memoryview]] = []
        for part in parts:
            buffers.extend(part.buffers(spare[part.start - start : part.stop - start]))
        self._read_into(key, buffers)
        if parts[0].checks:  # then all parts of the task have checks: see `plan_object`
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
    """Memory of one thread for bytes with several destinations."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def memory(self, nbytes: int) -> memoryview:
        """Return `nbytes` of memory, which the next call overwrites."""
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = map_pages(nbytes).memory()
        return self._memory[:nbytes]


def _too_short(key: str, start: int, stop: int, nbytes: int) -> CorruptCheckpointError:
    """Return the error for an object that ends before its recorded size."""
    return CorruptCheckpointError(
        f"{key!r} is too short: expected bytes {start} to {stop}, found {nbytes} of them; "
        "it was cut off or replaced: restore it from a copy, or load another checkpoint",
        key=key,
        start=start + nbytes,
        stop=stop,
    )
