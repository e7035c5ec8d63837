"""The objects of a checkpoint while it is written: moved by the I/O threads, counted and checksummed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ckptcore.engine.checksums import BlockChecksums
from ckptcore.engine.pages import map_pages
from ckptcore.engine.segments import ObjectSegments, WriteTask, join_segments
from ckptcore.engine.sizes import SIZES, Sizes
from ckptcore.engine.threads import IOThreads
from ckptcore.engine.trailers import Trailer
from ckptcore.model import ArraySegment, ObjectRecord, Segment
from ckptcore.protocols import Buffer, ObjectWriter, StorageAddress, StorageBackend

__all__ = ["ObjectRecorder"]


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
        self._sizes = sizes
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
        self._record(key, data)

    def _record(self, key: str, data: bytes) -> None:
        checksums = b""
        if self._checksums:
            sums = BlockChecksums(len(data), block_bytes=self._sizes.block)
            sums.add(0, data)
            checksums = sums.encode()
        self._records[key] = ObjectRecord(key, len(data), checksums)
        if self._progress is not None:
            self._progress(len(data))

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """Write an object made of these segments, in this order.

        Array segments are opened one after the other, and closed as their bytes are written, or when it failed. Memory
        for a few pieces of 4 MiB is used, and none for arrays whose memory holds what is written. Checksums that stand in
        the object are computed piece by piece, each by the thread that writes the piece.

        Raises:
            PluginError: if the arrays of a segment do not make up its box, or a checksum is of what it cannot be of.
            StorageError: the first error of a thread; the object is given up.
        """
        segment_sizes = [segment.nbytes for segment in segments]
        size = sum(segment_sizes)
        if size < self._sizes.inline or not size:
            self._write_small(key, segments, segment_sizes)
        else:
            self._write_large(key, segments, segment_sizes, size)

    def _write_small(self, key: str, segments: Sequence[Segment], sizes: Sequence[int]) -> None:
        closers = [segment.close for segment in segments if isinstance(segment, ArraySegment)]
        try:
            data = join_segments(segments, sizes)
            writer = self._storage.open_writer(key, len(data))
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
        self._record(key, data)

    def _write_large(self, key: str, segments: Sequence[Segment], segment_sizes: Sequence[int], size: int) -> None:
        sums = BlockChecksums(size, block_bytes=self._sizes.block) if self._checksums else None
        opened = ObjectSegments(segments, segment_sizes, self._sizes)
        writing = _LargeWrite(opened, sums, self._bounce, self._sizes.task, self._progress)
        try:
            writing.writer = self._storage.open_writer(key, size)
            self._threads.run(writing.work, -(-size // self._sizes.task))
            if writing.error is not None:
                raise writing.error
            writing.writer.finish()
        except BaseException as error:
            writing.stop(error)
            if writing.writer is not None:
                writing.writer.abort()
            _close_after(error, writing.segments.close_rest())
            raise
        finally:
            writing.error = None  # it holds the frames that hold it, and they hold what is saved
        self._records[key] = ObjectRecord(key, size, sums.encode() if sums is not None else b"")


class _LargeWrite:
    """An object that several threads write."""

    def __init__(
        self,
        segments: ObjectSegments,
        sums: BlockChecksums | None,
        bounce: list[memoryview],
        task_bytes: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.segments = segments
        self.writer: ObjectWriter | None = None
        self.error: BaseException | None = None
        self._stopped = False
        self._sums = sums
        self._bounce = bounce
        self._task_bytes = task_bytes
        self._progress = progress
        self._taking = threading.Lock()
        self._counting = threading.Lock()
        self._summing = threading.Condition()

    def stop(self, error: BaseException) -> None:
        """Let no thread take another task, or wait for a checksum."""
        if not self._stopped:
            self._stopped = True
            self.error = error
        with self._summing:
            self._summing.notify_all()

    def work(self) -> None:
        """Write tasks until none is left or something failed. Never raises."""
        bounce: memoryview | None = None
        try:
            while True:
                if (task := self._take()) is None:
                    break
                data = task.data
                if data is None:
                    if bounce is None:
                        bounce = self._take_bounce()
                    data = task.fill(bounce)
                if task.summed:
                    self._sum(task, data)
                if task.trailers and not self._place_trailers(task, data):
                    break
                self._write(task.start, data)
                with self._counting:
                    closers = self.segments.written(task)
                _close_all(closers)
                if self._progress is not None:
                    self._progress(task.stop - task.start)
                del task, data
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits for the object
            self.stop(error)
        if bounce is not None:
            self._bounce.append(bounce)

    def _take(self) -> WriteTask | None:
        with self._taking:
            if self._stopped:
                return None
            try:
                return self.segments.next_task()
            except BaseException as error:
                self.stop(error)  # here, so that no other thread goes on with the segments
                raise

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
            return map_pages(self._task_bytes).memory()

    def _write(self, start: int, data: Buffer) -> None:
        assert self.writer is not None  # opened before threads begin
        if self._sums is not None:
            self._sums.add(start, data)
        self.writer.write_at(start, data)


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
