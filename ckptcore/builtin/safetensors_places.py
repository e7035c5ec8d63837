"""Positions of arrays in safetensors files, and slices of them.

The files are those of torch.distributed.checkpoint's ``HuggingFaceStorageWriter(save_distributed=True)``, so that it loads them
(torch 2.13.0, hf_storage.py): ``shard-<process, from 1>-<stem>-<number>-of-<files of the process>.safetensors``, each a plain
safetensors file in which a tensor is a box of the array with that name, and ``DCP_SHARDING_INFO`` in its metadata is the JSON
``{name: {"saved_offsets": [...]}}``: where the box begins.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore.builtin.safetensors_header import METADATA, encode_header, file_metadata, header_entry
from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ArraySegment, BytesSegment, Segment, WritePlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning import uncovered
from ckptcore.protocols import Snapshot, WriteStore

__all__ = [
    "SHARDING",
    "KnownPlaces",
    "Places",
    "SliceColumns",
    "StoredSlice",
    "write_slices",
]


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A box of an array, and where it is.

    Attributes:
        key: the file.
        offset: where its first element is in the file, in bytes; they follow each other in C order.
        box: where in the array.
    """

    key: str
    offset: int
    box: Box


class SliceColumns:
    """Slices as they are collected, a column for each thing."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._leaf: list[int] = []
        self._file: list[int] = []
        self._offset: list[int] = []
        self._box: list[int] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._leaf)

    def add(self, leaf: int, stored: StoredSlice) -> None:
        """One more slice of a leaf."""
        self._leaf.append(leaf)
        self._file.append(self._files.setdefault(stored.key, len(self._files)))
        self._offset.append(stored.offset)
        self._box.extend((*stored.box.start, *stored.box.stop))

    def extend(self, encoded: JSON, tree: TreeMetadata, without: Container[int]) -> None:
        """The slices of another one, as `to_json` gave them in a process of this job, but those of some leaves."""
        columns: Any = encoded
        bounds = iter(columns["box"])
        for leaf, key, offset in _rows(tree, columns):
            box = _box(bounds, _shape(tree, leaf))
            if leaf not in without:
                self.add(leaf, StoredSlice(key, offset, box))

    def to_json(self) -> dict[str, JSON]:
        """For `Places`."""
        return {
            "files": list(self._files),
            "leaf": self._leaf,
            "file": self._file,
            "offset": self._offset,
            "box": self._box,
        }


@dataclass(frozen=True, slots=True)
class Places:
    """Where the arrays of a tree are.

    Attributes:
        whole: by leaf, the file and the offset of its first element, in bytes.
        slices: by leaf, what there is of an array that is in several places; they may not make it up.
    """

    whole: Mapping[int, tuple[str, int]]
    slices: Mapping[int, Sequence[StoredSlice]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, tree: TreeMetadata, state: JSON) -> Places:
        """The places in the state of a checkpoint, which may be hostile.

        Raises:
            CorruptCheckpointError: it does not fit the tree.
        """
        try:
            columns: Any = state  # what is caught below is what a hostile one raises
            leaves, keys, offsets = _columns(tree, columns)
            whole = dict(zip(leaves, zip(keys, offsets, strict=True), strict=True))
            slices: dict[int, list[StoredSlice]] = {}
            cut: Any = columns.get("slices")
            if cut is not None:
                bounds = iter(cut["box"])
                for leaf, key, offset in _rows(tree, cut):
                    if leaf in whole:
                        raise ValueError(f"leaf {leaf} is in two places")
                    slices.setdefault(leaf, []).append(StoredSlice(key, offset, _box(bounds, _shape(tree, leaf))))
                if next(bounds, None) is not None:
                    raise ValueError("columns of different lengths")
            return cls(whole, slices)
        except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(f"the safetensors layout cannot read where arrays are: {error}") from error

    def of(self, tree: TreeMetadata, leaf: int) -> Sequence[StoredSlice]:
        """What makes up an array.

        Raises:
            CorruptCheckpointError: nothing says where it is, or not where all of it is.
        """
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # a plan has no other items
        place = self.whole.get(leaf)
        if place is not None:
            return (StoredSlice(*place, Box.whole(record.spec.shape)),)
        slices = self.slices.get(leaf, ())
        if not slices and record.spec.size:
            raise CorruptCheckpointError(f"the checkpoint does not say where leaf {leaf} is stored")
        reason = uncovered(record.spec, [part.box for part in slices])
        if reason is not None:
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[leaf])} ({record.spec}) is not stored whole: {reason}"
            )
        return slices

    def check(self, tree: TreeMetadata, leaves: Collection[int]) -> None:
        """Refuse arrays whose slices do not cover them exactly. See `ckptcore.protocols.ChecksArrays`."""
        for leaf in leaves:
            if leaf not in self.whole:
                self.of(tree, leaf)

    def extents(self, tree: TreeMetadata) -> Iterator[tuple[int, str, int, int]]:
        """Where arrays lie: (leaf, key, start, stop), in bytes."""
        for leaf, record in enumerate(tree.leaves):
            if not isinstance(record, ArrayRecord):
                continue
            if (place := self.whole.get(leaf)) is not None:
                yield leaf, *place, place[1] + record.spec.nbytes
            for part in self.slices.get(leaf, ()):
                yield leaf, part.key, part.offset, part.offset + part.box.size * record.spec.numpy_dtype.itemsize


class KnownPlaces:
    """The places that were read from a state last: a load asks for the same ones several times. Any thread."""

    def __init__(self) -> None:
        self._last: tuple[TreeMetadata, JSON, Places] | None = None

    def __reduce__(self) -> tuple[type[KnownPlaces], tuple[()]]:
        """None: a layout that goes to another process takes along what it is, and not what it has read."""
        return KnownPlaces, ()

    def places(self, tree: TreeMetadata, state: JSON) -> Places:
        """See `Places.from_json`."""
        last = self._last
        if last is None or last[0] is not tree or last[1] is not state:
            last = self._last = (tree, state, Places.from_json(tree, state))
        return last[2]


def _rows(tree: TreeMetadata, columns: Any) -> Iterator[tuple[int, str, int]]:
    return zip(*_columns(tree, columns), strict=True)


def _columns(tree: TreeMetadata, columns: Any) -> tuple[Sequence[int], Sequence[str], Sequence[int]]:
    """By row the leaf, the file and the offset. Whole columns are looked at, for a checkpoint may have hundreds of thousands of rows.

    Raises:
        TypeError, IndexError: if they cannot be.
    """
    files, leaves, numbers, offsets = (columns[name] for name in ("files", "leaf", "file", "offset"))
    if {*map(type, leaves), *map(type, numbers), *map(type, offsets)} - {int}:
        raise TypeError("a number is expected")
    if leaves and not (0 <= min(leaves) and max(leaves) < len(tree.leaves)):
        raise IndexError(f"leaves {min(leaves)} to {max(leaves)} of {len(tree.leaves)}")
    if min(numbers, default=0) < 0 or min(offsets, default=0) < 0:
        raise IndexError("a file or an offset below 0")
    keys = {number: files[number] for number in set(numbers)}
    if {*map(type, keys.values())} - {str}:
        raise TypeError("a file name is expected")
    return leaves, [*map(keys.__getitem__, numbers)], offsets


def _shape(tree: TreeMetadata, leaf: int) -> tuple[int, ...]:
    record = tree.leaves[leaf]
    if not isinstance(record, ArrayRecord):
        raise TypeError(f"leaf {leaf} is no array")
    return record.spec.shape


def _box(bounds: Iterator[Any], shape: tuple[int, ...]) -> Box:
    found = list(itertools.islice(bounds, 2 * len(shape)))
    if len(found) != 2 * len(shape):
        raise ValueError("columns of different lengths")
    start, stop = tuple(found[: len(shape)]), tuple(found[len(shape) :])
    for extent, first, last in zip(shape, start, stop, strict=True):
        if type(first) is not int or type(last) is not int or not 0 <= first <= last <= extent:
            raise ValueError(f"a slice from {first!r} to {last!r} of {extent}")
    return Box(start, stop)


SHARDING: Final = "DCP_SHARDING_INFO"
"""The entry in the metadata of a file that says where its boxes begin."""

_TOGETHER_BYTES: Final = 256 << 20
"""Arrays of which a process holds several boxes apart stay in memory until the last of them is written: so many bytes of them."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A box of an array that is one tensor of a file.

    Attributes:
        item: the number of the item that it is of.
        boxes: which of the boxes of the item it is made of.
        box: all of them together.
    """

    item: int
    boxes: tuple[int, ...]
    box: Box


def write_slices(
    snapshot: Snapshot,
    items: Sequence[int],
    names: Mapping[int, str],
    store: WriteStore,
    *,
    stem: str,
    max_file_bytes: int,
    metadata: Mapping[str, str],
) -> SliceColumns:
    """Write items of a plan into files of this process.

    Args:
        snapshot: has the elements.
        items: the numbers of the items.
        names: by leaf, how the array is called.
        store: where to write.
        stem: what the names of files have in them.
        max_file_bytes: the most elements that a file holds, in bytes, unless one box is larger.
        metadata: the user's entries for every file.
    """
    plan = snapshot.plan
    files = _files(plan, items, max_file_bytes)
    users = _Users(snapshot, files)
    columns = SliceColumns()

    def objects() -> Iterator[tuple[str, Sequence[Segment]]]:
        for number, slices in enumerate(files, start=1):
            key = f"shard-{plan.rank + 1:05d}-{stem}-{number:05d}-of-{len(files):05d}.safetensors"
            header: dict[str, JSON] = {}
            begins: dict[str, JSON] = {}
            segments: list[Segment] = []
            positions: list[int] = []
            position = 0
            for part in slices:
                item = plan.items[part.item]
                spec = ArraySpec(part.box.shape, item.spec.dtype)
                # Packed elements stay bytes: torch's reader of slices (hf_storage.py, torch 2.13.0) supports neither
                # their dtypes nor shapes in other units than the offsets.
                dtype, shape = header_entry(ArrayRecord(spec))
                name = names[item.leaf]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + spec.nbytes]}
                begins[name] = {"saved_offsets": [*part.box.start, *[0] * (len(shape) - len(part.box.start))]}
                positions.append(position)
                segments.append(users.segment(part))
                position += spec.nbytes
            about = file_metadata(plan.tree, names, [plan.items[part.item].leaf for part in slices], metadata)
            about[SHARDING] = json.dumps(begins, separators=(",", ":"))
            head = encode_header({METADATA: about, **header}, position)
            for part, start in zip(slices, positions, strict=True):
                columns.add(plan.items[part.item].leaf, StoredSlice(key, len(head) + start, part.box))
            yield key, [BytesSegment(head), *segments]

    store.write_many(objects())
    return columns


def _files(plan: WritePlan, items: Sequence[int], max_file_bytes: int) -> list[list[_Slice]]:
    """Slices per file: of each array at most one, wide elements first, so that every element lies aligned to its size."""
    order = sorted(items, key=lambda number: -plan.items[number].spec.numpy_dtype.itemsize)
    cut = [_slices(plan, number) for number in order]
    files = _filled(plan, [slices[0] for slices in cut if len(slices) == 1], max_file_bytes)
    several = [slices for slices in cut if len(slices) > 1]
    while several:
        together: list[list[_Slice]] = []
        nbytes = 0
        while several and (not together or nbytes < min(_TOGETHER_BYTES, max_file_bytes)):
            together.append(several.pop(0))
            nbytes += sum(_nbytes(plan, part) for part in together[-1])
        for number in range(max(map(len, together))):
            layer = [slices[number] for slices in together if number < len(slices)]
            files.extend(_filled(plan, layer, max_file_bytes))
    return files


def _filled(plan: WritePlan, slices: Sequence[_Slice], max_file_bytes: int) -> list[list[_Slice]]:
    files: list[list[_Slice]] = []
    room = 0
    leaves: set[int] = set()
    for part in slices:
        nbytes, leaf = _nbytes(plan, part), plan.items[part.item].leaf
        if not files or nbytes > room or leaf in leaves:
            files.append([])
            room = max_file_bytes
            leaves = set()
        files[-1].append(part)
        leaves.add(leaf)
        room -= nbytes
    return files


def _nbytes(plan: WritePlan, part: _Slice) -> int:
    return part.box.size * plan.items[part.item].spec.numpy_dtype.itemsize


def _slices(plan: WritePlan, number: int) -> list[_Slice]:
    """The boxes of an item; one where they make up a box together, as those of neighbouring devices do; none without elements."""
    item = plan.items[number]
    held = [position for position, box in enumerate(item.boxes) if box.size]
    if not held:
        return [] if item.spec.size else [_Slice(number, (0,), item.boxes[0])]
    boxes = [item.boxes[position] for position in held]
    start = tuple(map(min, zip(*[box.start for box in boxes], strict=True)))
    stop = tuple(map(max, zip(*[box.stop for box in boxes], strict=True)))
    around = Box(start, stop)
    if around.size == sum(box.size for box in boxes):  # those of an item do not overlap
        return [_Slice(number, tuple(held), around)]
    return [_Slice(number, (position,), item.boxes[position]) for position in held]


class _Users:
    """Gives the elements of slices, and releases an item with the last of its slices. Any thread."""

    def __init__(self, snapshot: Snapshot, files: Sequence[Sequence[_Slice]]) -> None:
        self._snapshot = snapshot
        self._left: dict[int, int] = {}
        self._lock = threading.Lock()
        for slices in files:
            for part in slices:
                self._left[part.item] = self._left.get(part.item, 0) + 1

    def segment(self, part: _Slice) -> ArraySegment:
        item = self._snapshot.plan.items[part.item]

        def open_arrays() -> Sequence[tuple[Box, HostArray]]:
            arrays = self._snapshot.take(part.item)
            return tuple([(item.boxes[position], arrays[position]) for position in part.boxes])

        def close_arrays() -> None:
            with self._lock:
                self._left[part.item] -= 1
                last = self._left[part.item] == 0
            if last:
                self._snapshot.release(part.item)

        return ArraySegment(part.box, item.spec.numpy_dtype.itemsize, open_arrays, close_arrays)
