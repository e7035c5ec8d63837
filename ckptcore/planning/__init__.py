"""Planning of reads and writes: the boxes of each process, their coverage, and names of leaves. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ckptcore.errors import NameCollisionError
from ckptcore.model.arrays import Box, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ReadItem, ReadPlan, WriteItem, WritePlan
from ckptcore.model.tree import Attribute, Key, TreePath, format_path
from ckptcore.planning.chunk_table import ChunkColumns, ChunkTable, natural_column
from ckptcore.planning.partition import boxes_of_range, check_coverage, uncovered
from ckptcore.planning.replicas import Owners, written_boxes

__all__ = [
    "ChunkColumns",
    "ChunkTable",
    "boxes_of_range",
    "check_coverage",
    "cuts_of",
    "leaf_names",
    "natural_column",
    "plan_read",
    "plan_write",
    "uncovered",
]


def plan_write(
    tree: TreeMetadata,
    shards: Mapping[int, Sequence[Shard]],
    *,
    rank: int,
    size: int,
    save_id: str,
    name: str = "",
    owners: Mapping[int, Owners] | None = None,
) -> WritePlan:
    """Plan the writes of one process: its boxes with replica number 0, or, with `owners`, the cells that it owns.

    Args:
        tree: the tree of the whole job.
        shards: by leaf number, the boxes of this process; aliases may be omitted.
        rank: rank of this process.
        size: number of processes in the job.
        save_id: id of the save.
        name: name of the checkpointable; empty if the checkpoint is one tree.
        owners: by leaf, the owners of its cells, from `ckptcore.planning.replicas.owners_of`; None: replica 0 writes.
    """
    items = []
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases:
            continue
        boxes = written_boxes(record, shards.get(leaf, ()), None if owners is None else owners.get(leaf))
        if boxes:
            items.append(WriteItem(leaf, record.spec, boxes))
    return WritePlan(tree, tuple(items), rank, size, save_id, name)


def plan_read(tree: TreeMetadata, wanted: Iterable[tuple[int, Sequence[Box]]]) -> ReadPlan:
    """Plan the reads of one process.

    Args:
        tree: the stored tree.
        wanted: leaf numbers, each with the boxes to read. The items of the plan have the same order.
    """
    items = [ReadItem(tree.aliases.get(leaf, leaf), box) for leaf, boxes in wanted for box in boxes]
    return ReadPlan(tree, tuple(items))


def cuts_of(shape: tuple[int, ...], boxes: Iterable[Box]) -> tuple[tuple[int, ...], ...] | None:
    """Return the sorted inner boundaries of boxes along each axis, in elements; None if there are none."""
    axes: list[set[int]] = [set() for _ in shape]
    for box in boxes:
        for axis, extent in enumerate(shape):
            axes[axis].update(bound for bound in (box.start[axis], box.stop[axis]) if 0 < bound < extent)
    return tuple(tuple(sorted(axis)) for axis in axes) if any(axes) else None


def leaf_names(
    paths: Mapping[int, TreePath], *, separator: str = ".", reserved: Collection[str] = (), root: str = "array"
) -> dict[int, str]:
    """Return a name for each leaf of a flat layout: its keys joined by a separator, as other software expects.

    Leaves with equal or reserved names get escaped names: a backslash precedes each separator and each backslash within
    a key, a str key that is empty or looks like an int is quoted, an attribute begins with ``\\@``, and a bool or a
    tuple with a backslash. If the escaped name is reserved too, a backslash is put before it.

    Args:
        paths: by leaf, its path.
        separator: text between keys.
        reserved: names that the layout uses itself.
        root: name of the leaf if the tree is a single leaf.

    Raises:
        NameCollisionError: two leaves have the same escaped name.
    """
    names = {leaf: _printable(separator.join(map(str, path))) if path else root for leaf, path in paths.items()}
    counts = Counter(names.values())
    if len(counts) == len(names) and not any(name in counts for name in reserved):
        return names
    for leaf, name in list(names.items()):
        if counts[name] > 1 or name in reserved:
            names[leaf] = _printable(separator.join([_escape(key, separator) for key in paths[leaf]])) or "\\" + root
            if names[leaf] in reserved:
                names[leaf] = "\\" + names[leaf]
    seen: dict[str, int] = {}
    for leaf, name in names.items():
        if name in seen:
            raise NameCollisionError(
                f"{format_path(paths[seen[name]])} and {format_path(paths[leaf])} would both be stored as {name!r}; "
                "rename one of the keys. Nothing was written"
            )
        seen[name] = leaf
    return names


def _printable(name: str) -> str:
    """Return a name with surrogates escaped, as ``\\ud800``: no file format can store them."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode("utf-8")


def _escape(key: Key, separator: str) -> str:
    if isinstance(key, bool | tuple):
        return "\\" + str(key).replace("\\", "\\\\").replace(separator, "\\" + separator)
    if isinstance(key, int):
        return str(key)
    if isinstance(key, Attribute):
        return "\\@" + key.name.replace("\\", "\\\\").replace(separator, "\\" + separator)
    escaped = key.replace("\\", "\\\\").replace(separator, "\\" + separator).replace("'", "\\'")
    return f"'{escaped}'" if escaped.lstrip("-").isdigit() or not escaped else escaped
