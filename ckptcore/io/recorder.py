"""The objects of a checkpoint while it is written: moved by the I/O threads, counted and checksummed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ckptcore.io.checksums import BlockChecksums
from ckptcore.io.object_writes import ObjectWrites
from ckptcore.io.requests import requests_of
from ckptcore.io.sizes import SIZES, Sizes
from ckptcore.io.threads import IOThreads
from ckptcore.model import ObjectRecord, Segment
from ckptcore.protocols import StorageAddress, StorageBackend

__all__ = ["ObjectRecorder"]

_SMALL_AT_ONCE: Final = 8
"""Small objects that are written at once to any storage: it mostly waits, for a disk to have them too."""


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

        Array segments are opened one after the other, and closed as their bytes are written, or when it failed. Bytes
        are copied to a few buffers of 1 MiB, or, if the storage is `ManyRequests`, to one of `part_bytes` for each
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

        On a storage of `ManyRequests` parts of one object are under way together with those of the next ones. On any other, large
        objects are written one after the other, and small ones several at a time.

        Raises:
            PluginError, StorageError: the first error. No other object is begun then, those under way are given up, and some may
                be complete.
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
