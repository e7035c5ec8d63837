"""The shelf: a foreign format for several checkpointables, and a layout that writes and reads it.

A tree is a directory with ``index.shelf`` (JSON: dtype, shape and boxes of each array by name) and an object for each
box. A checkpoint is a directory with ``SHELF`` (JSON: the writer, the user's metadata, and the content). A single tree
is in ``tree/``. Each of several checkpointables is in a directory with its name. A checkpointable without an index
consists of files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckptcore.errors import (
    CompositeCheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    UncommittedCheckpointError,
    UnsupportedLeafError,
)
from ckptcore.hookspecs import hookimpl
from ckptcore.model import (
    JSON,
    LEAF,
    ArrayRecord,
    ArraySegment,
    ArraySpec,
    Box,
    HostArray,
    Node,
    Receipt,
    TreeMetadata,
)
from ckptcore.planning import ChunkColumns, ChunkTable, leaf_names
from ckptcore.protocols import (
    CheckpointInfo,
    ChunkIndex,
    InspectedComposite,
    Inspection,
    Layout,
    LayoutFactory,
    MemberKind,
    ReadStore,
    Snapshot,
    WriteStore,
)

MARK = "SHELF"
INDEX = "index.shelf"
TREE = "tree/"


class ShelfLayout(Layout):
    """A layout that writes and reads shelves."""

    name = "shelf"

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse names that collide."""
        _names(tree)

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write an object for each box, at ``tree/`` if the tree is the whole checkpoint."""
        plan = snapshot.plan
        prefix = "" if plan.name else TREE
        rows: list[JSON] = []
        for number, item in enumerate(plan.items):
            for part, (box, array) in enumerate(zip(item.boxes, snapshot.take(number), strict=True)):
                key = f"{item.leaf}.{plan.rank}.{part}.box"
                open_box = _opener(box, array)
                segment = ArraySegment(box, item.spec.numpy_dtype.itemsize, open_box, lambda: None)
                store.write(prefix + key, [segment])
                rows.append([item.leaf, key, list(box.start), list(box.stop)])
            snapshot.release(number)
        return {"prefix": prefix, "rows": rows}

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Write the index."""
        states: list[Any] = [receipt.state for receipt in receipts]
        prefix, rows = states[0]["prefix"], [row for state in states for row in state["rows"]]
        index = []
        for leaf, name in _names(tree).items():
            record = tree.leaves[leaf]
            assert isinstance(record, ArrayRecord)  # only arrays have names
            own = [rest for number, *rest in rows if number == tree.aliases.get(leaf, leaf)]
            index.append({"name": name, "dtype": record.spec.dtype, "shape": list(record.spec.shape), "boxes": own})
        store.put(prefix + INDEX, json.dumps(index).encode())
        return {"prefix": prefix, "rows": rows}

    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        """Write the description of the checkpoint."""
        custom, metrics = dict(info.custom), {name: str(value) for name, value in info.metrics.items()}
        document = {"created": info.created, "custom": custom, "metrics": metrics, "members": list(info.members)}
        store.put(MARK, json.dumps(document).encode())

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the boxes of all arrays. Each box is an object."""
        columns = ChunkColumns()
        for leaf, places in _decode(tree, state).items():
            for key, box in places:
                columns.add(leaf, key, 0, box)
        return ChunkTable(tree, columns.to_json())

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Return a tree, or the only tree of a checkpoint."""
        if entry is not None:
            return None
        if (index := _document(store, INDEX)) is not None:
            return _inspection(index, "", None)
        if (mark := _document(store, MARK)) is None:
            return None
        if (index := _document(store, TREE + INDEX)) is not None:
            return _inspection(index, TREE, _said(mark))
        names = list(_members(store))
        raise CompositeCheckpointError(
            f"this shelf has no tree, and holds {', '.join(names)}: load those by name", names
        )

    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        """Return the content of a finished shelf. The only tree of a checkpoint has the name ``tree``."""
        mark = _document(store, MARK)
        if mark is None:
            return None
        if mark == {"unfinished": True}:
            raise UncommittedCheckpointError("this shelf was never finished")
        custom, metrics, created = _said(mark)
        members = _members(store)
        if isinstance(mark, dict):
            members.update(dict.fromkeys(mark.get("also") or (), "tree"))
        return InspectedComposite(members, "shelfware 3", custom, metrics, created)


class ShelfPlugin:
    """A plugin with the layout ``shelf``."""

    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        """Return the layout by name."""
        return {"shelf": ShelfLayout}


def put_on_shelf(
    directory: Path,
    trees: Mapping[str, Mapping[str, HostArray]],
    files: Mapping[str, Mapping[str, bytes]] | None = None,
    **said: Any,
) -> None:
    """Act as the other software: write trees and files by name."""
    for name, tree in trees.items():
        below = directory / name
        below.mkdir(parents=True)
        index = []
        for number, (key, array) in enumerate(tree.items()):
            (below / f"{number}.bin").write_bytes(array.tobytes())
            boxes = [[f"{number}.bin", [0] * array.ndim, list(array.shape)]]
            index.append({"name": key, "dtype": str(array.dtype), "shape": list(array.shape), "boxes": boxes})
        (below / INDEX).write_text(json.dumps(index))
    for name, contents in (files or {}).items():
        for key, content in contents.items():
            path = directory / name / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (directory / MARK).write_text(json.dumps(said))


def _names(tree: TreeMetadata) -> Mapping[int, str]:
    return leaf_names(
        {leaf: tree.paths[leaf] for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    )


def _opener(box: Box, array: HostArray) -> Callable[[], Sequence[tuple[Box, HostArray]]]:
    return lambda: [(box, array)]


def _document(store: ReadStore, key: str) -> Any:
    """Return a JSON document, or None if it does not exist."""
    try:
        return json.loads(store.get(key))
    except ObjectNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{key} cannot be read: {error}", key=key) from error


def _said(mark: Any) -> tuple[dict[str, JSON], dict[str, float], str | None]:
    try:
        metrics = {str(name): float(value) for name, value in dict(mark.get("metrics") or {}).items()}
        created = mark.get("created")
        return dict(mark.get("custom") or {}), metrics, None if created is None else str(created)
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"{MARK} cannot be read: {error!r}", key=MARK) from error


def _members(store: ReadStore) -> dict[str, MemberKind]:
    """Return the names on the shelf, without names with an underscore at the start, which the software reserves."""
    members: dict[str, MemberKind] = {}
    for entry in store.list_names():
        if entry.endswith("/") and not entry.startswith(("_", ".")):
            names = store.list_names(entry)
            members[entry[:-1]] = "files" if INDEX not in names and "strange" not in names else "tree"
    return members


def _inspection(
    index: Any, prefix: str, said: tuple[dict[str, JSON], dict[str, float], str | None] | None
) -> Inspection:
    try:
        names = [str(array["name"]) for array in index]
        if len(set(names)) != len(names):
            raise ValueError("one name stands for two arrays")
        specs = [ArraySpec(tuple(map(_count, array["shape"])), str(array["dtype"])) for array in index]
        for spec in specs:
            _ = spec.numpy_dtype
        rows: list[JSON] = [[leaf, *box] for leaf, array in enumerate(index) for box in array["boxes"]]
    except (ValueError, TypeError, KeyError, UnsupportedLeafError) as error:
        raise CorruptCheckpointError(f"{prefix}{INDEX} cannot be read: {error!r}", key=prefix + INDEX) from error
    tree = TreeMetadata(Node("dict", tuple(names), (LEAF,) * len(names)), tuple(map(ArrayRecord, specs)))
    custom, metrics, created = said or ({}, {}, None)
    return Inspection(tree, {"prefix": prefix, "rows": rows}, "shelfware 3", custom, metrics, created)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _decode(tree: TreeMetadata, state: JSON) -> dict[int, list[tuple[str, Box]]]:
    """Return the objects and boxes of each leaf. The state may be hostile."""
    places: dict[int, list[tuple[str, Box]]] = {}
    try:
        table: Any = state
        if not isinstance(table["prefix"], str):
            raise TypeError("a prefix is text")
        for leaf, key, start, stop in table["rows"]:
            record = tree.leaves[_count(leaf)]
            if not isinstance(record, ArrayRecord) or not isinstance(key, str):
                raise TypeError(f"leaf {leaf} is no array in an object")
            box = Box(tuple(map(_count, start)), tuple(map(_count, stop)))
            if len(box.start) != len(record.spec.shape) or len(box.stop) != len(record.spec.shape):
                raise ValueError(f"{box} is no box of {record.spec}")
            if any(np.greater(box.start, box.stop)) or not Box.whole(record.spec.shape).contains(box):
                raise ValueError(f"{box} is no box of {record.spec}")
            others = places.setdefault(leaf, [])
            if any(box.intersect(other) for _, other in others if box.size and other.size):
                raise ValueError(f"{box} comes twice")
            others.append((table["prefix"] + key, box))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(f"the shelf does not say where arrays are: {error!r}") from error
    return places
