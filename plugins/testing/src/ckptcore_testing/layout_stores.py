"""Strict stores for tests of layouts, which check that a layout follows the protocols."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptcore.errors import ChecksumError, ConditionFailedError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.chunk_reads import read_boxes
from ckptcore.io.threads import IOThreads
from ckptcore.model import (
    ArraySegment,
    Box,
    Checksum,
    ChecksumSegment,
    Chunk,
    ChunkRead,
    HostArray,
    ObjectRecord,
    ReadItem,
    Segment,
    WritePlan,
)
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import IF_ABSENT, ChunkIndex, ReadStore, StorageAddress, StorageBackend, StorageOptions
from ckptcore_testing.coverage import assert_covers


class MemorySnapshot:
    """A `ckptcore.protocols.Snapshot` of arrays in memory, with varying memory order and byte order.

    Args:
        plan: the plan.
        arrays: the whole arrays, by number of the leaf.
    """

    def __init__(self, plan: WritePlan, arrays: Mapping[int, HostArray]) -> None:
        self._plan = plan
        self._arrays = arrays
        self.taken: set[int] = set()
        self.released: list[int] = []

    @property
    def plan(self) -> WritePlan:
        """The plan."""
        return self._plan

    def take(self, item: int) -> Sequence[HostArray]:
        """Return arrays in C order, Fortran order and big-endian in turn. Layouts must accept all of them."""
        assert item not in self.released, f"item {item} is taken after it was released"
        self.taken.add(item)
        whole = self._arrays[self._plan.items[item].leaf]
        forms = []
        for number, box in enumerate(self._plan.items[item].boxes):
            part = whole[box.slices]
            match (item + number) % 3:
                case 0:
                    forms.append(np.ascontiguousarray(part))
                case 1:
                    forms.append(np.asfortranarray(part))
                case _:
                    swapped = part.astype(part.dtype.newbyteorder(">"))
                    forms.append(swapped if swapped.dtype.byteorder == ">" else part)
        return [form.reshape(box.shape) for form, box in zip(forms, self._plan.items[item].boxes, strict=True)]

    def release(self, item: int) -> None:
        """Record the release."""
        assert item not in self.released, f"item {item} is released twice"
        self.released.append(item)

    def assert_released(self) -> None:
        """Fail unless every item was released. In a save, unreleased items would fill the limited memory."""
        missing = sorted(set(range(len(self._plan.items))) - set(self.released))
        assert not missing, f"the items {missing} were never released"


class StrictWriteStore:
    """A `ckptcore.protocols.WriteStore` that records all objects."""

    def __init__(self, storage: StorageBackend) -> None:
        self._storage = storage
        self.objects: dict[str, ObjectRecord] = {}

    @property
    def address(self) -> StorageAddress | None:
        """The address of the storage."""
        return self._storage.address

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        assert isinstance(data, bytes), f"put takes bytes, found {type(data)}"
        self._add(key, data)

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """Write an object of segments, and check the size of each segment."""
        parts: list[bytes] = []
        for number, segment in enumerate(segments):
            if isinstance(segment, ArraySegment):
                try:
                    data = _gathered(segment)
                finally:
                    segment.close()
            elif isinstance(segment, ChecksumSegment):
                first = number - segment.segments
                assert 0 <= first < number, f"a checksum of {key} is of {segment.segments} segments, after {number}"
                covered = segments[first:number]
                assert not any(isinstance(other, ChecksumSegment) for other in covered), (
                    f"a checksum of {key} is of another checksum"
                )
                data = segment.checksum.encode(segment.checksum.of(memoryview(b"".join(parts[first:]))))
            else:
                data = bytes(segment.data)
            assert len(data) == segment.nbytes, f"a segment of {key} says {segment.nbytes} bytes and has {len(data)}"
            parts.append(data)
        self._add(key, b"".join(parts))

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """Write objects on another thread, because layouts must not depend on the calling thread."""
        with ThreadPoolExecutor(1) as other:
            other.submit(self._write_each, iter(objects)).result()

    def _write_each(self, objects: Iterator[tuple[str, Sequence[Segment]]]) -> None:
        for key, segments in objects:
            self.write(key, segments)

    def _add(self, key: str, data: bytes) -> None:
        assert key not in self.objects, f"the object {key} is written twice"
        assert key != "checkpoint.json", "a layout must not write the root"
        try:
            self._storage.put(key, data, condition=IF_ABSENT)
        except ConditionFailedError as error:
            raise AssertionError(f"two processes write the object {key}") from error
        self.objects[key] = ObjectRecord(key, len(data))


def _gathered(segment: ArraySegment) -> bytes:
    arrays = segment.open()
    boxes = [box for box, _ in arrays]
    origin = Box.whole(segment.box.shape)
    shifted = [box.within(segment.box) for box in boxes]
    assert_covers(
        [Box(tuple(part.start for part in box), tuple(part.stop for part in box)) for box in shifted],
        origin.stop,
        f"the arrays of a segment of {segment.box}",
    )
    whole: HostArray | None = None
    for (box, array), target in zip(arrays, shifted, strict=True):
        assert array.shape == box.shape, f"an array of {array.shape} comes for {box}"
        assert array.dtype.itemsize == segment.itemsize, f"elements of {array.dtype} in a segment of {segment.itemsize}"
        if whole is None:
            whole = np.empty(segment.box.shape, array.dtype.newbyteorder("<"))
        whole[target] = array
    return b"" if whole is None else whole.tobytes()


class StrictReadStore:
    """A `ckptcore.protocols.ReadStore` over a storage.

    Args:
        storage: the storage.
        digests: SHA-256 of the objects, by key. Reads of other objects raise `ObjectNotFoundError`. None: all objects
            can be read, and only checksums of chunks are verified, as in checkpoints of other software.
    """

    def __init__(self, storage: StorageBackend, digests: Mapping[str, bytes] | None = None) -> None:
        self._storage = storage
        self._digests = digests
        self._threads = IOThreads()

    @property
    def address(self) -> StorageAddress | None:
        """The address of the storage."""
        return self._storage.address

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read bytes of an object."""
        assert type(start) is int and start >= 0, f"get of {key} from {start!r}"
        assert stop is None or (type(stop) is int and stop >= start), f"get of {key} from {start} to {stop!r}"
        return self._verified(key)[start:stop]

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        """Read ranges of objects, the last one first. Return None for missing objects."""
        contents: list[bytes | None] = []
        for key, start, stop in reversed(ranges):
            try:
                contents.append(self.get(key, start, stop))
            except ObjectNotFoundError:
                contents.append(None)
        return contents[::-1]

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return len(self._verified(key))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """List the names in a directory."""
        return list(self._storage.list_names(prefix.removesuffix("/")))

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Iterator[int]:
        """Fill targets from objects, the last read first, and check each read. Yield the numbers of filled targets."""
        remaining: dict[int, int] = {}
        for read in reads:
            for number, _, _ in read.targets:
                remaining[number] = remaining.get(number, 0) + 1
        for read in reversed(reads):
            self._read_chunk(read)
            for number, _, _ in read.targets:
                remaining[number] -= 1
                if remaining[number] == 0:
                    yield number

    def start(self, work: Callable[[], None]) -> None:
        """Call a function on another thread."""
        self._threads.submit(work)

    def read_boxes(self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> Iterator[int]:
        """Read with an index, like the core."""
        return read_boxes(index, items, buffers, self)

    def _read_chunk(self, read: ChunkRead) -> None:
        assert type(read.offset) is int and read.offset >= 0, f"a read of {read.key} from {read.offset!r}"
        nbytes = read.box.size * read.itemsize
        data = self._verified(read.key)[read.offset : read.offset + nbytes]
        if len(data) != nbytes:
            raise CorruptCheckpointError(
                f"{read.key} ends at byte {read.offset + len(data)}, expected {nbytes} bytes from {read.offset}",
                key=read.key,
            )
        if read.checksum is not None:
            self._compare(read, read.checksum, data)
        for number, box, target in read.targets:
            assert target.shape == box.shape, f"target {number} of {box} has the shape {target.shape}"
            assert target.flags.c_contiguous and target.flags.writeable, f"target {number} cannot be filled"
            assert target.dtype.itemsize == read.itemsize, (
                f"target {number} has elements of {target.dtype.itemsize} bytes"
            )
            tile = np.frombuffer(data, target.dtype.newbyteorder("<")).reshape(read.box.shape)
            common = box.intersect(read.box)
            if common is not None:
                target[common.within(box)] = tile[common.within(read.box)]

    def _compare(self, read: ChunkRead, checksum: Checksum, data: bytes) -> None:
        """Verify the checksum after a chunk even if the object was verified: the layout may give a wrong position."""
        stop = read.offset + len(data)
        end = stop + checksum.nbytes
        stored = self._verified(read.key)[stop:end]
        if len(stored) != checksum.nbytes:
            raise CorruptCheckpointError(
                f"{read.key} ends at byte {stop + len(stored)}, expected {checksum.name} in bytes {stop} to {end}",
                key=read.key,
            )
        actual = checksum.encode(checksum.of(memoryview(data)))
        if stored != actual:
            raise ChecksumError(
                f"{read.key} is damaged in bytes {read.offset} to {end}: expected {checksum.name} "
                f"{stored.hex()}, found {actual.hex()}",
                key=read.key,
                start=read.offset,
                stop=end,
            )

    def _verified(self, key: str) -> bytes:
        if self._digests is not None and key not in self._digests:
            raise ObjectNotFoundError(f"the checkpoint has no object {key}")
        data = self._storage.get(key)
        if self._digests is not None and hashlib.sha256(data).digest() != self._digests[key]:
            raise ChecksumError(f"{key} is damaged", key=key)
        return data


class DirectoryWriteStore(StrictWriteStore):
    """A strict write store of a local directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(local_directory(directory))


class DirectoryReadStore(StrictReadStore):
    """A strict read store of a local directory."""

    def __init__(self, directory: Path, digests: Mapping[str, bytes] | None = None) -> None:
        super().__init__(local_directory(directory), digests)


@dataclass(frozen=True, slots=True)
class MutableObject:
    """An object of a storage that a test can read, change and delete."""

    storage: StorageBackend
    key: str

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.storage.size(self.key)

    def read_bytes(self) -> bytes:
        """Return the bytes."""
        return self.storage.get(self.key)

    def write_bytes(self, data: bytes | bytearray) -> None:
        """Replace the bytes."""
        self.storage.put(self.key, bytes(data))

    def unlink(self) -> None:
        """Delete the object."""
        self.storage.delete([self.key])


def local_directory(directory: Path) -> StorageBackend:
    """Return a storage of a local directory, which need not exist."""
    return installed_plugins().storage("file")(str(directory), StorageOptions(durable=False))


def objects_below(storage: StorageBackend) -> dict[str, MutableObject]:
    """Return all objects of a storage, sorted by key."""
    return {key: MutableObject(storage, key) for key in sorted(storage.list())}


class WatchedIndex(ChunkIndex):
    """An index whose reads call a function, so that tests can count or damage them. Implements `NativeReader`."""

    def __init__(
        self,
        inner: ChunkIndex,
        read: Callable[[ChunkIndex, Sequence[ReadItem], Sequence[HostArray], ReadStore], Iterator[int]],
    ) -> None:
        """Wrap an index. `read` is called with `inner` and the arguments of `NativeReader.read`."""
        self.inner = inner
        self._read = read

    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """Return the chunks of the inner index."""
        return self.inner.boxes(leaf, box)

    def extents(self, leaf: int) -> Iterable[tuple[str, int, int]]:
        """Return the extents of the inner index."""
        return self.inner.extents(leaf)

    def check(self, leaves: Collection[int]) -> None:
        """See `ChunkIndex`."""
        self.inner.check(leaves)

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """Return True."""
        return True

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """Call the function."""
        return self._read(self.inner, items, buffers, store)
