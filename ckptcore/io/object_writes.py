"""Writes of objects: their segments, new objects, and records of what was written."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.io.checksums import BlockChecksums, checksums_of
from ckptcore.io.memory import map_pages
from ckptcore.io.requests import SIZES, Sizes, requests_of
from ckptcore.io.segments import ObjectSegments, WriteTask, join_segments
from ckptcore.io.threads import IOThreads
from ckptcore.model import ArraySegment, ObjectRecord, Segment
from ckptcore.protocols import ObjectWriter, StorageAddress, StorageBackend

__all__ = [
    "ObjectRecorder",
    "ObjectWrites",
]


class ObjectWrites:
    """Objects on their way to a storage. Threads call `work`; when all have returned, one calls `end`.

    Objects are begun in order, and their segments opened in order. A thread takes a piece of the object that was begun
    last, or begins the next. The thread that writes the last piece of an object completes it.
    """

    def __init__(
        self,
        storage: StorageBackend,
        objects: Iterator[tuple[str, Sequence[Segment]]],
        sizes: Sizes,
        *,
        checksums: bool,
        bounce: list[memoryview],
        progress: Callable[[int], None] | None,
    ) -> None:
        """Write to `storage`.

        Args:
            storage: where objects go.
            objects: keys, and what the objects are made of; asked for the next one when a thread begins it.
            sizes: how much is moved at a time.
            checksums: whether checksums are kept.
            bounce: free buffers of `Sizes.write` bytes each, to which bytes are copied; taken buffers are returned.
            progress: called with a number of bytes each time that many more are written.
        """
        self._storage = storage
        self._objects = objects
        self._sizes = sizes
        self._checksums = checksums
        self._bounce = bounce
        self._progress = progress
        self._error: BaseException | None = None
        self._stopped = False
        self._taking = threading.Lock()
        self._counting = threading.Lock()
        self._summing = threading.Condition()
        self._current: _Large | None = None
        self._begun = 0
        self._unfinished: dict[int, _Large] = {}
        self._records: dict[int, ObjectRecord] = {}

    def work(self) -> None:
        """Write until nothing is left or a thread failed. Never raises."""
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
                del taken, target, task  # they hold what is saved
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits for the objects
            self._stop(error)
        if bounce is not None:
            self._bounce.append(bounce)

    def end(self, error: BaseException | None = None) -> tuple[ObjectRecord, ...]:
        """Return the objects in order, all of them complete. After an error, give up unfinished objects and raise.

        Args:
            error: stops the writing although no thread failed.

        Raises:
            BaseException: the first error of a thread, or the one given.
        """
        if error is not None:
            self._stop(error)
        failure, self._error = self._error, None  # it holds frames that hold it, and they hold what is saved
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
        """Keep threads from taking tasks, and wake those that wait for a checksum."""
        with self._counting:
            if not self._stopped:
                self._stopped = True
                self._error = error
        with self._summing:
            self._summing.notify_all()

    def _take(self) -> tuple[_Small | _Large, WriteTask | None] | None:
        """Return a small object, a task of a large one, or a large one to complete, whose tasks are done."""
        with self._taking:
            try:
                while not self._stopped:
                    target = self._current
                    if target is None:
                        begun = self._begin()
                        if begun is None:
                            return None
                        if isinstance(begun, _Small):
                            return begun, None
                        target = self._current = begun
                    task = target.segments.next_task()
                    with self._counting:
                        if task is not None:
                            target.under_way += 1
                            return target, task
                        target.all_taken = True
                        idle = target.under_way == 0
                    self._current = None
                    if idle:
                        return target, None
            except BaseException as error:
                self._stop(error)  # here, so that no other thread goes on with the segments
                raise
            return None

    def _begin(self) -> _Small | _Large | None:
        found = next(self._objects, None)
        if found is None:
            return None
        key, segments = found
        number = self._begun
        self._begun += 1
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
            self._progress(len(data))

    def _write_task(self, target: _Large, task: WriteTask, bounce: memoryview) -> bool:
        """Write bytes of an object, and complete it if they are the last; False if writing failed elsewhere meanwhile.

        The bytes are copied, because arrays may change during the save. All checksums are of the copy that is written.
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
            self._progress(task.stop - task.start)
        with self._counting:
            target.under_way -= 1
            last = target.all_taken and target.under_way == 0
        if last:
            self._finish(target)
        return True

    def _finish(self, target: _Large) -> None:
        assert target.writer is not None  # an object without bytes is a small one
        target.writer.finish()
        with self._counting:
            del self._unfinished[target.number]
        checksums = b"" if target.sums is None else target.sums.encode()
        self._record(target.number, target.key, target.size, checksums)

    def _record(self, number: int, key: str, size: int, checksums: bytes) -> None:
        with self._counting:
            self._records[number] = ObjectRecord(key, size, checksums)

    def _sum(self, task: WriteTask, data: memoryview) -> None:
        """Compute checksums inside the object, while their bytes are in cache, and wake threads that wait for them."""
        values = [
            (inline, start, stop - start, inline.checksum.of(data[start:stop])) for inline, start, stop in task.summed
        ]
        with self._summing:
            for inline, start, nbytes, value in values:
                inline.add(task.start + start, nbytes, value)
            self._summing.notify_all()

    def _place_checksums(self, task: WriteTask, data: memoryview) -> bool:
        """Copy checksums to their places, once they are computed. Return False if writing failed meanwhile.

        The bytes that they cover are in this task, or in tasks taken before it. A thread computes all checksums of a
        task before it waits, so some thread never waits.
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


@dataclass(slots=True)
class _Small:
    """An object that one thread writes, and the bytes of each of its segments."""

    number: int
    key: str
    segments: Sequence[Segment]
    nbytes: Sequence[int]


class _Large:
    """An object that several threads write.

    Attributes:
        under_way: tasks that were taken and not written yet.
        all_taken: whether no more will be taken.
        writer: None before the first task is written.
    """

    __slots__ = ("_opening", "all_taken", "key", "number", "segments", "size", "sums", "under_way", "writer")

    def __init__(self, number: int, key: str, size: int, segments: ObjectSegments, sums: BlockChecksums | None) -> None:
        self.number = number
        self.key = key
        self.size = size
        self.segments = segments
        self.sums = sums
        self.under_way = 0
        self.all_taken = False
        self.writer: ObjectWriter | None = None
        self._opening = threading.Lock()

    def open(self, storage: StorageBackend) -> ObjectWriter:
        """Return its writer. The first caller opens it, which may take a request, while other objects are written."""
        with self._opening:
            if self.writer is None:
                self.writer = storage.open_writer(self.key, self.size)
            return self.writer


def _close_all(closers: Sequence[Callable[[], None]]) -> None:
    """Close all, even if one fails."""
    for number, close in enumerate(closers):
        try:
            close()
        except BaseException as error:
            _close_after(error, closers[number + 1 :])
            raise


def _close_after(error: BaseException, closers: Sequence[Callable[[], None]]) -> None:
    """Close all because of an error, and add further errors to it as notes."""
    for close in closers:
        try:
            close()
        except Exception as another:  # noqa: BLE001  # told with the first error
            error.add_note(f"giving memory back failed too: {another!r}")


_SMALL_AT_ONCE: Final = 8
"""Small objects that are written at once to any storage. A disk, too, mostly makes writers wait."""


class ObjectRecorder:
    """A `ckptcore.protocols.WriteStore` over a storage. Any thread."""

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
            storage: where objects go.
            threads: what writes large objects, together with the calling thread.
            checksums: whether checksums are kept.
            progress: called with a number of bytes each time that many more are written, from any thread.
            sizes: how much is moved at a time.
        """
        self._storage = storage
        self._threads = threads
        self._checksums = checksums
        self._progress = progress
        requests = requests_of(storage)
        self._sizes = sizes.for_parts(requests.part_bytes)
        self._concurrency = requests.concurrency
        self._records: dict[str, ObjectRecord] = {}
        self._bounce: list[memoryview] = []

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O, or None."""
        return self._storage.address

    @property
    def objects(self) -> tuple[ObjectRecord, ...]:
        """The objects that are complete."""
        return tuple(self._records.values())

    def put(self, key: str, data: bytes) -> None:
        """Write a small object whole."""
        self._storage.put(key, data)
        checksums = checksums_of(data, self._sizes.block) if self._checksums else b""
        self._records[key] = ObjectRecord(key, len(data), checksums)
        if self._progress is not None:
            self._progress(len(data))

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """Write an object made of these segments, in this order.

        Array segments are opened one after the other, and closed as their bytes are written, or when it failed. Bytes
        are copied to a few buffers of 1 MiB, or, if the storage has `part_bytes`, to one of that size for each
        request under way. Checksums are of the copy that is written, even if the arrays change meanwhile.
        Checksums that are part of the object are computed piece by piece, each by the thread that writes the piece.

        Raises:
            PluginError: if the arrays of a segment do not make up its box, or a checksum is of what it cannot be of.
            StorageError: the first error of a thread; the object is given up.
        """
        nbytes = sum([segment.nbytes for segment in segments])
        pieces = -(-nbytes // self._sizes.write) if nbytes >= self._sizes.inline else 1
        self._write_all(iter([(key, segments)]), pieces, self._concurrency)

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """Write objects, several at once where the storage gains by it; each as `write` does.

        On a storage with `concurrency` parts of one object are under way together with those of the next ones. On any
        other, large objects are written one after the other, and small ones several at a time.

        Raises:
            PluginError, StorageError: the first error. No other object is begun then, those under way are given up, and
                some may be complete.
        """
        if self._threads.at_once(self._concurrency) > self._threads.count:
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
        at_once = _SMALL_AT_ONCE if len(some) > 1 else 1  # no threads are begun for one
        self._write_all(itertools.chain(some, objects), at_once, at_once)

    def _is_small(self, one: tuple[str, Sequence[Segment]]) -> bool:
        return sum([segment.nbytes for segment in one[1]]) < self._sizes.inline

    def _write_all(self, objects: Iterator[tuple[str, Sequence[Segment]]], parallelism: int, concurrency: int) -> None:
        writing = ObjectWrites(
            self._storage,
            objects,
            self._sizes,
            checksums=self._checksums,
            bounce=self._bounce,
            progress=self._progress,
        )
        try:
            self._threads.run(writing.work, parallelism, concurrency)
        except BaseException as error:  # noqa: BLE001  # raised by `end`
            writing.end(error)
        for record in writing.end():
            self._records[record.key] = record
