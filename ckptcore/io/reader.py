"""The objects of a checkpoint while it is read: moved by the I/O threads, verified, and put into arrays."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.checked_tiles import ChunkShape, plan_checked
from ckptcore.io.checksums import RecordedChecksums
from ckptcore.io.chunk_reads import read_boxes
from ckptcore.io.memory import map_pages
from ckptcore.io.near_ranges import NearRanges, near_ranges
from ckptcore.io.object_sizes import SIZES, ObjectSizes, Sizes
from ckptcore.io.read_tasks import ObjectShape, ReadPart, ReadTask, destinations_of, group_reads, plan_object
from ckptcore.io.requests import requests_of
from ckptcore.io.sources import EdgeBlocks, hold_object, open_reader
from ckptcore.io.threads import IOThreads, ask_each
from ckptcore.model import ChunkRead, HostArray, ObjectRecord, ReadItem
from ckptcore.protocols import ChunkIndex, StorageAddress, StorageBackend

if TYPE_CHECKING:
    from ckptcore.io.held_objects import HeldObject, Holding

__all__ = ["ObjectReader"]

_EDGE_BLOCKS: Final = 16
"""Blocks that are kept for who asks for the rest of them: encoded chunks lie beside each other, and are asked for one by one."""


class ObjectReader:
    """A `ckptcore.protocols.ReadStore` over a storage. Any thread.

    Attributes:
        object_sizes: how large the objects are.
        objects: what is known of them, by key.
        bytes_read: bytes asked of the storage for chunks, blocks read whole included.
        bytes_got: bytes got of the storage for all else: encoded chunks, and what tells where they are.
        requests: ranges of bytes asked of the storage for chunks.
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
            objects: what is known of them, by key; may be hostile. Those without checksums are read without
                verification, but for chunks with a checksum behind them.
            threads: what reads chunks, together with the calling thread.
            verify: whether checksums are compared.
            strict: whether other objects are refused; else they are read without verification.
            progress: called with a number of bytes each time that many more are in their arrays, from any thread.
            sizes: how much is moved at a time.
        """
        self._storage = storage
        self.objects = objects
        self._threads = threads
        self._verify = verify
        self._strict = strict
        self._progress = progress
        self._concurrency = requests_of(storage).concurrency
        self._far = threads.at_once(self._concurrency) > threads.count
        self._sizes = sizes.for_requests(storage.request_bytes) if self._far else sizes
        # In the time that a request waits for its first byte, a good part of one comes from a storage that is far.
        self._gap_bytes = storage.request_bytes // (4 if self._far else 16)
        self._sums: dict[str, RecordedChecksums] = {}
        self.object_sizes = ObjectSizes(storage, objects, threads)
        self._edges = EdgeBlocks(_EDGE_BLOCKS)
        self._holding: Holding | None = None
        self.counting = threading.Lock()
        self.bytes_read = 0
        self.bytes_got = 0
        self.requests = 0

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O, or None."""
        return self._storage.address

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: it is refused.
        """
        record = self._record(key)
        return self._storage.size(key) if record is None else record.size

    def _sizes_of(self, keys: Iterable[str]) -> dict[str, int]:
        """Bytes of objects, by key; those that are not known are asked for."""
        records = {key: self._record(key) for key in keys}
        known = {key: record.size for key, record in records.items() if record is not None}
        asked = [key for key in records if key not in known]
        return {**known, **self.object_sizes.present(asked)} if asked else known

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``."""
        return self._storage.list_names(prefix)

    def _record(self, key: str) -> ObjectRecord | None:
        """What is known of an object, or None where it is read all the same."""
        record = self.objects.get(key)
        if record is None and self._strict:
            raise CorruptCheckpointError(
                f"{key!r} is asked for, but the root does not list this object: expected one of the {len(self.objects)} "
                "that it lists, found a name that it does not know, so what describes the arrays is damaged: restore the "
                "checkpoint from a copy, or load another one",
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
        """Bytes `start` to `stop` of an object; fewer where it ends before.

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
        # Blocks at the ends, of which a part is wanted, may have been read for what lies beside this.
        head = self._edges.find(key, begin) if begin < start or stop < min(begin + block, size) else None
        low = begin if head is None else min(begin + block, size)
        foot = self._edges.find(key, (end - 1) // block * block) if stop < end and low < end else None
        high = end if foot is None else (end - 1) // block * block
        read = self._read_blocks(key, low, high, sums) if low < high else b""
        for edge in {begin, (end - 1) // block * block}:
            edge_stop = min(edge + block, size)
            if low <= edge < high and (edge < start or stop < edge_stop):
                self._edges.keep(key, edge, read[edge - low : edge_stop - low])
        data = read if head is None and foot is None else b"".join((head or b"", read, foot or b""))
        return data if begin == start and end == stop else data[start - begin : stop - begin]

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        """What `get` gives of each range, None where there is no such object; near ranges together, and many at once.

        Raises:
            ChecksumError
            CorruptCheckpointError: an object is shorter than was recorded, or refused.
        """
        groups = list(near_ranges(ranges, self._gap_bytes, self._storage.request_bytes))
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
        """Whole blocks of an object, verified."""
        data = self._storage.get(key, begin, end)
        self._count(len(data))
        if len(data) != end - begin:
            raise _too_short(key, begin, end, len(data))
        sums.verify(begin, memoryview(data))
        return data

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Generator[int, None, None]:
        """Fill targets; yields the number of a target once all its chunks here are read and verified.

        A chunk with a checksum behind it is verified by that, and read whole for it, where the object has no checksums of
        blocks or the blocks it lies in are clearly more bytes; else by those.

        The thread that asks for the next number reads too. When this ends, however it does, no thread writes into a
        target any more.

        Raises:
            ObjectNotFoundError, ChecksumError
            CorruptCheckpointError: where an object ends too early or is refused, or what describes it makes no sense.
        """
        tasks: deque[ReadTask] = deque()
        sums: dict[str, RecordedChecksums | None] = {}
        by_key = group_reads(reads)
        nbytes_of = self._sizes_of(by_key)
        for key, of_key in by_key.items():
            sums[key] = self._checksums(key)
            tasks.extend(self._plan(key, nbytes_of[key], of_key, sums[key] is not None))
        waiting: dict[int, int] = {number: 0 for read in reads for number, _, _ in read.targets}
        for task in tasks:
            for number in task.numbers:
                waiting[number] += 1
            for number in task.checked_numbers:
                waiting[number] += 1
        complete = [number for number, count in waiting.items() if count == 0]
        yield from complete
        if not tasks:
            return
        reading = _Reading(self, self._storage, tasks, sums, waiting, self._progress)
        nbytes = sum([task.nbytes for task in tasks])
        worth_it = self._far or nbytes >= self._sizes.inline
        helpers = min(self._threads.at_once(self._concurrency), len(tasks)) - 1 if worth_it else 0
        pool = self._threads.start(reading.work, helpers, self._concurrency)
        try:
            yield from reading.results(len(waiting) - len(complete))
        finally:
            reading.stopped = True
            pool.join()

    def read_boxes(self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> Iterator[int]:
        """See `ckptcore.io.chunk_reads.read_boxes`."""
        return read_boxes(index, items, buffers, self)

    def hold(self, key: str) -> HeldObject | None:
        """An object, open for reads of parts of it that are all of what is there now; None where the storage does not hold objects open.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: it is refused.
        """
        sums = self._checksums(key)
        reader = hold_object(self._storage, key)
        if reader is None:
            return None
        # Who only saves or loads need not wait for it.
        from ckptcore.io.held_objects import Holding

        with self.counting:
            if self._holding is None:
                self._holding = Holding(self._sizes.block, self._add_read)
        return self._holding.of(key, reader, self._sizes_of((key,))[key], sums)

    def _add_read(self, nbytes: int) -> None:
        with self.counting:
            self.bytes_read += nbytes
            self.requests += 1

    def _plan(self, key: str, size: int, reads: Sequence[ChunkRead], recorded: bool) -> list[ReadTask]:
        """Tasks that read chunks of one object of so many bytes, of whose blocks checksums were recorded or not."""
        sizes = self._sizes
        request = self._storage.request_bytes
        gap = self._gap_bytes
        plain = ObjectShape(key, size, 1, max(sizes.task, request), gap, sizes)
        # Blocks that are hashed right after they are read are still in cache.
        blocks = ObjectShape(key, size, sizes.block, max(sizes.block, request // sizes.block * sizes.block), gap, sizes)
        shape = blocks if recorded else plain
        if self._verify and any(read.checksum is not None for read in reads):
            return plan_checked(shape, ChunkShape(key, size, 1, plain.part_bytes, gap, sizes), reads)
        return plan_object(shape, [destination for read in reads for destination in destinations_of(shape, read)])


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
        self._objects = {key: open_reader(storage, key) for key in sums}
        self._tasks = tasks
        self._sums = sums
        self._waiting = waiting
        self._progress = progress
        self._counting = reader.counting
        self._done: queue.SimpleQueue[list[int] | BaseException] = queue.SimpleQueue()

    def work(self) -> None:
        """Perform tasks until none is left, reading is stopped or something fails. Never raises."""
        hand = _Hand()
        try:
            while (numbers := self._next(hand)) is not None:
                if numbers:
                    self._done.put(numbers)
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits for results
            self.stopped = True
            self._done.put(error)

    def results(self, count: int) -> Iterator[int]:
        """The next `count` targets that are complete; this thread performs tasks while there is none."""
        hand = _Hand()
        while count:
            numbers: list[int] | BaseException | None = None
            if self._done.empty():
                numbers = self._next(hand)
            if numbers is None:
                numbers = self._done.get()
            if isinstance(numbers, BaseException):
                raise numbers
            count -= len(numbers)
            yield from numbers

    def _next(self, hand: _Hand) -> list[int] | None:
        """Perform the next task: the targets it completes, or None if there is no task or reading was stopped."""
        try:
            task = self._tasks.popleft()
        except IndexError:
            return None
        sums = self._sums[task.key]
        taken = 0
        checked: list[int] = []
        for parts in task.requests:
            if self.stopped:
                return None
            if len(parts) == 1 and parts[0].memory is not None:
                taken += self._read_direct(task, parts[0].start, parts[0].memory, sums, hand)
            else:
                taken += self._read_parts(task.key, parts, sums, hand, checked)
        if self.stopped:  # perhaps in the middle of an array
            return None
        complete = []
        with self._counting:
            self._reader.bytes_read += hand.bytes_read
            self._reader.requests += hand.requests
            for number in itertools.chain(task.numbers, checked):
                left = self._waiting[number] - 1
                self._waiting[number] = left
                if left == 0:
                    complete.append(number)
        hand.bytes_read = hand.requests = 0
        if self._progress is not None:
            self._progress(taken)
        return complete

    def _read_direct(
        self, task: ReadTask, start: int, memory: memoryview, sums: RecordedChecksums | None, hand: _Hand
    ) -> int:
        """Read straight into an array, as much at once as suits the storage, and verify it while it is in cache."""
        most = task.most
        position, stop = start, start + len(memory)
        while position < stop and not self.stopped:
            end = min(stop, (position // most + 1) * most)
            piece = memory[position - start : end - start]
            self._read_into(task.key, ((position, piece),))
            hand.requests += 1
            if sums is not None:
                sums.verify(position, piece)
            position = end
        hand.bytes_read += stop - start
        return stop - start

    def _read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        try:
            self._objects[key].get_into(ranges)
        except CorruptCheckpointError as error:
            error.key = key  # a storage around this one has a longer name for it, by which nobody finds the arrays
            raise

    def _read_parts(
        self, key: str, parts: Sequence[ReadPart], sums: RecordedChecksums | None, hand: _Hand, checked: list[int]
    ) -> int:
        """Read parts that follow each other by one request, verify them, and let destinations have what they want of them.

        The targets that waited for a chunk which is complete now are added to `checked`.
        """
        start, stop = parts[0].start, parts[-1].stop
        spare = hand.memory(stop - start)
        buffers: list[tuple[int, memoryview]] = []
        for part in parts:
            if part.memory is not None:
                buffers.append((part.start, part.memory))
            else:
                buffers.extend(part.buffers(spare[part.start - start : part.stop - start]))
        self._read_into(key, buffers)
        hand.bytes_read += stop - start
        hand.requests += 1
        if parts[0].checks:  # all parts are of whole chunks then
            for part in parts:
                for check in part.checks:
                    if check.compare(part.start, part.stop, buffers):
                        checked.extend(check.numbers)
        elif sums is not None:
            sums.verify_pieces(start, [buffer for _, buffer in buffers])
        taken = 0
        for part in parts:
            if part.memory is not None:
                taken += len(part.memory)
                continue
            for destination, low, high in part.destinations:
                taken += destination.take(spare, start, low, high)
            for _, low, high in part.holes:
                taken += high - low
        return taken


class _Hand:
    """What one thread keeps while it performs tasks: memory to read into what goes to several places, and counts."""

    __slots__ = ("_memory", "bytes_read", "requests")

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self.bytes_read = 0
        self.requests = 0

    def memory(self, nbytes: int) -> memoryview:
        """Memory of this many bytes; overwritten by the next call."""
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = map_pages(nbytes).memory()
        return self._memory[:nbytes]


def _too_short(key: str, start: int, stop: int, found: int) -> CorruptCheckpointError:
    """What is raised where an object ends before bytes that it was recorded to have."""
    return CorruptCheckpointError(
        f"{key!r} is too short: expected bytes {start} to {stop}, found {found} of them; "
        "it was cut off or replaced: restore it from a copy, or load another checkpoint",
        key=key,
        start=start + found,
        stop=stop,
    )
