"""Streaming of arrays from a stored checkpoint to a layout: arrays are read in slices, ahead of the writer."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from ckptcore.context import Context
from ckptcore.errors import ObjectNotFoundError, PluginError, SaveLostError
from ckptcore.io.chunk_reads import native_reader
from ckptcore.loading.reading import allocate_for
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata, unreadable_error
from ckptcore.model.transfer import WriteItem, WritePlan
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint, extents_of, missing_file
from ckptcore.planning import plan_read
from ckptcore.protocols import Layout

_SLICE_BYTES: Final = 64 << 20
_ITEM_BYTES: Final = 512 << 20
_MIN_SLICE_BYTES: Final = 4 << 10
_MAX_SLICES_LOG2: Final = 16
"""Maximum number of slices of an array, as a binary logarithm. A hostile checkpoint can state any size."""
_MAX_RANGES: Final = 1 << 16
"""Approximate maximum number of flat ranges of an array. A hostile checkpoint can state any size."""
_LEAST_PARTS: Final = 3
"""Minimum number of parts that a band is cut into. To verify a band with one checksum, a reader reads all of it if at
least half of it is requested. So each of two halves would read the whole band."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamSizes:
    """Memory limits of a streamed copy, in bytes.

    Attributes:
        slice: size of a read, and of a slice of an array if the array can be divided.
        item: arrays up to this size are not divided if they are stored with a header or checksum, because the checksum
            can be verified only if the whole array is read.
        buffered: bytes that are read and not yet written. The limit is exceeded if the writer waits for an array that
            is not yet read.
        tied: bytes of tied arrays that are kept after the first write, because the arrays are written again under other
            names. Tied arrays beyond this limit are read once for each name. None: the size of the largest array.
    """

    slice: int = _SLICE_BYTES
    item: int = _ITEM_BYTES
    buffered: int = 3 * _SLICE_BYTES  # one slice is read, one waits, one is written
    tied: int | None = dataclasses.field(default=None, compare=False)  # derived from the other sizes

    @classmethod
    def of(cls, context: Context) -> StreamSizes:
        """Return the sizes for the options of a Context."""
        usual, limit = cls(), context.memory.load_bytes
        if limit is None:
            return usual
        slice_bytes = min(usual.slice, max(limit // 3, _MIN_SLICE_BYTES))
        buffered = min(usual.buffered, limit)
        return cls(slice_bytes, min(usual.item, limit), buffered, limit - buffered)


def reading_context(context: Context) -> Context:
    """Return an equal Context with its own I/O threads, for reading.

    The threads of `context` write, and wait for arrays to be read. Reading on the same threads could deadlock.
    """
    return dataclasses.replace(context)


def items_by_object(
    layout: Layout, tree: TreeMetadata, checkpoint: Checkpoint, sources: Sequence[int], sizes: StreamSizes
) -> list[list[WriteItem]]:
    """Return the write items for a layout, grouped by object, in the order in which the layout takes them.

    Arrays are divided if the layout supports it. Otherwise there is one group with whole arrays.

    Args:
        layout: the layout of the copy.
        tree: the tree to write.
        checkpoint: the checkpoint to read. Its sizes must have been checked.
        sources: by leaf of the tree, the leaf of `checkpoint` that has its elements.
        sizes: sizes of slices.

    Raises:
        InsufficientMemoryError: the largest item does not fit in memory.
        CorruptCheckpointError, UnsupportedLeafError: a leaf cannot be loaded.
    """
    for path, record in zip(tree.paths, tree.leaves, strict=True):
        if (error := unreadable_error(record)) is not None:
            pattern = "/".join(map(str, path)).replace("{", "{{").replace("}", "}}")
            raise type(error)(
                f"{format_path(path)} cannot be copied, because {error}. To copy the other leaves, drop it: "
                f"ckptcore.copy(source, destination, layout=..., transforms=[ckptcore.transforms.Drop({pattern!r})]). "
                "Nothing was written"
            ) from error
    objects = _items_by_object(layout, tree, checkpoint, sources, sizes)
    largest = max([item for items in objects for item in items], key=lambda item: item.nbytes, default=None)
    if largest is not None:  # fail before the layout plans and writes terabytes; no memory page is touched
        allocate_for(checkpoint, sources[largest.leaf], ArraySpec((largest.nbytes,), "uint8"))
    return objects


def _items_by_object(
    layout: Layout, tree: TreeMetadata, checkpoint: Checkpoint, sources: Sequence[int], sizes: StreamSizes
) -> list[list[WriteItem]]:
    objects = layout.arrays_by_object(tree)
    if objects is None:
        return [
            [
                WriteItem(leaf, record.spec, (Box.whole(record.spec.shape),))
                for leaf, record in enumerate(tree.leaves)
                if isinstance(record, ArrayRecord) and leaf not in tree.aliases
            ]
        ]
    derived = checkpoint.derived
    if derived is not None:
        return [
            [
                WriteItem(leaf, record.spec, (box,))
                for leaf in leaves
                if isinstance(record := tree.leaves[leaf], ArrayRecord)
                for box in derived.pieces(sources[leaf], sizes.slice)
            ]
            for leaves in objects
        ]
    stored = _stored_bytes(checkpoint)
    index = checkpoint.index
    native = native_reader(index)

    def slices(record: ArrayRecord, source: int) -> list[Box]:
        rows, shape = index.chunk_rows(source), record.spec.shape
        is_native = native is not None and native.reads(source, checkpoint.store)
        is_whole = is_native and rows is not None and shape != () and rows >= shape[0]
        return _slices(record, stored.get(source, 0), rows, sizes, is_whole=is_whole)

    return [
        [
            WriteItem(leaf, record.spec, (box,))
            for leaf in leaves
            if isinstance(record := tree.leaves[leaf], ArrayRecord)
            for box in slices(record, sources[leaf])
        ]
        for leaves in objects
    ]


def _stored_bytes(checkpoint: Checkpoint) -> Mapping[int, int]:
    """Return the total size of the byte ranges of each leaf. See `ChunkIndex.extents`."""
    stored: dict[int, int] = {}
    for leaf, _, start, stop in extents_of(checkpoint):
        stored[leaf] = stored.get(leaf, 0) + stop - start
    return stored


def _slices(record: ArrayRecord, stored: int, rows: int | None, sizes: StreamSizes, *, is_whole: bool) -> list[Box]:
    """Divide an array at the boundaries of its stored chunks, and elsewhere only if parts can be read efficiently.

    Args:
        record: the array.
        stored: total size of its byte ranges, which may include headers and checksums. See `_stored_bytes`.
        rows: rows per chunk. None if there is no regular grid.
        sizes: sizes of slices.
        is_whole: True if each read of a part reads the whole array.
    """
    nbytes = record.spec.nbytes
    if nbytes <= sizes.slice or is_whole:
        return [Box.whole(record.spec.shape)]
    if stored == nbytes:
        undivided = 0  # raw elements: any range can be read alone
    elif stored > nbytes:
        undivided = sizes.item
    else:
        undivided = nbytes  # encoded: reading a part decodes everything
    slice_bytes = max(sizes.slice, nbytes >> _MAX_SLICES_LOG2)
    bands: Sequence[int] = record.cuts[0] if record.cuts else ()
    if rows is not None and record.spec.shape:
        step = rows * max(1, slice_bytes // (rows * (nbytes // record.spec.shape[0])))
        bands = range(step, record.spec.shape[0], step)
    return cut_flat_ranges(record.spec, bands, most_bytes=slice_bytes, band_bytes=undivided)


def cut_flat_ranges(spec: ArraySpec, bands: Collection[int], *, most_bytes: int, band_bytes: int) -> list[Box]:
    """Cut an array into consecutive boxes in C order, each of which is one flat range of elements.

    Args:
        spec: the array.
        bands: preferred boundaries along the first axis, in elements and in any order. A band is the elements
            between two boundaries. Boundaries outside of the array are ignored.
        most_bytes: maximum size of a box. A single element, or a band that is not cut, may exceed it.
        band_bytes: bands up to this size are not cut.

    Returns:
        A single box for an array of at most `most_bytes`, including an empty array.
    """
    if not spec.shape or spec.nbytes <= most_bytes:
        return [Box.whole(spec.shape)]
    most_bytes = max(most_bytes, -(-spec.nbytes // _MAX_RANGES))
    rows, rest = spec.shape[0], spec.shape[1:]
    itemsize = spec.numpy_dtype.itemsize
    row_bytes = math.prod(rest) * itemsize
    edges = [0, *sorted({bound for bound in bands if 0 < bound < rows}), rows]
    boxes: list[Box] = []
    first = 0
    for low, high in itertools.pairwise(edges):
        if low > first and (high - first) * row_bytes > most_bytes:
            boxes.extend(_rows(first, low, rest))
            first = low
        if (high - first) * row_bytes > max(most_bytes, band_bytes):  # a single band that is too large
            boxes.extend(_cut((), first, high, rest, itemsize, most_bytes))
            first = high
    if first < rows:
        boxes.extend(_rows(first, rows, rest))
    return boxes


def _rows(first: int, stop: int, rest: tuple[int, ...]) -> Iterator[Box]:
    yield Box((first, *(0,) * len(rest)), (stop, *rest))


def _cut(
    above: tuple[int, ...], first: int, stop: int, rest: tuple[int, ...], itemsize: int, most_bytes: int
) -> Iterator[Box]:
    """Cut rows `first` to `stop` of the subarray at the index `above`, which have more than `most_bytes`."""
    row_bytes = math.prod(rest) * itemsize
    rows = stop - first
    if row_bytes <= most_bytes or not rest:
        count = min(rows, max(_LEAST_PARTS, -(-rows // max(1, most_bytes // row_bytes))))
        bounds = [first + rows * number // count for number in range(count + 1)]
        after = tuple([index + 1 for index in above])
        for low, high in itertools.pairwise(bounds):
            yield Box((*above, low, *(0,) * len(rest)), (*after, high, *rest))
        return
    for row in range(first, stop):
        yield from _cut((*above, row), 0, rest[0], rest[1:], itemsize, most_bytes)


class StreamedSnapshot:
    """A `ckptcore.protocols.Snapshot` of stored arrays that are read ahead of the writer. Thread-safe.

    The caller must close it. A separate thread reads the items in the order of the plan. Items that block the writer
    are read first. Small arrays are read in batches. The thread starts with the first call of `take`. The elements
    of a tied array that is written under several names are read once, if they can be kept in memory.
    """

    def __init__(self, plan: WritePlan, checkpoint: Checkpoint, sources: Sequence[int], sizes: StreamSizes) -> None:
        """Prepare to read.

        Args:
            plan: the items to write.
            checkpoint: the checkpoint to read. Its I/O threads must not be used for writing; see `reading_context`.
            sources: by leaf of the plan's tree, the leaf of `checkpoint` that has its elements.
            sizes: sizes of slices and of the buffer.
        """
        self.plan = plan
        self._opened = checkpoint
        self._sources = sources
        self._sizes = sizes
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._arrays: dict[int, Sequence[HostArray]] = {}
        self._first_of = _tied_items(plan, sources, sizes)
        self._others_of: dict[int, list[int]] = {}
        for other, first in self._first_of.items():
            self._others_of.setdefault(first, []).append(other)
        self._unread = set(range(len(plan.items))).difference(self._first_of)
        self._released: set[int] = set()
        self._position = 0
        self._requested: deque[int] = deque()
        self._buffered = 0
        self._error: BaseException | None = None

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`.

        Raises:
            CheckpointError: the error of reading.
            PluginError: if the item was released before.
        """
        with self._changed:
            if self._thread is None and self._error is None:
                self._thread = threading.Thread(target=self._read_all, name="ckptcore-read-ahead", daemon=True)
                self._thread.start()
            if item in self._released:
                raise PluginError(
                    f"{format_path(self.plan.tree.paths[self.plan.items[item].leaf])} was taken again after its "
                    "release. A layout must release an array only when it no longer needs it"
                )
            if item not in self._arrays:
                self._requested.append(self._first_of.get(item, item))
                self._changed.notify_all()
            while item not in self._arrays:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._arrays[item]

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._changed:
            if self._arrays.pop(item, None) is not None:
                self._released.add(item)
                self._buffered -= 0 if item in self._first_of else self.plan.items[item].nbytes
                self._changed.notify_all()

    def close(self) -> None:
        """Stop reading and free the arrays. Can be called again."""
        with self._changed:
            self._error = self._error or SaveLostError("an array was taken after the snapshot was closed")
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._arrays.clear()

    def _read_all(self) -> None:
        try:
            while batch := self._next_batch():
                self._read(batch)
        except ObjectNotFoundError as error:
            self._fail(missing_file(self._opened, error))
        except BaseException as error:  # noqa: BLE001  # `take` raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _next_batch(self) -> Sequence[int]:
        """Wait for room in the buffer and return items to read together. Empty after the last item, or when closed."""
        with self._changed:
            while self._error is None and self._unread:
                while self._requested and self._requested[0] not in self._unread:
                    self._requested.popleft()
                while self._position not in self._unread:
                    self._position += 1
                first = self._requested[0] if self._requested else self._position
                # A requested item is read even if the buffer is full: the writer waits for it, so waiting would
                # deadlock.
                room = self._sizes.buffered - self._buffered
                if self._requested or self._buffered == 0 or self.plan.items[first].nbytes <= room:
                    return self._batch_from(first, min(self._sizes.slice, room))
                self._changed.wait()
            return ()

    def _batch_from(self, first: int, max_bytes: int) -> Sequence[int]:
        """Take an item and the next ones that fit. The caller holds the lock."""
        batch: list[int] = []
        nbytes = 0
        for number in range(first, len(self.plan.items)):
            size = self.plan.items[number].nbytes
            if number not in self._unread or (batch and nbytes + size > max_bytes):
                break
            batch.append(number)
            nbytes += size
        self._unread.difference_update(batch)
        self._buffered += nbytes
        return batch

    def _read(self, batch: Sequence[int]) -> None:
        """Read items, and publish each one when it is complete."""
        items = [self.plan.items[number] for number in batch]
        buffers = [
            allocate_for(self._opened, self._sources[item.leaf], ArraySpec(box.shape, item.spec.dtype))
            for item in items
            for box in item.boxes
        ]
        owners = [position for position, item in enumerate(items) for _ in item.boxes]
        left = [len(item.boxes) for item in items]
        wanted = [(self._sources[item.leaf], item.boxes) for item in items]
        plan = plan_read(self._opened.tree, wanted)
        arrays: list[list[HostArray]] = [[] for _ in items]
        for position, buffer in zip(owners, buffers, strict=True):
            arrays[position].append(buffer)
        for number in self._opened.read(plan, buffers):
            position = owners[number]
            left[position] -= 1
            if not left[position]:
                with self._changed:
                    for each in (batch[position], *self._others_of.get(batch[position], ())):
                        self._arrays[each] = arrays[position]
                    self._changed.notify_all()
        missing = next((item.leaf for item, count in zip(items, left, strict=True) if count), None)
        if missing is not None:
            raise PluginError(
                f"{format_path(self.plan.tree.paths[missing])}: the layout {self._opened.layout.name} did not read it. "
                "A layout must yield the number of every box that is requested"
            )


def _tied_items(plan: WritePlan, sources: Sequence[int], sizes: StreamSizes) -> Mapping[int, int]:
    """Map items to an earlier item with the same elements, if the memory limit allows keeping these elements."""
    budget = sizes.tied if sizes.tied is not None else max([item.spec.nbytes for item in plan.items], default=0)
    first: dict[tuple[int, Sequence[Box]], int] = {}
    tied: dict[int, int] = {}
    kept: set[int] = set()
    for number, item in enumerate(plan.items):
        earlier = first.setdefault((sources[item.leaf], item.boxes), number)
        if earlier == number or (earlier not in kept and item.nbytes > budget):
            continue
        budget -= 0 if earlier in kept else item.nbytes
        kept.add(earlier)
        tied[number] = earlier
    return tied
