"""Slices of arrays in safetensors files.

The files are those of torch.distributed.checkpoint's ``HuggingFaceStorageWriter(save_distributed=True)``, so that it loads them
(torch 2.13.0, hf_storage.py): ``shard-<process, from 1>-<stem>-<number>-of-<files of the process>.safetensors``, each a plain
safetensors file in which a tensor is a box of the array with that name, and ``DCP_SHARDING_INFO`` in its metadata is the JSON
``{name: {"saved_offsets": [...]}}``: where the box begins.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.builtin.safetensors_header import METADATA, encode_header, file_metadata, header_entry
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import ArraySegment, BytesSegment, Segment, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.planning import ChunkColumns
from ckptcore.protocols import Snapshot, WriteStore

__all__ = [
    "SHARDING",
    "write_slices",
]


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
) -> ChunkColumns:
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
    columns = ChunkColumns()

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
                columns.add(plan.items[part.item].leaf, key, len(head) + start, part.box)
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
