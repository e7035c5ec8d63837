"""Arrays of a checkpoint that is read, for the layout that writes another one: in pieces, some of them ahead of the writer."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from ckptcore.context import Context
from ckptcore.errors import PluginError, SaveLostError
from ckptcore.io.memory import allocate
from ckptcore.loading.checkpoint import Checkpoint, extents_of
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import WriteItem, WritePlan
from ckptcore.model.tree import format_path
from ckptcore.planning import plan_read
from ckptcore.planning.partition import cut_runs
from ckptcore.protocols import Layout

__all__ = ["StreamSizes", "StreamedSnapshot", "items_by_object", "reading_context"]

_PIECE_BYTES: Final = 64 << 20
_ITEM_BYTES: Final = 512 << 20
_LEAST_BYTES: Final = 4 << 10
_MOST_BANDS_BITS: Final = 16
"""About how many boundaries between chunks are looked at, as a power of 2: a hostile checkpoint may state any size."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamSizes:
    """How much is in memory while a checkpoint is read and written again, in bytes.

    Attributes:
        piece: what is read at once, and the most of an array that is, where it can be cut so.
        item: what software stored as one item with a header or a checksum around it is not cut up to here: its checksum
            can only be compared where all of it is read.
        held: what is read and not yet written, unless the writer waits for more.
    """

    piece: int = _PIECE_BYTES
    item: int = _ITEM_BYTES
    held: int = 3 * _PIECE_BYTES  # one that is read, one that waits, one that is written

    @classmethod
    def of(cls, context: Context) -> StreamSizes:
        """As the options of a Context say."""
        usual, most = cls(), context.memory.load_bytes
        if most is None:
            return usual
        piece = min(usual.piece, max(most // 3, _LEAST_BYTES))
        return cls(piece, min(usual.item, most), min(usual.held, most))


def reading_context(context: Context) -> Context:
    """A Context like another one, whose threads are its own.

    The threads of the other one write: they wait for what is read, so reading must not wait for them.
    """
    return dataclasses.replace(context)


def items_by_object(
    layout: Layout, tree: TreeMetadata, opened: Checkpoint, sources: Sequence[int], sizes: StreamSizes
) -> list[list[WriteItem]]:
    """What a layout is to be given of a tree: by object that one process writes, in the order in which it takes it.

    Arrays are cut for a layout that takes pieces. Any other gets whole arrays, and all of them stand together.

    Args:
        layout: that will write.
        tree: what is to be written.
        opened: the checkpoint to read; its sizes were checked.
        sources: by leaf of the tree, the leaf of `opened` that has its elements.
        sizes: how large pieces may be.
    """
    objects = layout.arrays_by_object(tree)
    if objects is None:
        return [
            [
                WriteItem(leaf, record.spec, (Box.whole(record.spec.shape),))
                for leaf, record in enumerate(tree.leaves)
                if isinstance(record, ArrayRecord) and leaf not in tree.aliases
            ]
        ]
    made = opened.derived
    if made is not None:
        return [
            [
                WriteItem(leaf, record.spec, (box,))
                for leaf in leaves
                if isinstance(record := tree.leaves[leaf], ArrayRecord)
                for box in made.pieces(sources[leaf], sizes.piece)
            ]
            for leaves in objects
        ]
    stored = _stored_bytes(opened)
    index = opened.index
    return [
        [
            WriteItem(leaf, record.spec, (box,))
            for leaf in leaves
            if isinstance(record := tree.leaves[leaf], ArrayRecord)
            for box in _pieces(record, stored.get(sources[leaf], 0), index.chunk_rows(sources[leaf]), sizes)
        ]
        for leaves in objects
    ]


def _stored_bytes(opened: Checkpoint) -> Mapping[int, int]:
    """By leaf how many bytes of objects are of it, as far as they are plain ranges."""
    stored: dict[int, int] = {}
    for leaf, _, start, stop in extents_of(opened):
        stored[leaf] = stored.get(leaf, 0) + stop - start
    return stored


def _pieces(record: ArrayRecord, stored: int, rows: int | None, sizes: StreamSizes) -> list[Box]:
    """Cut an array where it was cut as it was stored, and elsewhere only where that does no harm.

    Args:
        record: the array.
        stored: bytes of objects that are plain ranges of it.
        rows: of a chunk; None where there is no regular grid.
        sizes: how large pieces may be.
    """
    nbytes = record.spec.nbytes
    if nbytes <= sizes.piece:
        return [Box.whole(record.spec.shape)]
    if stored == nbytes:
        whole = 0  # elements as they are: any range of them is read by itself
    elif stored > nbytes:
        whole = sizes.item
    else:
        whole = nbytes  # encoded: to read a part is to decode all of it
    most = max(sizes.piece, nbytes >> _MOST_BANDS_BITS)
    bands: Sequence[int] = record.cuts[0] if record.cuts else ()
    if rows is not None and record.spec.shape:
        step = rows * max(1, most // (rows * (nbytes // record.spec.shape[0])))
        bands = range(step, record.spec.shape[0], step)
    return cut_runs(record.spec, bands, most_bytes=most, band_bytes=whole)


class StreamedSnapshot:
    """A `ckptcore.protocols.Snapshot` of arrays that are read while others are written. `close` must follow. Any thread.

    A thread of its own reads the items in the order of the plan, and what the writer asks for before that; many small
    arrays by one request to the layout that has them. It begins when the first one is asked for.
    """

    def __init__(self, plan: WritePlan, opened: Checkpoint, sources: Sequence[int], sizes: StreamSizes) -> None:
        """Read nothing yet.

        Args:
            plan: what is written.
            opened: the checkpoint to read, by threads that nobody writes with.
            sources: by leaf of the plan's tree, the leaf of `opened` that has its elements.
            sizes: how much is read at once and held.
        """
        self.plan = plan
        self._opened = opened
        self._sources = sources
        self._sizes = sizes
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._arrays: dict[int, Sequence[HostArray]] = {}
        self._unread = set(range(len(plan.items)))
        self._released: set[int] = set()
        self._position = 0
        self._asked: deque[int] = deque()
        self._held = 0
        self._error: BaseException | None = None

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`.

        Raises:
            CheckpointError: what reading raised.
            PluginError: it was released before.
        """
        with self._changed:
            if self._thread is None and self._error is None:
                self._thread = threading.Thread(target=self._read_all, name="ckptcore-read-ahead", daemon=True)
                self._thread.start()
            if item in self._released:
                raise PluginError(
                    f"{format_path(self.plan.tree.paths[self.plan.items[item].leaf])} was asked for again after it "
                    "was given back; a layout releases an array once it needs it no more"
                )
            if item not in self._arrays:
                self._asked.append(item)
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
                self._held -= self.plan.items[item].nbytes
                self._changed.notify_all()

    def close(self) -> None:
        """Read no more, and let go of what was read; again is no error."""
        with self._changed:
            self._error = self._error or SaveLostError("an array was asked for after its checkpoint was closed")
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._arrays.clear()

    def _read_all(self) -> None:
        try:
            while batch := self._next_batch():
                self._read(batch)
        except BaseException as error:  # noqa: BLE001  # raised by whoever takes an array
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next_batch(self) -> Sequence[int]:
        """Items to read together, once there is room for them; none if all are read, or nobody takes them any more."""
        with self._changed:
            while self._error is None and self._unread:
                while self._asked and self._asked[0] not in self._unread:
                    self._asked.popleft()
                while self._position not in self._unread:
                    self._position += 1
                first = self._asked[0] if self._asked else self._position
                # What the writer waits for is read whatever is held: it would wait for ever otherwise.
                room = self._sizes.held - self._held
                if self._asked or self._held == 0 or self.plan.items[first].nbytes <= room:
                    return self._batch_from(first, min(self._sizes.piece, room))
                self._changed.wait()
            return ()

    def _batch_from(self, first: int, most_bytes: int) -> Sequence[int]:
        """Take an item and those behind it that fit as well; the caller holds the lock."""
        batch: list[int] = []
        nbytes = 0
        for number in range(first, len(self.plan.items)):
            size = self.plan.items[number].nbytes
            if number not in self._unread or (batch and nbytes + size > most_bytes):
                break
            batch.append(number)
            nbytes += size
        self._unread.difference_update(batch)
        self._held += nbytes
        return batch

    def _read(self, batch: Sequence[int]) -> None:
        """Read items, and hand each of them out once it is there."""
        items = [self.plan.items[number] for number in batch]
        buffers = [allocate(ArraySpec(box.shape, item.spec.dtype)) for item in items for box in item.boxes]
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
                    self._arrays[batch[position]] = arrays[position]
                    self._changed.notify_all()
        missing = next((item.leaf for item, count in zip(items, left, strict=True) if count), None)
        if missing is not None:
            raise PluginError(
                f"the layout {self._opened.layout.name} did not read {format_path(self.plan.tree.paths[missing])}; "
                "it is to yield the number of every box that it was given"
            )
