"""Local files of a version: safetensors files with the boxes of its arrays that a follower keeps.

An array that is kept whole is in ``model.safetensors``, or in one of several files with an index, as Hugging Face names
them. Other boxes are in files of slices, as in the layout `safetensors` of the core: the first box of each array is in
the first file, the second box in the second file, and so on.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ckptcore.builtin.local_calls import SystemCall, close_descriptor
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.builtin.safetensors_files import SHARDING, encode_file, file_names, header_entry
from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.checksums import checksums_of
from ckptcore.io.elements import bytes_of, c_strides
from ckptcore.io.threads import IOThreads, for_each
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import BLOCK_BYTES, CHECKSUM_BYTES, ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore_versions.tensor_names import tensor_names

INDEX_NAME: Final = "model.safetensors.index.json"

PIECE_BYTES: Final = 1 << 20
"""Maximum bytes of a piece of an array that is compared or copied at a time."""

CACHED_BLOCK_BYTES: Final = BLOCK_BYTES // 16
"""Bytes of the blocks of local files. Most of these blocks are within one window of `FilePatching`."""

_RUN_BLOCKS: Final = 16
"""Number of adjacent blocks that one thread reads at a time."""

_POPULATE_READ: Final = 22
"""``MADV_POPULATE_READ`` of Linux, which `mmap` does not name."""

_ENTERED_BYTES: Final = 8 << 20
"""Maximum bytes of pages that one call enters into the page table: less than the 5 ms for which Python gives a thread
the GIL anyway."""

_WITHOUT_DESCRIPTOR: Final[Mapping[str, Any]] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Options of `mmap`. Older versions of Python keep a descriptor for each mapped file."""


class Part(NamedTuple):
    """A box of an array in a file.

    Attributes:
        leaf: the number of the array in the tree.
        spec: shape and dtype of the whole array.
        box: the box; its elements are contiguous in the file, in C order.
        offset: the position of its first element in the file, in bytes.
    """

    leaf: int
    spec: ArraySpec
    box: Box
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.box.size * self.spec.numpy_dtype.itemsize

    def extent(self, box: Box) -> tuple[int, int]:
        """Return the range of the file from the first to the last element of a box: half-open, in bytes."""
        itemsize, strides = self.spec.numpy_dtype.itemsize, c_strides(self.box.shape)
        start, stop = box.relative(self.box.start)
        first = sum([low * stride for low, stride in zip(start, strides, strict=True)])
        last = sum([(high - 1) * stride for high, stride in zip(stop, strides, strict=True)])
        return self.offset + first * itemsize, self.offset + (last + 1) * itemsize


class PlannedFile(NamedTuple):
    """A file of a version.

    Attributes:
        name: its name in the directory.
        head: the bytes before its first element.
        parts: the boxes in it, in order.
    """

    name: str
    head: bytes
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.head) + sum([part.nbytes for part in self.parts])


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The files of a version.

    Attributes:
        files: the files with elements.
        index: the content of the index; None if there is none.
        names: the name of each kept array in the files, by leaf. Tied arrays have several names.
        tree: the tree of the version.
    """

    files: tuple[PlannedFile, ...]
    index: bytes | None
    names: Mapping[int, str]
    tree: TreeMetadata

    @property
    def nbytes(self) -> int:
        """Bytes of all files with elements."""
        return sum([file.nbytes for file in self.files])

    def describes(self, directory: str, sizes: Mapping[str, int]) -> bool:
        """Return True if files in a directory have the arrays and boxes of this plan at the same positions.

        Args:
            directory: the path.
            sizes: the names of the files, and their sizes in bytes.
        """
        if sizes != {file.name: file.nbytes for file in self.files}:
            return False
        try:
            for file in self.files:
                with open(os.path.join(directory, file.name), "rb") as stored:
                    if stored.read(len(file.head)) != file.head:
                        return False
        except OSError:
            return False
        return True


def plan_files(tree: TreeMetadata, boxes: Mapping[int, Sequence[Box]]) -> FilePlan:
    """Plan the files of a version.

    Args:
        tree: its tree.
        boxes: by leaf, the boxes to keep, without duplicates; an array that is tied to an earlier one is not listed.

    Raises:
        NameCollisionError: two arrays would have the same name.
    """
    records = {leaf: record for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    names = tensor_names(tree)
    whole = {leaf for leaf, kept in boxes.items() if list(kept) == [Box.whole(records[leaf].spec.shape)]}
    layout = SafetensorsLayout(standalone=True)
    grouped = [[leaf for leaf in leaves if leaf in whole] for leaves in layout.arrays_by_object(tree)]
    groups = [leaves for leaves in grouped if leaves]
    slices = [
        [(leaf, kept[number]) for leaf, kept in boxes.items() if leaf not in whole and len(kept) > number]
        for number in range(max([len(kept) for leaf, kept in boxes.items() if leaf not in whole], default=0))
    ]
    keys = file_names(layout.stem, len(groups)) if groups or slices else file_names(layout.stem, 1)
    files = []
    for key, leaves in zip(keys, groups or ([] if slices else [[]]), strict=not slices):
        metadata: dict[str, JSON] = {
            names[alias]: names[target] for alias, target in tree.aliases.items() if target in leaves
        }
        metadata["format"] = "pt"
        entries = [(leaf, Box.whole(records[leaf].spec.shape)) for leaf in leaves]
        files.append(_planned(key, metadata, [(names[leaf], records[leaf]) for leaf in leaves], entries, records))
    for number, entries in enumerate(slices, start=1):
        tensors, begins = [], {}
        for leaf, box in entries:
            record = ArrayRecord(ArraySpec(box.shape, records[leaf].spec.dtype))
            added_axes = len(header_entry(record)[1]) - len(box.start)
            tensors.append((names[leaf], record))
            begins[names[leaf]] = {"saved_offsets": [*box.start, *[0] * added_axes]}
        metadata = {"format": "pt", SHARDING: json.dumps(begins, separators=(",", ":"))}
        key = f"shard-00001-{layout.stem}-{number:05d}-of-{len(slices):05d}.safetensors"
        files.append(_planned(key, metadata, tensors, entries, records))
    index = None
    if len(groups) > 1 and not slices:
        weight_map = {names[part.leaf]: file.name for file in files for part in file.parts}
        total = sum([part.nbytes for file in files for part in file.parts])
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()
    kept_names = {leaf: name for leaf, name in names.items() if tree.aliases.get(leaf, leaf) in boxes}
    return FilePlan(tuple(files), index, kept_names, tree)


def _planned(
    key: str,
    metadata: Mapping[str, JSON],
    tensors: Sequence[tuple[str, ArrayRecord]],
    entries: Sequence[tuple[int, Box]],
    records: Mapping[int, ArrayRecord],
) -> PlannedFile:
    head, starts = encode_file(metadata, tensors)
    parts = [Part(leaf, records[leaf].spec, box, start) for (leaf, box), start in zip(entries, starts, strict=True)]
    return PlannedFile(key, head, tuple(parts))


def map_file(path: str, nbytes: int, *, writable: bool = False) -> mmap.mmap:
    """Map a file.

    Args:
        path: the file.
        nbytes: its size in bytes.
        writable: True to change the file. False: changes of the memory stay private to this process, so that a library
            that requires writable memory cannot change the file.

    Raises:
        StorageError
    """
    with SystemCall("map", path):
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if writable:
                return mmap.mmap(descriptor, nbytes, **_WITHOUT_DESCRIPTOR)
            # Without MAP_NORESERVE, the kernel may refuse a private mapping that is larger than the memory.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            access = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(descriptor, nbytes, flags=flags, prot=access, **_WITHOUT_DESCRIPTOR)
        finally:
            close_descriptor(descriptor, path)


def enter_pages(memory: mmap.mmap) -> None:
    """Enter the pages of a mapped file into the page table, where the system can.

    Otherwise the first copy takes a page fault for each 64 KiB, nearly as long as the copy: 3.3 ms for 35 MB.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # before Linux 5.14, or the disk fails; the copy then finds that
            # In pieces: `mmap` keeps the GIL during a call, so that no other thread runs.
            for start in range(0, len(memory), _ENTERED_BYTES):
                memory.madvise(_POPULATE_READ, start, _ENTERED_BYTES)


def array_of(part: Part, memory: mmap.mmap) -> HostArray:
    """Return a view of the elements of a part in the memory of its file."""
    dtype = part.spec.numpy_dtype
    if not part.box.size:
        return np.empty(part.box.shape, dtype)
    return np.ndarray(part.box.shape, dtype, memory, part.offset)


def box_of(elements: HostArray, whole: Box, box: Box) -> HostArray:
    """Return a view of a box, given the elements of a larger box. Also a view if the array has no axes."""
    index: Any = (*box.within(whole), ...)
    view: HostArray = elements[index]
    return view


def pieces(box: Box, itemsize: int) -> Iterator[Box]:
    """Divide a box into boxes of at most `PIECE_BYTES`, in C order. An element that is larger is a piece by itself."""
    shape = box.shape
    if not box.size:
        return
    if math.prod(shape) * itemsize <= PIECE_BYTES:
        yield box
        return
    axis = next((axis for axis, extent in enumerate(shape) if extent > 1), None)
    if axis is None:
        yield box
        return
    row = math.prod(shape[axis + 1 :]) * itemsize
    if row <= PIECE_BYTES:
        yield from box.bands(axis, max(1, PIECE_BYTES // max(1, row)))
        return
    for band in box.bands(axis, 1):
        yield from pieces(band, itemsize)


@contextlib.contextmanager
def opened_to_read(path: str) -> Iterator[int]:
    """Open a file to read it.

    Raises:
        StorageError
    """
    with SystemCall("open", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        close_descriptor(descriptor, path)


def read_into(descriptor: int, path: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer from a position of a file. If the file was mapped instead, a failing disk would kill the process.

    Raises:
        CorruptCheckpointError: the file ends too early.
        StorageError
    """
    with SystemCall("read", path):
        while buffer:
            count = os.preadv(descriptor, (buffer,), offset)
            if not count:
                raise CorruptCheckpointError(f"{path} ends before {offset + len(buffer)} bytes: it was truncated")
            buffer, offset = buffer[count:], offset + count


def checksums_of_file(
    path: str, nbytes: int, threads: IOThreads, blocks: Collection[int] | None = None, before: bytes = b""
) -> bytes:
    """Return the checksums of the blocks of a file, in the form of `ckptcore.model.metadata.ObjectRecord.checksums`.

    Args:
        path: the file.
        nbytes: its size in bytes.
        threads: read and compute.
        blocks: the blocks to compute, see `blocks_of`; None: all.
        before: the checksums of the other blocks, and of those to compute.

    Raises:
        CorruptCheckpointError: the file ends too early.
        StorageError
    """
    count = -(-nbytes // CACHED_BLOCK_BYTES)
    checksums = bytearray(before or count * CHECKSUM_BYTES)

    def compute(run: range) -> None:
        start, stop = run.start * CACHED_BLOCK_BYTES, min(run.stop * CACHED_BLOCK_BYTES, nbytes)
        data = bytes_of(np.empty(stop - start, np.uint8))
        read_into(descriptor, path, start, data)
        set_checksums(checksums, start, data)

    runs: list[range] = []
    for block in range(count) if blocks is None else sorted(blocks):
        if runs and runs[-1].stop == block and len(runs[-1]) < _RUN_BLOCKS:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    with opened_to_read(path) as descriptor:
        for_each(threads, runs, compute)
    return bytes(checksums)


def set_checksums(checksums: bytearray, start: int, data: memoryview) -> None:
    """Set the checksums of whole blocks of a file, which begin at a position in bytes. The last one may be shorter."""
    computed = checksums_of(data, CACHED_BLOCK_BYTES)
    first = start // CACHED_BLOCK_BYTES * CHECKSUM_BYTES
    checksums[first : first + len(computed)] = computed


def blocks_of(ranges: Iterable[tuple[int, int]]) -> set[int]:
    """Return the numbers of the blocks of a local file that have bytes of ranges."""
    return {
        block for start, stop in ranges for block in range(start // CACHED_BLOCK_BYTES, -(-stop // CACHED_BLOCK_BYTES))
    }
