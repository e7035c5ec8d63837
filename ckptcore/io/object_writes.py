"""Objects that several threads write at once: parts of one, or of those that follow it while its last parts are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from ckptcore.io.checksums import BlockChecksums
from ckptcore.io.pages import map_pages
from ckptcore.io.segments import ObjectSegments, WriteTask, join_segments
from ckptcore.io.sizes import Sizes
from ckptcore.io.trailers import Trailer
from ckptcore.model import ArraySegment, ObjectRecord, Segment
from ckptcore.protocols import ObjectWriter, StorageBackend

__all__ = ["ObjectWrites"]


class ObjectWrites:
    """Objects on their way to a storage. Threads call `work`; when all have returned, one calls `end`.

    Objects are begun in order, and their segments opened in order; a thread takes a piece of the object that was begun last, or
    begins the next. Whoever writes the last piece of an object completes it.
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
        """Write until nothing is left or something failed. Never raises."""
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
        """The objects in order, all of them complete; else what was begun is given up.

        Args:
            error: why nothing more is to be written, although no thread failed.

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
        """Let no thread take another task, or wait for a checksum."""
        with self._counting:
            if not self._stopped:
                self._stopped = True
                self._error = error
        with self._summing:
            self._summing.notify_all()

    def _take(self) -> tuple[_Small | _Large, WriteTask | None] | None:
        """What to do next: a small object, a task of a large one, or none where all of its tasks are done: it is to be completed."""
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
        sums = BlockChecksums(len(data), block_bytes=self._sizes.block) if self._checksums else None
        if sums is not None:
            sums.add(0, data)
        self._record(target.number, target.key, len(data), sums)
        if self._progress is not None:
            self._progress(len(data))

    def _write_task(self, target: _Large, task: WriteTask, bounce: memoryview) -> bool:
        """Write bytes of an object, and complete it if they are the last; False if writing failed elsewhere meanwhile.

        The bytes are copied, because arrays may change during the save. All checksums are of the copy that is written.
        """
        data = task.fill(bounce)
        if task.summed:
            self._sum(task, data)
        if task.trailers and not self._place_trailers(task, data):
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
        self._record(target.number, target.key, target.size, target.sums)

    def _record(self, number: int, key: str, size: int, sums: BlockChecksums | None) -> None:
        record = ObjectRecord(key, size, sums.encode() if sums is not None else b"")
        with self._counting:
            self._records[number] = record

    def _sum(self, task: WriteTask, data: memoryview) -> None:
        """Sum what checksums in the object are of, while it is in cache, and wake who waits for them."""
        pieces: list[tuple[Trailer, int, int, int]] = []
        for trailer, start, stop in task.summed:
            value = trailer.checksum.of(data[start:stop])
            if stop - start == trailer.nbytes:
                trailer.complete(value)
            else:
                pieces.append((trailer, task.start + start, stop - start, value))
        with self._summing:
            for trailer, start, nbytes, value in pieces:
                trailer.add(start, nbytes, value)
            self._summing.notify_all()

    def _place_trailers(self, task: WriteTask, data: memoryview) -> bool:
        """Put checksums where they go, once they are there; False if writing failed and they never will be.

        What they are of is in this task, which is summed, or in tasks taken before it. A thread sums all of a task before
        it waits, so some thread never waits.
        """
        for trailer, position, start, stop in task.trailers:
            if trailer.data is None:
                with self._summing:
                    while trailer.data is None:
                        if self._stopped:
                            return False
                        self._summing.wait()
            data[position : position + stop - start] = trailer.data[start:stop]
        return True

    def _take_bounce(self) -> memoryview:
        try:
            return self._bounce.pop()
        except IndexError:
            return map_pages(self._sizes.write).memory()


class _Small:
    """An object that one thread writes."""

    __slots__ = ("key", "nbytes", "number", "segments")

    def __init__(self, number: int, key: str, segments: Sequence[Segment], nbytes: Sequence[int]) -> None:
        self.number = number
        self.key = key
        self.segments = segments
        self.nbytes = nbytes


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
        """Its writer; opened by the first who asks, while other objects go on: it may take a request."""
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
    """Close all because of an error, and tell with it what else went wrong."""
    for close in closers:
        try:
            close()
        except Exception as another:  # noqa: BLE001  # told with the first error
            error.add_note(f"giving memory back failed too: {another!r}")
