"""Patching: the files of a version, written as those of its base with the changes of deltas.

The files are copied window by window, and a window is changed in memory on the way. A write to a mapped file instead
would take a page fault for each 4 KiB, which takes longer than to copy and to change them.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ckptcore.builtin.local_calls import SystemCall
from ckptcore.derivations import Stored
from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.elements import bytes_of
from ckptcore.io.memory import allocate
from ckptcore.io.threads import IOThreads, for_each
from ckptcore.loading.reading import incomplete_read
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint, naming_additional, naming_arrays
from ckptcore.opening.derived import Derived
from ckptcore.planning import plan_read
from ckptcore_versions.deltas.checksums import CRC32
from ckptcore_versions.deltas.chunks import EncodedChunk
from ckptcore_versions.deltas.encoding import word_bytes
from ckptcore_versions.deltas.patched_arrays import ChangedBox, PatchedArray, apply_chunks, runs_of
from ckptcore_versions.following.cache import CachedFile
from ckptcore_versions.following.local_files import (
    CACHED_BLOCK_BYTES,
    FilePlan,
    Part,
    blocks_of,
    opened_to_read,
    read_into,
    set_checksums,
)

_WINDOW_BYTES: Final = 1 << 20
"""Bytes of a window: it stays in the cache of a processor."""

LARGEST_WINDOW_BYTES: Final = 64 << 20
"""Chunks that are columns of a large array would make a window of the whole array."""

_ENCODED_BYTES: Final = 256 << 20
"""Encoded bytes of the patches that are written together, unless one array has more."""

_KEPT_SHARE: Final = 16
"""Encoded bytes also stay in memory for later patches: `_ENCODED_BYTES`, or this part of the version if that is more. A
delta of a step has about a fiftieth."""

_REQUEST_BYTES: Final = 8 << 20
"""Bytes of a request for a part of an object. A remote storage answers several requests at a time."""


@dataclass(slots=True)
class Patch:
    """The changes of deltas to a part of a file.

    Attributes:
        part: the part.
        deltas: for each delta that changes it, from the oldest: the encoded bytes of its array, and its chunks.
        encoded: for each delta, the encoded bytes of each chunk, once they are read.
    """

    part: Part
    deltas: Sequence[tuple[Stored, Sequence[EncodedChunk]]]
    encoded: list[list[memoryview]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Encoded bytes of all chunks."""
        return sum([chunk.stop - chunk.start for _, chunks in self.deltas for chunk in chunks])

    @property
    def changed(self) -> Iterator[Box]:
        """The boxes of the part that have changes; the part itself if one delta changes all chunks of a whole array."""
        box = self.part.box
        if box == Box.whole(self.part.spec.shape) and any(
            sum([chunk.box.size for chunk in chunks]) == box.size for _, chunks in self.deltas
        ):
            yield box
            return
        for _, chunks in self.deltas:
            for chunk in chunks:
                common = chunk.box.intersect(self.part.box)
                assert common is not None  # `patches_of` selected them
                yield common


class _Band(NamedTuple):
    """Adjacent elements of a part: a box of it that no chunk crosses.

    Attributes:
        patch: the patch.
        box: the box.
        chunks: for each delta of the patch, the numbers of the chunks in it.
    """

    patch: Patch
    box: Box
    chunks: Sequence[Sequence[int]]

    @property
    def is_verified(self) -> bool:
        """True if whole chunks of one delta make it up, so that their digests verify all of its elements."""
        size = self.box.size
        return any(
            sum([chunk.size for number in numbers if self.box.contains(chunk := chunks[number].box)]) == size
            for numbers, (_, chunks) in zip(self.chunks, self.patch.deltas, strict=True)
        )


class _Window(NamedTuple):
    """Adjacent bands of a file.

    Attributes:
        start, stop: its range in the file, in bytes.
        bands: its bands.
    """

    start: int
    stop: int
    bands: Sequence[_Band]

    @property
    def blocks(self) -> range:
        """The blocks of the file of which it has all bytes."""
        return range(-(-self.start // CACHED_BLOCK_BYTES), self.stop // CACHED_BLOCK_BYTES)

    @property
    def edges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The ranges before and after these blocks, in bytes."""
        low, high = self.blocks.start * CACHED_BLOCK_BYTES, self.blocks.stop * CACHED_BLOCK_BYTES
        return (self.start, min(low, self.stop)), (max(high, self.start), self.stop)

    @property
    def is_changed(self) -> bool:
        """True if a delta changes it."""
        return any(any(band.chunks) for band in self.bands)

    @property
    def is_verified(self) -> bool:
        """True if digests of deltas verify all of its elements."""
        return all(band.is_verified for band in self.bands)

    def changes(self, memory: HostArray) -> Iterator[Sequence[ChangedBox]]:
        """Yield the changes of each delta, from the oldest.

        Args:
            memory: the bytes of the window.
        """
        by_delta: dict[int, list[ChangedBox]] = {}
        for patch, box, chunks in self.bands:
            offset = patch.part.extent(box)[0] - self.start
            elements = np.ndarray(box.shape, patch.part.spec.numpy_dtype, memory, offset)
            word = word_bytes(patch.part.spec)
            for (stored, of_delta), numbers, encoded in zip(patch.deltas, chunks, patch.encoded, strict=True):
                own = [(of_delta[number].box, encoded[number]) for number in numbers]
                by_delta.setdefault(-stored.checkpoint, []).append(ChangedBox(box, elements, word, own, offset))
        return iter([by_delta[number] for number in sorted(by_delta)])


def patches_of(derived: Derived, plan: FilePlan) -> Mapping[str, Sequence[Patch]] | None:
    """Return the patches of each file; None if an array is not that of the last source with changes of deltas.

    Args:
        derived: a version. Its last source has the files of the plan.
        plan: its files.
    """
    last = len(derived.sources) - 1
    patches: dict[str, list[Patch]] = {}
    for file in plan.files:
        of_file = patches[file.name] = []
        for part in file.parts:
            array, of_base = derived.derivations[part.leaf], Stored(part.spec, part.leaf, last)
            if array == of_base:
                of_file.append(Patch(part, ()))
            elif isinstance(array, PatchedArray) and array.base == of_base:
                found = [(encoded, chunks.within(part.box)) for encoded, chunks in array.deltas]
                of_file.append(Patch(part, [(encoded, chunks) for encoded, chunks in found if chunks]))
            else:
                return None
    return patches


class FilePatching:
    """Writes a file with the changes of patches.

    Attributes:
        checksums: the checksums of the blocks of the file, see `CachedFile`; those of the base until it is written.
        unknown: the blocks whose checksums are those of the base, although they have changes: no window has all of one.
        unverified: the ranges with elements of the base that no digest of a delta verifies.
    """

    def __init__(self, checkpoint: Checkpoint, patches: Sequence[Patch], base: CachedFile, threads: IOThreads) -> None:
        """Write nothing yet.

        Args:
            checkpoint: the version, derived from its base and deltas.
            patches: the patches of the file, in order.
            base: the file of the base, with the same parts at the same positions.
            threads: copy windows.
        """
        self._checkpoint = checkpoint
        self._threads = threads
        self._batches = [(batch, list(_windows(batch))) for batch in _batches(patches)]
        windows = [window for _, of_batch in self._batches for window in of_batch]
        self.largest = max([window.stop - window.start for window in windows], default=0)
        self.checksums = bytearray(base.checksums)
        self.unknown = blocks_of([edge for window in windows if window.is_changed for edge in window.edges])
        self.unverified = [(window.start, window.stop) for window in windows if not window.is_verified]

    def write(self, base: str, path: str, descriptor: int, encoded: EncodedObjects) -> None:
        """Copy the elements of a base, with the changes.

        Args:
            base: the file of the base, with the same parts at the same positions.
            path, descriptor: the file to write.
            encoded: the encoded bytes of the patches of all files.

        Raises:
            CorruptCheckpointError: a delta is damaged, or the base differs from that of the save.
            StorageError
        """

        def copy(window: _Window) -> None:
            memory = np.empty(window.stop - window.start, np.uint8)
            read_into(source, base, window.start, bytes_of(memory))
            try:
                for changes in window.changes(memory):
                    apply_chunks(memory, changes)
            except CorruptCheckpointError as error:
                tree = self._checkpoint.tree
                names = [format_path(tree.paths[band.patch.part.leaf]) for band in window.bands if any(band.chunks)]
                raise type(error)(f"{', '.join(names[:5])} of {self._checkpoint}: {error}") from error
            if window.is_changed and (blocks := window.blocks):  # to read them again would take as long as this copy
                low, high = blocks.start * CACHED_BLOCK_BYTES, blocks.stop * CACHED_BLOCK_BYTES
                set_checksums(self.checksums, low, bytes_of(memory)[low - window.start : high - window.start])
            with SystemCall("write", path):
                write_all(descriptor, window.start, bytes_of(memory))

        with opened_to_read(base) as source:
            for patches, windows in self._batches:
                encoded.fill(patches)
                for_each(self._threads, windows, copy)
                for patch in patches:
                    patch.encoded = []


def write_all(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Write all bytes at a position of a file."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _batches(patches: Sequence[Patch]) -> Iterator[Sequence[Patch]]:
    """Divide patches into batches of at most `_ENCODED_BYTES`, unless one patch has more."""
    batch: list[Patch] = []
    nbytes = 0
    for patch in patches:
        if batch and nbytes + patch.nbytes > _ENCODED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(patch)
        nbytes += patch.nbytes
    if batch:
        yield batch


def _windows(patches: Sequence[Patch]) -> Iterator[_Window]:
    """Divide a file into windows that no chunk crosses."""
    bands: list[_Band] = []
    start = stop = 0
    for patch in patches:
        for band in _bands(patch):
            low, high = patch.part.extent(band.box)
            if bands and (low != stop or high - start > _WINDOW_BYTES):
                yield _Window(start, stop, bands)
                bands = []
            if not bands:
                start = low
            bands.append(band)
            stop = high
    if bands:
        yield _Window(start, stop, bands)


def _bands(patch: Patch) -> Iterator[_Band]:
    """Divide a part along its first axis into bands of about `_WINDOW_BYTES` that no chunk crosses."""
    box = patch.part.box
    if not box.size:
        return
    axis = next((axis for axis, extent in enumerate(box.shape) if extent > 1), None)
    everything = [range(len(chunks)) for _, chunks in patch.deltas]
    if axis is None or patch.part.nbytes <= _WINDOW_BYTES:
        yield _Band(patch, box, everything)
        return
    rows = max(1, _WINDOW_BYTES * box.shape[axis] // patch.part.nbytes)
    spans = [[(chunk.box.start[axis], chunk.box.stop[axis]) for chunk in chunks] for _, chunks in patch.deltas]
    lows: list[int] = []
    highs: list[int] = []
    for low, high in sorted(itertools.chain.from_iterable(spans)):
        if highs and low < highs[-1]:
            highs[-1] = max(highs[-1], high)
        else:
            lows.append(low)
            highs.append(high)
    orders = [sorted(range(len(of_delta)), key=of_delta.__getitem__) for of_delta in spans]
    taken = [0] * len(orders)
    start, stop = box.start[axis], box.stop[axis]
    while start < stop:
        end = min(start + rows, stop)
        crossed = bisect.bisect_left(lows, end) - 1
        if crossed >= 0:
            end = min(max(end, highs[crossed]), stop)
        numbers = []
        for delta, order in enumerate(orders):
            first = taken[delta]
            while taken[delta] < len(order) and spans[delta][order[taken[delta]]][0] < end:
                taken[delta] += 1
            numbers.append(order[first : taken[delta]])
        yield _Band(patch, box.band(axis, start, end), numbers)
        start = end


_Object: TypeAlias = tuple[int, str]
"""An object of a delta: the number of the delta among the sources, and the key."""

_Chunks: TypeAlias = dict[int, tuple[int, EncodedChunk]]
"""Chunks by their position in an object, each with the leaf of its array of encoded bytes."""


class EncodedObjects:
    """The encoded bytes of the chunks of a version.

    An object has the chunks of many arrays, stripe by stripe. So it is read once, for all files, and stays in memory
    until the last patch that needs it: to read the chunks of each file apart would read nearly all of it each time.
    """

    def __init__(self, checkpoint: Checkpoint, patches: Sequence[Patch]) -> None:
        """Read nothing yet.

        Args:
            checkpoint: the version, derived from its base and deltas.
            patches: the patches of all files.
        """
        self._checkpoint = checkpoint
        self._most = max(_ENCODED_BYTES, sum([patch.part.nbytes for patch in patches]) // _KEPT_SHARE)
        self._needed: dict[_Object, _Chunks] = {}
        self._users = Counter[_Object]()
        self._kept: dict[_Object, dict[int, memoryview]] = {}
        for patch in patches:
            by_object = _by_object([patch])
            self._users.update(by_object.keys())
            for key, chunks in by_object.items():
                self._needed.setdefault(key, {}).update(chunks)

    def fill(self, patches: Sequence[Patch]) -> None:
        """Set the encoded bytes of patches. Each patch is given once.

        Raises:
            CorruptCheckpointError
            StorageError
        """
        by_object = _by_object(patches)
        held = sum([sum(map(len, kept.values())) for kept in self._kept.values()])
        missing: dict[_Object, _Chunks] = {}
        for key, chunks in by_object.items():
            if key not in self._kept:
                nbytes = sum([chunk.stop - chunk.start for _, chunk in self._needed[key].values()])
                is_kept = held + nbytes <= self._most
                held += nbytes if is_kept else 0
                missing[key] = self._needed[key] if is_kept else chunks
        found = {**self._kept, **_read_encoded(self._checkpoint, missing)}
        for patch in patches:
            patch.encoded = [
                [found[stored.checkpoint, chunk.key][chunk.offset] for chunk in chunks]
                for stored, chunks in patch.deltas
            ]
            self._users.subtract(_by_object([patch]).keys())
        self._kept = {
            key: views for key, views in found.items() if self._users[key] and len(views) == len(self._needed[key])
        }


def _by_object(patches: Sequence[Patch]) -> dict[_Object, _Chunks]:
    """Return the chunks of patches by object."""
    by_object: dict[_Object, _Chunks] = {}
    for patch in patches:
        for stored, chunks in patch.deltas:
            for chunk in chunks:
                by_object.setdefault((stored.checkpoint, chunk.key), {})[chunk.offset] = stored.leaf, chunk
    return by_object


def _read_encoded(
    checkpoint: Checkpoint, objects: Mapping[_Object, _Chunks]
) -> Mapping[_Object, dict[int, memoryview]]:
    """Read the encoded bytes of chunks, those of each delta together. Returns them by object and position.

    Raises:
        CorruptCheckpointError
        StorageError
    """
    derived = checkpoint.derived
    assert derived is not None
    by_source: dict[int, dict[str, _Chunks]] = {}
    for (number, key), chunks in sorted(objects.items()):
        by_source.setdefault(number, {})[key] = chunks
    encoded: dict[_Object, dict[int, memoryview]] = {}
    for number, of_source in by_source.items():
        source = derived.sources[number]
        with naming_additional(source) if number else naming_arrays(source):
            encoded.update({(number, key): views for key, views in _encoded_of(source, of_source).items()})
    return encoded


def _encoded_of(source: Checkpoint, objects: Mapping[str, _Chunks]) -> Mapping[str, dict[int, memoryview]]:
    """Return the encoded bytes of chunks of a delta, by key and position.

    Reads objects of which every byte is needed as a whole: to read each chunk by itself takes longer than to decode it.
    """
    needed = {
        key: sum([chunk.stop - chunk.start + CRC32.nbytes for _, chunk in chunks.values()])
        for key, chunks in objects.items()
    }
    records = [(key, source.store.objects.get(key)) for key in needed]
    whole = [key for key, record in records if record is not None and record.checksums and record.size == needed[key]]
    pieces = [(key, start, min(start + _REQUEST_BYTES, needed[key]))
              for key in whole for start in range(0, needed[key], _REQUEST_BYTES)]  # fmt: skip
    read: dict[str, list[bytes]] = {key: [] for key in whole}
    for (key, _, _), data in zip(pieces, source.store.get_many(pieces), strict=True):
        if data is None:
            raise ObjectNotFoundError(f"{key} does not exist")
        read[key].append(data)
    encoded: dict[str, dict[int, memoryview]] = {}
    for key, of_key in read.items():
        content = memoryview(of_key[0] if len(of_key) == 1 else b"".join(of_key))
        encoded[key] = {
            offset: content[offset : offset + chunk.stop - chunk.start] for offset, (_, chunk) in objects[key].items()
        }
    apart = [of_leaf for key, chunks in objects.items() if key not in read for of_leaf in chunks.values()]
    for (_, chunk), view in zip(apart, _read_apart(source, apart), strict=True):
        encoded.setdefault(chunk.key, {})[chunk.offset] = view
    return encoded


def _read_apart(source: Checkpoint, chunks: Sequence[tuple[int, EncodedChunk]]) -> Sequence[memoryview]:
    """Return the encoded bytes of chunks, which are read from the arrays of encoded bytes."""
    by_leaf = itertools.groupby(chunks, lambda of_leaf: of_leaf[0])
    runs = [(leaf, run) for leaf, of_leaf in by_leaf for run in runs_of([chunk for _, chunk in of_leaf])]
    if not runs:
        return []
    plan = plan_read(source.tree, [(leaf, (run.range,)) for leaf, run in runs])
    buffers = [allocate(ArraySpec(run.range.shape, "uint8")) for _, run in runs]
    missing = set(range(len(runs))).difference(source.read(plan, buffers))
    if missing:
        raise incomplete_read(source, runs[min(missing)][0])
    return [
        bytes_of(buffer)[chunk.start - run.range.start[0] : chunk.stop - run.range.start[0]]
        for (_, run), buffer in zip(runs, buffers, strict=True)
        for chunk in run.chunks
    ]
