"""The scroll layout.

A scroll is a file with one box of one array. It starts with the line ``SCROLL <dtype> <start,...> <stop,...>``, padded
with spaces to a multiple of 64 bytes. The elements follow, little endian and in C order. ``index.scroll.json`` contains
the name, dtype, shape and scrolls of each array.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ckptcore.model import (
    JSON,
    LEAF,
    ArrayRecord,
    ArraySegment,
    ArraySpec,
    Box,
    BytesSegment,
    HostArray,
    Node,
    Receipt,
    TreeMetadata,
)
from ckptcore.planning import ChunkColumns, ChunkTable, leaf_names
from ckptcore.protocols import ChunkIndex, Inspection, Layout, ReadStore, Snapshot, WriteStore

INDEX = "index.scroll.json"
LINE_BYTES = 64


@dataclass(frozen=True)
class Scroll:
    """The file of a box of an array."""

    key: str
    offset: int
    box: Box


class ScrollLayout(Layout):
    """A layout with one file for each box of an array."""

    name = "scroll"

    def check(self, tree: TreeMetadata, size: int) -> None:
        names_of(tree)

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        plan = snapshot.plan
        written: list[JSON] = []
        for number, item in enumerate(plan.items):
            arrays = list(zip(item.boxes, snapshot.take(number), strict=True))
            for part, (box, array) in enumerate(arrays):
                key = f"{plan.save_id}-{item.leaf:05d}-{plan.rank}-{part}.scroll"
                start, stop = (",".join(map(str, corner)) for corner in (box.start, box.stop))
                line = f"SCROLL {item.spec.dtype} {start} {stop}\n".encode()
                line = line.ljust(-(-len(line) // LINE_BYTES) * LINE_BYTES)
                segment = ArraySegment(box, item.spec.numpy_dtype.itemsize, opened(box, array), lambda: None)
                store.write(key, [BytesSegment(line), segment])
                written.append([item.leaf, key, len(line), list(box.start), list(box.stop)])
            snapshot.release(number)
        return written

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        scrolls: dict[str, list[JSON]] = {}
        for receipt in receipts:
            written: Any = receipt.state  # the result of `write`
            for leaf, *rest in written:
                scrolls.setdefault(str(leaf), []).append(rest)
        names = names_of(tree)
        index: list[JSON] = []
        for leaf, name in names.items():
            record = tree.leaves[leaf]
            assert isinstance(record, ArrayRecord)
            own = scrolls.get(str(tree.aliases.get(leaf, leaf)), [])
            index.append({"name": name, "dtype": record.spec.dtype, "shape": record.spec.shape, "scrolls": own})
        store.put(INDEX, json.dumps(index).encode())
        return scrolls

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        columns = ChunkColumns()
        for leaf, scrolls in scrolls_of(tree, state).items():
            for scroll in scrolls:
                columns.add(leaf, scroll.key, scroll.offset, scroll.box)
        return ChunkTable(tree, columns.to_json())

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        if entry not in (None, INDEX):
            return None
        try:
            data = store.get(INDEX)
        except ObjectNotFoundError:
            return None
        try:
            index = json.loads(data)
            keys = tuple([str(array["name"]) for array in index])
            specs = [ArraySpec(tuple(map(extent, array["shape"])), str(array["dtype"])) for array in index]
            for spec in specs:
                _ = spec.numpy_dtype
            state = {str(leaf): array["scrolls"] for leaf, array in enumerate(index)}
            if len(set(keys)) != len(keys):
                raise ValueError("one name stands for two arrays")
        except (ValueError, TypeError, KeyError, RecursionError, UnsupportedLeafError) as error:
            raise CorruptCheckpointError(f"{INDEX} cannot be read: {error!r}", key=INDEX) from error
        tree = TreeMetadata(Node("dict", keys, (LEAF,) * len(keys)), tuple(map(ArrayRecord, specs)))
        return Inspection(tree, state, "toyscroll")


def names_of(tree: TreeMetadata) -> Mapping[int, str]:
    """Return the name of each array by its leaf number."""
    paths = {leaf: tree.paths[leaf] for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    return leaf_names(paths)


def opened(box: Box, array: HostArray) -> Any:
    """Return the elements of a segment."""
    return lambda: [(box, array)]


def extent(value: Any) -> int:
    """Return a count from a state that may be hostile. Raise an error if it is invalid."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def scrolls_of(tree: TreeMetadata, state: JSON) -> dict[int, list[Scroll]]:
    """Return the scrolls of each leaf. The state may be hostile."""
    try:
        places: dict[int, list[Scroll]] = {}
        table: Any = state  # wrong types raise errors that are caught below
        for leaf, rows in dict(table).items():
            scrolls: list[Scroll] = []
            record = tree.leaves[extent(int(leaf))]
            if not isinstance(record, ArrayRecord):
                raise TypeError(f"leaf {leaf} is no array")
            for key, offset, start, stop in rows:
                box = Box(tuple(map(extent, start)), tuple(map(extent, stop)))
                whole = Box.whole(record.spec.shape)
                ordered = all(map(int.__le__, box.start, box.stop))
                if len(box.start) != len(whole.start) or len(box.stop) != len(whole.stop) or not ordered:
                    raise ValueError(f"{box} is no box of {record.spec}")
                if not whole.contains(box) or not isinstance(key, str):
                    raise ValueError(f"{box} of {key!r:.40} is not inside of {record.spec}")
                if any(box.intersect(other.box) for other in scrolls if box.size and other.box.size):
                    raise ValueError(f"{box} comes twice")
                scrolls.append(Scroll(key, extent(offset), box))
            places[int(leaf)] = scrolls
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(f"the scroll layout cannot read where arrays are: {error}") from error
    return places
