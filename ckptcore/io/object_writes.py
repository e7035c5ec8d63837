"""Writes of objects by several threads, and the recorder that layouts write to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Final

from ckptcore.io.checksums import BlockChecksums, checksums_of
from ckptcore.io.memory import map_pages
from ckptcore.io.segments import ObjectSegments, WriteTask, join_segments
from ckptcore.io.threads import SIZES, IOThreads, Sizes, requests_of
from ckptcore.model import ArraySegment, ObjectRecord, Segment
from ckptcore.protocols import ObjectWriter, StorageAddress, StorageBackend
from ckptcore.records import NamedTuple, dataclass


class ObjectWrites:
    """Running writes of objects to a storage. Threads call `work`; once all have returned, one thread calls `end`.

    Objects are started in order, and their segments are opened in order. A thread takes a piece of the last started
    object, or starts the next object. The thread that writes the last piece of an object completes it.
    """

    def __init__(self, recorder: ObjectRecorder, objects: Iterator[tuple[str, Sequence[Segment]]]) -> None:
        """Write to the storage of a recorder, with its options.

        Args:
            recorder: the recorder. Bytes are copied into its buffers of `Sizes.write` bytes, which are reused.
            objects: keys and segments; the next object is taken when a thread starts it.
        """
        self._storage = recorder._storage
        self._objects = objects
        self._sizes = recorder._sizes
        self._checksums = recorder._checksums
        self._bounce = recorder._bounce
        self._progress = recorder._progress
        self._error: BaseException | None = None
        self._stopped = False
        self._taking = threading.Lock()
        self._counting = threading.Lock()
        self._summing = threading.Condition()
        self._current: _Large | None = None
        self._started = 0
        self._unfinished: dict[int, _Large] = {}
        self._records: dict[int, ObjectRecord] = {}

    def work(self) -> None:
        """Write until no work is left or a thread failed. Never raises."""
        bounce: memoryview | None = None
        try:
            while (taken := self._take()) is not None:
                target, task = taken
                if isinstance(target, _Small):
                    self._write_small(target)
                elif task is None:
                    self._finish(target)
                else:
                    if bounce is None:
                        bounce = self._take_bounce()
                    if not self._write_task(target, task, bounce):
                        break
                del taken, target, task  # they refer to the state
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits for the objects
            self._stop(error)
        if bounce is not None:
            self._bounce.append(bounce)

    def end(self, error: BaseException | None = None) -> tuple[ObjectRecord, ...]:
        """Return the records of all objects, in order. After an error, abort unfinished objects and raise it.

        Args:
            error: an error outside of `work` that stops the writes.

        Raises:
            BaseException: the first error of a thread, or the given error.
        """
        if error is not None:
            self._stop(error)
        failure, self._error = self._error, None  # break the cycle with the frames of the error
        if failure is None:
            return tuple([record for _, record in sorted(self._records.items())])
        for target in self._unfinished.values():
            if target.writer is not None:
                target.writer.abort()
            _close_after(failure, target.segments.close_rest())
        self._unfinished.clear()
        try:
            raise failure
        finally:
            del failure

    def _stop(self, error: BaseException) -> None:
        """Stop threads from taking tasks, and wake threads that wait for a checksum."""
        with self._counting:
            if not self._stopped:
                self._stopped = True
                self._error = error
        with self._summing:
            self._summing.notify_all()

    def _take(self) -> tuple[_Small | _Large, WriteTask | None] | None:
        """Return a small object, or a large object with its next task. None if no work is left.

        A large object without a task is complete except for `_finish`.
        """
        with self._taking:
            try:
                while not self._stopped:
                    target = self._current
                    if target is None:
                        started = self._start()
                        if started is None:
                            return None
                        if isinstance(started, _Small):
                            return started, None
                        target = self._current = started
                    task = target.segments.next_task()
                    with self._counting:
                        if task is not None:
                            target.unwritten += 1
                            return target, task
                        target.all_taken = True
                        idle = target.unwritten == 0
                    self._current = None
                    if idle:
                        return target, None
            except BaseException as error:
                self._stop(error)  # under the lock, so that no other thread continues with the segments
                raise
            return None

    def _start(self) -> _Small | _Large | None:
        following = next(self._objects, None)
        if following is None:
            return None
        key, segments = following
        number = self._started
        self._started += 1
        nbytes = [segment.nbytes for segment in segments]
        size = sum(nbytes)
        if size < self._sizes.inline or not size:
            return _Small(number, key, segments, nbytes)
        sums = BlockChecksums(size, block_bytes=self._sizes.block) if self._checksums else None
        large = _Large(number, key, size, ObjectSegments(segments, nbytes, self._sizes), sums)
        with self._counting:
            self._unfinished[number] = large
        return large

    def _write_small(self, target: _Small) -> None:
        closers = [segment.close for segment in target.segments if isinstance(segment, ArraySegment)]
        try:
            data = join_segments(target.segments, target.nbytes)
            writer = self._storage.open_writer(target.key, len(data))
            try:
                if data:
                    writer.write_at(0, data)
                writer.finish()
            except BaseException:
                writer.abort()
                raise
        except BaseException as error:
            _close_after(error, closers)
            raise
        _close_all(closers)
        checksums = checksums_of(data, self._sizes.block) if self._checksums else b""
        self._record(target.number, target.key, len(data), checksums)
        if self._progress is not None:
            sizes = zip(target.segments, target.nbytes, strict=True)
            self._progress(sum([nbytes for segment, nbytes in sizes if isinstance(segment, ArraySegment)]))

    def _write_task(self, target: _Large, task: WriteTask, bounce: memoryview) -> bool:
        """Write a task, and complete the object after its last task. Return False if another thread failed meanwhile.

        The bytes are copied, because arrays may change during the save. All checksums cover the copy that is written.
        """
        data = task.fill(bounce)
        if task.summed:
            self._sum(task, data)
        if task.checksums and not self._place_checksums(task, data):
            return False
        writer = target.open(self._storage)
        if target.sums is not None:
            target.sums.add(task.start, data)
        writer.write_at(task.start, data)
        with self._counting:
            closers = target.segments.written(task)
        _close_all(closers)
        if self._progress is not None:
            self._progress(sum([nbytes for _, nbytes in task.credits]))
        with self._counting:
            target.unwritten -= 1
            last = target.all_taken and target.unwritten == 0
        if last:
            self._finish(target)
        return True

    def _finish(self, target: _Large) -> None:
        assert target.writer is not None  # an object without bytes is small
        target.writer.finish()
        with self._counting:
            del self._unfinished[target.number]
        checksums = b"" if target.sums is None else target.sums.encode()
        self._record(target.number, target.key, target.size, checksums)

    def _record(self, number: int, key: str, size: int, checksums: bytes) -> None:
        with self._counting:
            self._records[number] = ObjectRecord(key, size, checksums)

    def _sum(self, task: WriteTask, data: memoryview) -> None:
        """Compute checksums of this task's bytes while they are in the cache, and wake threads that wait for them."""
        values = [
            (inline, start, stop - start, inline.checksum.of(data[start:stop])) for inline, start, stop in task.summed
        ]
        with self._summing:
            for inline, start, nbytes, value in values:
                inline.add(task.start + start, nbytes, value)
            self._summing.notify_all()

    def _place_checksums(self, task: WriteTask, data: memoryview) -> bool:
        """Copy inline checksums to their positions, once they are computed. Return False if another thread failed.

        The bytes that they cover are in this task, or in tasks taken before it. A thread computes all checksums of a
        task before it waits. So the thread with the earliest task never waits, and there is no deadlock.
        """
        for inline, position, start, stop in task.checksums:
            if inline.data is None:
                with self._summing:
                    while inline.data is None:
                        if self._stopped:
                            return False
                        self._summing.wait()
            data[position : position + stop - start] = inline.data[start:stop]
        return True

    def _take_bounce(self) -> memoryview:
        try:
            return self._bounce.pop()
        except IndexError:
            return map_pages(self._sizes.write).memory()


class _Small(NamedTuple):
    """An object that one thread writes. `nbytes` has the bytes of each segment."""

    number: int
    key: str
    segments: Sequence[Segment]
    nbytes: Sequence[int]


@dataclass(slots=True, eq=False)
class _Large:
    """An object that several threads write.

    Attributes:
        unwritten: the number of tasks that were taken and are not written yet.
        all_taken: True if all tasks were taken.
        writer: None before the first task is written.
    """

    number: int
    key: str
    size: int
    segments: ObjectSegments
    sums: BlockChecksums | None
    unwritten: int = 0
    all_taken: bool = False
    writer: ObjectWriter | None = None
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def open(self, storage: StorageBackend) -> ObjectWriter:
        """Return the writer. The first caller opens it, perhaps by a request, while other objects are written."""
        with self._opening:
            if self.writer is None:
                self.writer = storage.open_writer(self.key, self.size)
            return self.writer


def _close_all(closers: Sequence[Callable[[], None]]) -> None:
    """Call all functions, even if one fails."""
    for number, close in enumerate(closers):
        try:
            close()
        except BaseException as error:
            _close_after(error, closers[number + 1 :])
            raise


def _close_after(error: BaseException, closers: Sequence[Callable[[], None]]) -> None:
    """Call all functions after an error, and add further errors to it as notes."""
    for close in closers:
        try:
            close()
        except Exception as another:  # noqa: BLE001  # reported with the first error
            error.add_note(f"releasing memory failed too: {another!r}")


_CONCURRENT_SMALL_OBJECTS: Final = 8
"""Maximum number of small objects that are written concurrently to a local storage, where writers also mostly wait."""


class ObjectRecorder:
    """A `ckptcore.protocols.WriteStore` over a storage. Thread-safe."""

    def __init__(
        self,
        storage: StorageBackend,
        threads: IOThreads,
        *,
        checksums: bool = True,
        progress: Callable[[int], None] | None = None,
        sizes: Sizes = SIZES,
    ) -> None:
        """Write to `storage`.

        Args:
            storage: the storage.
            threads: write large objects, together with the calling thread.
            checksums: True to record checksums of blocks.
            progress: called after each write with the number of bytes of arrays in it, from any thread.
            sizes: the sizes of tasks and blocks.
        """
        self._storage = storage
        self._threads = threads
        self._checksums = checksums
        self._progress = progress
        requests = requests_of(storage)
        self._sizes = sizes.for_parts(requests.part_bytes)
        self._concurrency = requests.concurrency
        self._records: dict[str, ObjectRecord] = {}
        self._bounce: list[memoryview] = []  # free buffers

    @property
    def address(self) -> StorageAddress | None:
        """The address for native I/O, or None."""
        return self._storage.address

    @property
    def objects(self) -> tuple[ObjectRecord, ...]:
        """The complete objects."""
        return tuple(self._records.values())

    def put(self, key: str, data: bytes) -> None:
        """Write a small object whole."""
        self._storage.put(key, data)
        checksums = checksums_of(data, self._sizes.block) if self._checksums else b""
        self._records[key] = ObjectRecord(key, len(data), checksums)

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """Write an object that consists of these segments, in this order.

        Array segments are opened one after the other, and closed once their bytes are written, or after an error. Bytes
        are copied to a few buffers of 1 MiB or, if the storage has `part_bytes`, to one buffer of that size for each
        running request. Checksums cover the copy that is written, even if the arrays change meanwhile. Inline checksums
        are computed piece by piece, by the thread that writes the piece.

        Raises:
            PluginError: the arrays of a segment do not make up its box, or a checksum covers invalid segments.
            StorageError: the first error of a thread; the object is aborted.
        """
        nbytes = sum([segment.nbytes for segment in segments])
        pieces = -(-nbytes // self._sizes.write) if nbytes >= self._sizes.inline else 1
        self._write_all(iter([(key, segments)]), pieces, self._concurrency)

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """Write objects, concurrently if that is faster on this storage. See `write`.

        On a remote storage, whose `concurrency` exceeds the number of threads for local storages, parts of several
        objects are written concurrently. On any other storage, large objects are written one after the other, and small
        objects concurrently.

        Raises:
            PluginError, StorageError: the first error. No further object is started, and unfinished objects are
                aborted. Some objects may be complete.
        """
        if self._threads.parallelism(self._concurrency) > self._threads.count:
            self._write_all(iter(objects), self._concurrency, self._concurrency)
            return
        for small, several in itertools.groupby(objects, self._is_small):
            if small:
                self._write_small(several)
            else:
                for key, segments in several:
                    self.write(key, segments)

    def _write_small(self, objects: Iterator[tuple[str, Sequence[Segment]]]) -> None:
        some = list(itertools.islice(objects, 2))
        parallelism = _CONCURRENT_SMALL_OBJECTS if len(some) > 1 else 1  # one object needs no threads
        self._write_all(itertools.chain(some, objects), parallelism, parallelism)

    def _is_small(self, entry: tuple[str, Sequence[Segment]]) -> bool:
        return sum([segment.nbytes for segment in entry[1]]) < self._sizes.inline

    def _write_all(self, objects: Iterator[tuple[str, Sequence[Segment]]], parallelism: int, concurrency: int) -> None:
        writing = ObjectWrites(self, objects)
        try:
            self._threads.run(writing.work, parallelism, concurrency)
        except BaseException as error:  # noqa: BLE001  # raised by `end`
            writing.end(error)
        for record in writing.end():
            self._records[record.key] = record
