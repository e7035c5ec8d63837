"""Writer of the data files: the items of a process, values first."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import (
    JSON,
    ArrayRecord,
    ArraySegment,
    ArraySpec,
    Box,
    BytesSegment,
    ChecksumSegment,
    HostArray,
    LeafRecord,
    Segment,
    TreeMetadata,
)
from ckptcore.protocols import Snapshot, WriteStore
from ckptcore_dcp.items import tensor_item, value_item
from ckptcore_dcp.metadata import DcpChunkColumns, DcpValue
from ckptcore_dcp.names import ValueEntry
from ckptcore_dcp.stored_tensors import physical_box, physical_spec

_ALIGNMENT: Final = 64
"""Alignment of items in the file, in bytes. Preserves the alignment of elements within an item."""

_JOINED_BYTES: Final = 1 << 20
"""Values are passed to the store in segments of about this size."""


@dataclass(slots=True)
class WrittenItems:
    """Byte ranges of the items of one process, as columns.

    Attributes:
        value_offset, value_nbytes: items of values, in the order of the values. Only one process has
            them.
        leaf, offset, nbytes: items of arrays: leaf number, offset and length of the item.
        elements: offset of the elements in the file.
        box: bounds of each box, starts then stops, concatenated.
    """

    value_offset: list[int] = field(default_factory=list)
    value_nbytes: list[int] = field(default_factory=list)
    leaf: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    box: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, JSON]:
        """Return the columns."""
        return {
            "value_offset": self.value_offset,
            "value_nbytes": self.value_nbytes,
            "leaf": self.leaf,
            "offset": self.offset,
            "nbytes": self.nbytes,
            "elements": self.elements,
            "box": self.box,
        }


def data_file_name(rank: int, *, spread: bool, tag: str = "") -> str:
    """Return the file name of a process, as torch names its first file, with a tag if it must be unique.

    With `spread`, the file is in one of 256 directories named by a hash. Object stores limit
    requests per key prefix and split the key range by load; a hash at the beginning distributes
    requests evenly. Readers of the format accept any relative path (torch 2.13.0, filesystem.py:
    ``concat_path``).
    """
    name = f"__{rank}_0.{tag}.distcp" if tag else f"__{rank}_0.distcp"
    return f"{hashlib.blake2b(name.encode(), digest_size=1).hexdigest()}/{name}" if spread else name


def write_items(
    snapshot: Snapshot, values: Sequence[ValueEntry], store: WriteStore, file: str, encoded: Collection[str] = ()
) -> WrittenItems:
    """Write the boxes of this process, and `values`, to its file. Writes no file if there are neither boxes nor values.

    A value named in `encoded` consists of the bytes of its item, which are written unchanged.
    """
    written = WrittenItems()
    segments = list(_segments(snapshot, values, encoded, written))
    if segments:
        store.write(file, segments)
    return written


def write_values(
    values: Sequence[ValueEntry], store: WriteStore, file: str, encoded: Collection[str] = ()
) -> WrittenItems:
    """Write values to a separate file. See `write_items`."""
    written = WrittenItems()
    store.write(file, list(_segments(None, values, encoded, written)))
    return written


def _segments(
    snapshot: Snapshot | None, values: Sequence[ValueEntry], encoded: Collection[str], written: WrittenItems
) -> Iterator[Segment]:
    """Yield the segments of the file.

    Two segments follow the elements of an item: the tail of the item with its checksum, and the padding with the head
    of the next item. Many small values form one segment.
    """
    position = 0
    between: list[bytes] = []
    begin = 0
    for value in values:
        plain = value.value
        data = plain if value.name in encoded and isinstance(plain, bytes) else _named_item(value)
        room = -len(data) % _ALIGNMENT
        written.value_offset.append(position)
        written.value_nbytes.append(len(data))
        between += (data, bytes(room))
        position += len(data) + room
        if position - begin >= _JOINED_BYTES:
            yield BytesSegment(b"".join(between))
            between, begin = [], position
    for number, planned in enumerate(snapshot.plan.items if snapshot is not None else ()):
        assert snapshot is not None  # the loop has items
        boxes = _ItemBoxes(snapshot, number)
        spec, record = planned.spec, snapshot.plan.tree.leaves[planned.leaf]
        assert isinstance(record, ArrayRecord)  # a plan contains arrays only
        physical = physical_spec(spec)
        for part, box in enumerate(planned.boxes):
            shape = box.shape if physical is spec else physical_box(spec, box).shape
            stored = physical if shape == physical.shape else ArraySpec(shape, physical.dtype)
            item = tensor_item(stored, position, record.kind)
            elements = position + len(item.head)
            stop = elements + stored.nbytes + item.tail.nbytes
            written.leaf.append(planned.leaf)
            written.offset.append(position)
            written.nbytes.append(stop - position)
            written.elements.append(elements)
            written.box += box.start
            written.box += box.stop
            yield BytesSegment(b"".join((*between, item.head)) if between else item.head)
            yield boxes.segment(part, spec.numpy_dtype.itemsize)
            yield ChecksumSegment(item.tail)
            room = -stop % _ALIGNMENT
            between = [bytes(room)] if room else []
            position = stop + room
    if between:
        yield BytesSegment(b"".join(between))


def _named_item(entry: ValueEntry) -> bytes:
    try:
        return value_item(entry.value)
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{entry.name}: {error}") from error


class _ItemBoxes:
    """The boxes of one array in a snapshot. Thread-safe.

    Writing the first box takes the array from the snapshot; writing the last box releases it.
    """

    def __init__(self, snapshot: Snapshot, number: int) -> None:
        self._snapshot = snapshot
        self._number = number
        self._boxes = snapshot.plan.items[number].boxes
        self._left = len(self._boxes)
        self._arrays: Sequence[HostArray] | None = None
        self._lock = threading.Lock()

    def segment(self, part: int, itemsize: int) -> ArraySegment:
        """Return the elements of one box as a segment."""
        return ArraySegment(self._boxes[part], itemsize, lambda: self._open(part), self._close)

    def _open(self, part: int) -> Sequence[tuple[Box, HostArray]]:
        with self._lock:
            if self._arrays is None:
                self._arrays = self._snapshot.take(self._number)
            return ((self._boxes[part], self._arrays[part]),)

    def _close(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
            self._arrays = None
        self._snapshot.release(self._number)


class MergedItems:
    """The items of all processes, ordered by process. Array items are processed as columns, not one by one.

    Attributes:
        values: byte ranges of the items of values, in the order of the values.
    """

    def __init__(self, tree: TreeMetadata, parts: Sequence[tuple[str, JSON]]) -> None:
        """Merge the items. `parts` has a file name and the JSON of `WrittenItems` for each process."""
        states: list[tuple[str, Any]] = list(parts)
        self._tree = tree
        self._files = [file for file, _ in states]
        self.values: Sequence[DcpValue] = [
            DcpValue(file, offset, nbytes)
            for file, state in states
            for offset, nbytes in zip(state["value_offset"], state["value_nbytes"], strict=True)
        ]
        counts = [len(state["leaf"]) for _, state in states]
        self._leaf = _joined(states, "leaf")
        self._file: HostArray = np.repeat(np.arange(len(states)), counts)
        self._offset = _joined(states, "offset")
        self._nbytes = _joined(states, "nbytes")
        self._elements = _joined(states, "elements")
        self._box = _joined(states, "box")

    def to_json(self) -> JSON:
        """Return the table of elements that `ckptcore_dcp.chunk_index.dcp_index` reads."""
        used, file = np.unique(self._file, return_inverse=True)
        return {
            "content": "elements",
            "files": [self._files[number] for number in used.tolist()],
            "leaf": self._leaf.tolist(),
            "file": file.tolist(),
            "offset": self._elements.tolist(),
            "box": self._box.tolist(),
        }

    def chunks(self) -> tuple[DcpChunkColumns, HostArray]:
        """Return the chunks as torch sees them, with its physical dtype and axes, and the first chunk of each leaf.

        The last element of the second array is the number of chunks.
        """
        leaves = self._tree.leaves
        kinds = {id(record): _axes_and_extra(record) for record in {id(record): record for record in leaves}.values()}
        logical, extra = np.array([kinds[id(record)] for record in leaves], np.int64).reshape(-1, 2).T
        order: HostArray = np.argsort(self._leaf, kind="stable")
        leaf_of = self._leaf[order]
        widths = 2 * logical[self._leaf]
        begins = (np.cumsum(widths) - widths)[order]
        axes = logical[leaf_of]
        bytes_of = extra[leaf_of]
        max_axes = int((axes + (bytes_of > 0)).max(initial=0))
        offsets: HostArray = np.zeros((len(order), max_axes), np.int64)
        sizes: HostArray = np.zeros((len(order), max_axes), np.int64)
        for axis in range(max_axes):
            (rows,) = np.nonzero(axes > axis)
            start = self._box[begins[rows] + axis]
            offsets[rows, axis] = start
            sizes[rows, axis] = self._box[begins[rows] + axes[rows] + axis] - start
        (rows,) = np.nonzero(bytes_of)
        sizes[rows, axes[rows]] = bytes_of[rows]
        columns = DcpChunkColumns(
            axes + (bytes_of > 0),
            offsets,
            sizes,
            self._file[order],
            self._offset[order],
            self._nbytes[order],
            self._files,
        )
        return columns, np.searchsorted(leaf_of, np.arange(len(leaves) + 1))


def _axes_and_extra(record: LeafRecord) -> tuple[int, int]:
    """Return the axes of an array, and the bytes of an element if torch lacks the dtype, else 0."""
    if not isinstance(record, ArrayRecord):
        return 0, 0  # only arrays have boxes
    axes, physical = len(record.spec.shape), physical_spec(record.spec)
    return axes, physical.shape[-1] if len(physical.shape) > axes else 0


def _joined(states: Sequence[tuple[str, Any]], name: str) -> HostArray:
    return np.concatenate([np.zeros(0, np.int64), *[np.array(state[name], np.int64) for _, state in states]])
