"""Simulated storages and snapshots of a dry run. They record sizes and count requests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress

from ckptcore.commit.root import ROOT_KEY
from ckptcore.errors import ConditionFailedError, ObjectNotFoundError
from ckptcore.io.snapshot import ViewedSnapshot
from ckptcore.io.threads import SIZES, Sizes
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import CHECKSUM_BYTES, ObjectRecord
from ckptcore.model.transfer import ArraySegment, Pending, Segment, WritePlan
from ckptcore.protocols import (
    Buffer,
    DirectoryFeatures,
    DirectoryLock,
    HostBytes,
    IfTag,
    ObjectWriter,
    PlaceLimits,
    PutCondition,
    StorageAddress,
    StorageBackend,
)
from ckptcore_tools.dry_run.plans import RequestCounts


class NoElementsError(Exception):
    """A layout requested elements in a dry run, which has none."""


class SizeOnlySnapshot:
    """A `ckptcore.protocols.Snapshot` without elements. Thread-safe.

    Attributes:
        plan: the items to write.
        taken_peak: peak bytes of copies that the layout has taken and not released.
        viewed_peak: peak bytes that a blocking save has transferred to the host and not released. Includes transfers
            that it starts ahead.
    """

    def __init__(self, plan: WritePlan, host_bytes: Sequence[HostBytes]) -> None:
        """Create a snapshot. `host_bytes` is the host memory of each item of the plan."""
        self.plan = plan
        self.taken_peak = 0
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
                self.taken_peak = max(self.taken_peak, self._taken_bytes)
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
    """A `ckptcore.protocols.StorageBackend` that counts requests and stores only sizes. Thread-safe.

    It stores the bytes of roots, because a save reads its claim.

    Attributes:
        sizes: the sizes of the objects, by key, in bytes.
    """

    def __init__(self) -> None:
        """Create an empty storage."""
        self.sizes: dict[str, int] = {}
        self._roots: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def requests(self) -> RequestCounts:
        """The requests so far."""
        return RequestCounts(**self._counts)

    def forget(self) -> None:
        """Reset sizes and request counts. Roots can still be read."""
        self.sizes.clear()
        self._counts.clear()

    def _count(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`. Only roots can be read."""
        self._count("reads")
        return self._root(key)[start:stop]

    def _root(self, key: str) -> bytes:
        if key not in self._roots:
            raise ObjectNotFoundError(f"{key} does not exist in this dry run")
        return self._roots[key]

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`. Only roots can be read."""
        self._count("reads")
        data = self._root(key)
        return data, data.hex()

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`. Only roots can be read."""
        self._count("reads")
        data = self._root(key)
        for start, buffer in ranges:
            buffer[:] = data[start : start + len(buffer)]

    def size(self, key: str) -> int:
        """See `StorageBackend`."""
        self._count("reads")
        if key not in self.sizes:
            raise ObjectNotFoundError(f"{key} does not exist in this dry run")
        return self.sizes[key]

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        self._count("puts")
        with self._lock:
            existing = self._roots.get(key)
            if condition is not None and (existing and existing.hex()) != (
                condition.tag if isinstance(condition, IfTag) else None
            ):
                raise ConditionFailedError(f"{key} has changed in this dry run")
            self.sizes[key] = len(data)
            if key.rpartition("/")[2] == ROOT_KEY:
                self._roots[key] = data
                return data.hex()
        return ""

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`. Records the given size."""
        self._count("writes")
        with self._lock:
            self.sizes[key] = size or 0
        return _NoWriter()

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`. Every object is new."""
        return self.open_writer(key, size)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`."""
        self._count("lists")
        directory = f"{prefix.rstrip('/')}/" if prefix else ""
        return iter(sorted([key for key in self.sizes if key.startswith(directory)]))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`."""
        self._count("lists")
        directory = f"{prefix.rstrip('/')}/" if prefix else ""
        keys = [key.removeprefix(directory).partition("/") for key in self.sizes if key.startswith(directory)]
        return sorted({name + slash for name, slash, _ in keys})

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self._count("deletes")
        for key in keys:
            self.sizes.pop(key, None)

    def sync(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`. Not counted."""


class _FreeLock(nullcontext[None]):
    """A lock without contention."""

    def is_in_place(self) -> bool:
        """See `DirectoryLock`."""
        return True


class CountingDirectories(CountingObjects):
    """A counting storage that also implements `ckptcore.protocols.AtomicDirectories`, like a file system."""

    def lock_directory(self, key: str) -> DirectoryLock | None:
        """See `AtomicDirectories`. The lock is always free."""
        self._count("directories")
        return _FreeLock()

    def has_locks(self) -> bool:
        """See `AtomicDirectories`. Not counted, because the result is cached for each directory."""
        return True

    def probe(self, key: str) -> DirectoryFeatures:
        """See `AtomicDirectories`. Not counted, because the result is cached for each directory."""
        return DirectoryFeatures()

    def limits(self, key: str) -> PlaceLimits:
        """See `AtomicDirectories`. Nothing is limited."""
        return PlaceLimits()

    def can_move(self, key: str, onto: str) -> bool:
        """See `AtomicDirectories`."""
        return True

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
        """See `AtomicDirectories`. Does nothing, because the dry run replaces nothing."""
        self._count("directories")

    def place(self, source: str, destination: str, keys: Sequence[str]) -> None:
        """See `AtomicDirectories`. Does nothing, because the dry run replaces nothing."""
        self._count("directories")

    def replace(self, source: str, destination: str, stamp: str | None) -> None:
        """See `AtomicDirectories`. Does nothing, because the dry run replaces nothing."""
        self._count("directories")

    def stamps(self, keys: Sequence[str]) -> Mapping[str, str]:
        """See `AtomicDirectories`. Returns no stamps, because the dry run replaces nothing."""
        return {}

    def delete_unchanged(self, stamps: Mapping[str, str]) -> None:
        """See `AtomicDirectories`. Does nothing, because the dry run replaces nothing."""

    def hide_from_others(self, old: str, new: str) -> None:
        """See `AtomicDirectories`. Does nothing, because the dry run replaces nothing."""

    def keep_attributes(self, old: str, new: str) -> None:
        """See `AtomicDirectories`. Does nothing, because the dry run replaces nothing."""

    def sync_directory(self, key: str) -> None:
        """See `AtomicDirectories`."""
        self._count("directories")

    def delete_directory(self, key: str) -> None:
        """See `AtomicDirectories`."""
        self._count("directories")
        for name in [name for name in self.sizes if name.startswith(f"{key}/")]:
            del self.sizes[name]


class _NoWriter:
    """An object writer that ignores everything."""

    def write_at(self, offset: int, data: Buffer) -> None:
        pass

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


class SizeRecorder:
    """A `ckptcore.protocols.WriteStore` that makes the same requests as the WriteStore of a save. Thread-safe."""

    def __init__(self, storage: StorageBackend, *, checksums: bool, sizes: Sizes = SIZES) -> None:
        """Write objects to `storage`. `checksums`: True if the save would compute checksums, of blocks of `sizes`."""
        self._storage = storage
        self._checksums = checksums
        self._block_bytes = sizes.block
        self._records: dict[str, ObjectRecord] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> StorageAddress | None:
        """The address of the storage, for native I/O."""
        return self._storage.address

    @property
    def objects(self) -> tuple[ObjectRecord, ...]:
        """The objects. Each has the right number of checksums, but all are zero."""
        return tuple(self._records.values())

    def put(self, key: str, data: bytes) -> None:
        """See `WriteStore`."""
        self._storage.put(key, data)
        self._record(key, len(data))

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """See `WriteStore`. Opens and closes the segments one after another, like one thread."""
        nbytes = sum([segment.nbytes for segment in segments])
        writer = self._storage.open_writer(key, nbytes)
        for segment in segments:
            if isinstance(segment, ArraySegment):
                with suppress(NoElementsError):
                    segment.open()
                segment.close()
        if nbytes < SIZES.inline:
            writer.write_at(0, bytes(nbytes))  # zeros: a storage that packs small objects counts bytes
        writer.finish()
        self._record(key, nbytes)

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """See `WriteStore`. Writes one object after another."""
        for key, segments in objects:
            self.write(key, segments)

    def _record(self, key: str, nbytes: int) -> None:
        blocks = -(-nbytes // self._block_bytes) if self._checksums else 0
        record = ObjectRecord(key, nbytes, bytes(CHECKSUM_BYTES * blocks))
        with self._lock:
            self._records[key] = record
