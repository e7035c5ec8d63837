"""Stand-ins for the storage and the snapshot of a save, which keep sizes and count calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from ckptcore.commit.root import ROOT_KEY
from ckptcore.errors import ConditionFailedError, ObjectNotFoundError
from ckptcore.io.requests import SIZES
from ckptcore.io.snapshot import ViewedSnapshot
from ckptcore.model.arrays import HostArray
from ckptcore.model.objects import CHECKSUM_BYTES, ObjectRecord
from ckptcore.model.transfer import ArraySegment, Pending, Segment, WritePlan
from ckptcore.protocols import Buffer, HostBytes, IfTag, ObjectWriter, PutCondition, StorageAddress, StorageBackend
from ckptcore_tools.dry_run.plans import RequestCounts

__all__ = ["CountingDirectories", "CountingObjects", "NoElementsError", "SizeOnlySnapshot", "SizeRecorder"]


class NoElementsError(Exception):
    """Elements were asked for in a dry run, where there are none."""


class SizeOnlySnapshot:
    """A `ckptcore.protocols.Snapshot` without elements. Any thread.

    Attributes:
        plan: what would be written.
        held_by_writer: the most bytes of copies that are taken and not given back yet, at a time.
        viewed_peak: the most bytes that a save that blocks has on the host at a time, as far ahead as that goes.
    """

    def __init__(self, plan: WritePlan, host_bytes: Sequence[HostBytes]) -> None:
        """`host_bytes` tells what each item of the plan takes."""
        self.plan = plan
        self.held_by_writer = 0
        self.viewed_peak = 0
        self._host_bytes = host_bytes
        self._views = ViewedSnapshot(plan, self._start)
        self._viewed: set[int] = set()
        self._taken: set[int] = set()
        self._viewed_bytes = 0
        self._taken_bytes = 0
        self._lock = threading.RLock()

    def _start(self, item: int) -> Sequence[Pending[HostArray]]:
        self._viewed.add(item)
        self._viewed_bytes += self._host_bytes[item].viewed
        self.viewed_peak = max(self.viewed_peak, self._viewed_bytes)
        return ()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`; counts the item and raises `NoElementsError`."""
        with self._lock:
            self._views.take(item)
            if item not in self._taken:
                self._taken.add(item)
                self._taken_bytes += self._host_bytes[item].copied
                self.held_by_writer = max(self.held_by_writer, self._taken_bytes)
        raise NoElementsError(f"item {item} of a dry run has no elements")

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._lock:
            self._views.release(item)
            if item in self._viewed:
                self._viewed.discard(item)
                self._viewed_bytes -= self._host_bytes[item].viewed
            if item in self._taken:
                self._taken.discard(item)
                self._taken_bytes -= self._host_bytes[item].copied


class CountingObjects(StorageBackend):
    """A `ckptcore.protocols.StorageBackend` of objects. Only of roots does it keep the bytes: a save reads its claim. Any thread.

    Attributes:
        sizes: by key, the bytes of an object.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.sizes: dict[str, int] = {}
        self._roots: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def requests(self) -> RequestCounts:
        """What it was asked."""
        return RequestCounts(**self._counts)

    def forget(self) -> None:
        """Begin to count anew: what there is so far is another process's. Roots stay."""
        self.sizes.clear()
        self._counts.clear()

    def _count(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`; of roots only."""
        self._count("looks")
        return self._root(key)[start:stop]

    def _root(self, key: str) -> bytes:
        if key not in self._roots:
            raise ObjectNotFoundError(f"{key} is not in this dry run")
        return self._roots[key]

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`; of roots only."""
        self._count("looks")
        data = self._root(key)
        return data, data.hex()

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`; of roots only."""
        self._count("looks")
        data = self._root(key)
        for start, buffer in ranges:
            buffer[:] = data[start : start + len(buffer)]

    def size(self, key: str) -> int:
        """See `StorageBackend`."""
        self._count("looks")
        if key not in self.sizes:
            raise ObjectNotFoundError(f"{key} is not in this dry run")
        return self.sizes[key]

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        self._count("puts")
        with self._lock:
            there = self._roots.get(key)
            if condition is not None and (there and there.hex()) != (
                condition.tag if isinstance(condition, IfTag) else None
            ):
                raise ConditionFailedError(f"{key} is not what the dry run expects")
            self.sizes[key] = len(data)
            if key.rpartition("/")[2] == ROOT_KEY:
                self._roots[key] = data
                return data.hex()
        return ""

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`; what is written is as large as is said here."""
        self._count("writes")
        with self._lock:
            self.sizes[key] = size or 0
        return _NoWriter()

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`; every object is new here."""
        return self.open_writer(key, size)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`."""
        self._count("lists")
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        return iter(sorted([key for key in self.sizes if key.startswith(below)]))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`."""
        self._count("lists")
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        rests = [key.removeprefix(below).partition("/") for key in self.sizes if key.startswith(below)]
        return sorted({name + slash for name, slash, _ in rests})

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self._count("deletes")
        for key in keys:
            self.sizes.pop(key, None)

    def sync(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`; nothing but native I/O needs it."""


class CountingDirectories(CountingObjects):
    """The same with real directories: `ckptcore.protocols.AtomicDirectories` too."""

    def lock_directory(self, key: str) -> AbstractContextManager[None] | None:
        """See `AtomicDirectories`; nobody else is here."""
        self._count("directories")
        return nullcontext()

    def rename(self, source: str, destination: str) -> None:
        """See `AtomicDirectories`."""
        self._count("directories")
        for key in [key for key in self._roots if key.startswith(f"{source}/")]:
            self._roots[destination + key.removeprefix(source)] = self._roots.pop(key)
        moved = {key: size for key, size in self.sizes.items() if key.startswith(f"{source}/")}
        for key, size in moved.items():
            del self.sizes[key]
            self.sizes[destination + key.removeprefix(source)] = size

    def exchange(self, first: str, second: str) -> None:
        """See `AtomicDirectories`; nothing is ever replaced here."""
        self._count("directories")

    def sync_directory(self, key: str) -> None:
        """See `AtomicDirectories`."""
        self._count("directories")

    def delete_directory(self, key: str) -> None:
        """See `AtomicDirectories`."""
        self._count("directories")
        for name in [name for name in self.sizes if name.startswith(f"{key}/")]:
            del self.sizes[name]


class _NoWriter:
    """Writes nothing, nowhere."""

    def write_at(self, offset: int, data: Buffer) -> None:
        pass

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


class SizeRecorder:
    """A `ckptcore.protocols.WriteStore` that asks of a storage what `ckptcore.io.object_writes.ObjectRecorder` does. Any thread."""

    def __init__(self, storage: StorageBackend, *, checksums: bool) -> None:
        """Hand objects to `storage`; `checksums` tells whether a save would keep some."""
        self._storage = storage
        self._checksums = checksums
        self._records: dict[str, ObjectRecord] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> StorageAddress | None:
        """None: there is nothing for native I/O."""
        return self._storage.address

    @property
    def objects(self) -> tuple[ObjectRecord, ...]:
        """The objects; their checksums are zeros, as many as there would be."""
        return tuple(self._records.values())

    def put(self, key: str, data: bytes) -> None:
        """See `WriteStore`."""
        self._storage.put(key, data)
        self._record(key, len(data))

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """See `WriteStore`. Segments are opened in order, each closed before the next: as one thread would write them."""
        nbytes = sum([segment.nbytes for segment in segments])
        writer = self._storage.open_writer(key, nbytes)
        for segment in segments:
            if isinstance(segment, ArraySegment):
                with suppress(NoElementsError):
                    segment.open()
                segment.close()
        if nbytes < SIZES.inline:
            writer.write_at(0, bytes(nbytes))  # who keeps small objects together counts their bytes
        writer.finish()
        self._record(key, nbytes)

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """See `WriteStore`; one after the other."""
        for key, segments in objects:
            self.write(key, segments)

    def _record(self, key: str, nbytes: int) -> None:
        record = ObjectRecord(key, nbytes)
        if self._checksums:
            record = ObjectRecord(key, nbytes, bytes(CHECKSUM_BYTES * record.blocks))
        with self._lock:
            self._records[key] = record
