"""Stores for layouts under test: they hold a layout to the letter of the protocols, over any storage."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptcore.errors import ChecksumError, ConditionFailedError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.chunk_reads import read_boxes
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
from ckptcore_testing.coverage import assert_makes_up

__all__ = [
    "DirectoryReadStore",
    "DirectoryWriteStore",
    "HeldSnapshot",
    "StoredObject",
    "StrictReadStore",
    "StrictWriteStore",
    "WatchedIndex",
    "local_directory",
    "objects_below",
]


class HeldSnapshot:
    """A `ckptcore.protocols.Snapshot` of arrays in memory, that come in every order of axes and bytes.

    Args:
        plan: what is written.
        arrays: by number of the leaf, the whole array.
    """

    def __init__(self, plan: WritePlan, arrays: Mapping[int, HostArray]) -> None:
        self._plan = plan
        self._arrays = arrays
        self.taken: set[int] = set()
        self.released: list[int] = []

    @property
    def plan(self) -> WritePlan:
        """What is written."""
        return self._plan

    def take(self, item: int) -> Sequence[HostArray]:
        """C order, Fortran order and big endian in turn: all are allowed."""
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
        """Count it."""
        assert item not in self.released, f"item {item} is released twice"
        self.released.append(item)

    def assert_released(self) -> None:
        """Fail unless the memory of every item was given back: a bounded memory would run out."""
        missing = sorted(set(range(len(self._plan.items))) - set(self.released))
        assert not missing, f"the items {missing} were never released"


class StrictWriteStore:
    """A `ckptcore.protocols.WriteStore` over a storage that notes every object written."""

    def __init__(self, storage: StorageBackend) -> None:
        self._storage = storage
        self.objects: dict[str, ObjectRecord] = {}

    @property
    def address(self) -> StorageAddress | None:
        """That of the storage."""
        return self._storage.address

    def put(self, key: str, data: bytes) -> None:
        """Write a file."""
        assert isinstance(data, bytes), f"put takes bytes, found {type(data)}"
        self._add(key, data)

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """Write a file of segments, and hold each to what it says of itself."""
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
        """Write files, one after the other, on another thread: a layout may not rely on its own."""
        with ThreadPoolExecutor(1) as other:
            other.submit(self._write_each, iter(objects)).result()

    def _write_each(self, objects: Iterator[tuple[str, Sequence[Segment]]]) -> None:
        for key, segments in objects:
            self.write(key, segments)

    def _add(self, key: str, data: bytes) -> None:
        assert key not in self.objects, f"the object {key} is written twice"
        assert key != "checkpoint.json", "the root is not the layout's to write"
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
    assert_makes_up(
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
        storage: where the objects are.
        digests: SHA-256 of each object that is to be verified; no other object is there then. None: nothing is verified
            but the checksums behind tiles, as where other software wrote the checkpoint.
    """

    def __init__(self, storage: StorageBackend, digests: Mapping[str, bytes] | None = None) -> None:
        self._storage = storage
        self._digests = digests

    @property
    def address(self) -> StorageAddress | None:
        """That of the storage."""
        return self._storage.address

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of a file."""
        assert type(start) is int and start >= 0, f"get of {key} from {start!r}"
        assert stop is None or (type(stop) is int and stop >= start), f"get of {key} from {start} to {stop!r}"
        return self._verified(key)[start:stop]

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        """Bytes of files; the last are read first."""
        found: list[bytes | None] = []
        for key, start, stop in reversed(ranges):
            try:
                found.append(self.get(key, start, stop))
            except ObjectNotFoundError:
                found.append(None)
        return found[::-1]

    def size(self, key: str) -> int:
        """Bytes of a file."""
        return len(self._verified(key))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below."""
        return list(self._storage.list_names(prefix.removesuffix("/")))

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Iterator[int]:
        """Fill targets from files, and hold each read to what it says of itself; the last read comes first."""
        remaining: dict[int, int] = {}
        for read in reads:
            for number, _, _ in read.targets:
                remaining[number] = remaining.get(number, 0) + 1
        for read in reversed(reads):
            self._read_tile(read)
            for number, _, _ in read.targets:
                remaining[number] -= 1
                if remaining[number] == 0:
                    yield number

    def read_boxes(self, index: ChunkIndex, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> Iterator[int]:
        """Read through an index as the core does."""
        return read_boxes(index, items, buffers, self)

    def _read_tile(self, read: ChunkRead) -> None:
        assert type(read.offset) is int and read.offset >= 0, f"a read of {read.key} from {read.offset!r}"
        nbytes = read.box.size * read.itemsize
        data = self._verified(read.key)[read.offset : read.offset + nbytes]
        if len(data) != nbytes:
            raise CorruptCheckpointError(
                f"{read.key} ends at byte {read.offset + len(data)}, where {nbytes} from {read.offset} are expected",
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
        """Compare what stands behind a tile, whoever verified the object: a layout may not name what is not there."""
        stop = read.offset + len(data)
        end = stop + checksum.nbytes
        stored = self._verified(read.key)[stop:end]
        if len(stored) != checksum.nbytes:
            raise CorruptCheckpointError(
                f"{read.key} ends at byte {stop + len(stored)}, where {checksum.name} is expected from {stop} to {end}",
                key=read.key,
            )
        found = checksum.encode(checksum.of(memoryview(data)))
        if stored != found:
            raise ChecksumError(
                f"{read.key} is not what was written in bytes {read.offset} to {end}: expected {checksum.name} "
                f"{stored.hex()}, found {found.hex()}",
                key=read.key,
                start=read.offset,
                stop=end,
            )

    def _verified(self, key: str) -> bytes:
        if self._digests is not None and key not in self._digests:
            raise ObjectNotFoundError(f"the checkpoint has no object {key}")
        data = self._storage.get(key)
        if self._digests is not None and hashlib.sha256(data).digest() != self._digests[key]:
            raise ChecksumError(f"{key} is not what was written", key=key)
        return data


class DirectoryWriteStore(StrictWriteStore):
    """A strict store of files: `local_directory` as a storage."""

    def __init__(self, directory: Path) -> None:
        super().__init__(local_directory(directory))


class DirectoryReadStore(StrictReadStore):
    """A strict store of files: `local_directory` as a storage."""

    def __init__(self, directory: Path, digests: Mapping[str, bytes] | None = None) -> None:
        super().__init__(local_directory(directory), digests)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a storage, for a test to look at and to damage."""

    storage: StorageBackend
    key: str

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.storage.size(self.key)

    def read_bytes(self) -> bytes:
        """All of it."""
        return self.storage.get(self.key)

    def write_bytes(self, data: bytes | bytearray) -> None:
        """Put something else in its place."""
        self.storage.put(self.key, bytes(data))

    def unlink(self) -> None:
        """Remove it."""
        self.storage.delete([self.key])


def local_directory(directory: Path) -> StorageBackend:
    """A directory of files as a storage, which need not be there yet."""
    return installed_plugins().storage("file")(str(directory), StorageOptions(durable=False))


def objects_below(storage: StorageBackend) -> dict[str, StoredObject]:
    """Every object of a storage by key, sorted."""
    return {key: StoredObject(storage, key) for key in sorted(storage.list())}


class WatchedIndex(ChunkIndex):
    """An index whose reads go through one function, so that tests can count or spoil them. A `NativeReader`."""

    def __init__(
        self,
        inner: ChunkIndex,
        read: Callable[[ChunkIndex, Sequence[ReadItem], Sequence[HostArray], ReadStore], Iterator[int]],
    ) -> None:
        """Read through `read`, which is passed `inner` and the arguments of `NativeReader.read`."""
        self.inner = inner
        self._read = read

    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """Those of the inner index."""
        return self.inner.boxes(leaf, box)

    def extents(self, leaf: int) -> Iterable[tuple[str, int, int]]:
        """Those of the inner index."""
        return self.inner.extents(leaf)

    def check(self, leaves: Collection[int]) -> None:
        """As the inner index does."""
        self.inner.check(leaves)

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """Always."""
        return True

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """Call the function."""
        return self._read(self.inner, items, buffers, store)
