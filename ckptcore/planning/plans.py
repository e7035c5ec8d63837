"""Plans: the boxes that each process writes and reads. Replicas divide the writes of a box."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ckptcore.model.arrays import Box, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ReadItem, ReadPlan, WriteItem, WritePlan

_Cuts: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options that divide the writes of replicated data among processes, for layouts in which any replica can write.

    Every process of a job must use equal options.

    Attributes:
        piece_bytes: minimum size of the pieces into which a box is cut for its replicas, in bytes.
        most: maximum number of replicas that write parts of one box; 1: no box is cut. More concurrent requests are not
            always faster.
        objects: treatment of objects with a state, such as a data loader or a wrapper of a model with ``state_dict``,
            in a tree that several processes save together. ``"refuse"``: raise an error, because the states may differ
            between processes. ``"lowest_rank"``: as torch.distributed.checkpoint does. The keys of all processes are
            saved, and each process writes its shards of distributed arrays. Any other array or value is saved by the
            lowest rank that has it.
    """

    piece_bytes: int = 1 << 24
    most: int = 32
    objects: Literal["refuse", "lowest_rank"] = "refuse"

    def __post_init__(self) -> None:
        if self.objects not in ("refuse", "lowest_rank"):
            raise ValueError(f"ReplicaOptions(objects={self.objects!r}): expected 'refuse' or 'lowest_rank'")
        for name in ("piece_bytes", "most"):
            if getattr(self, name) < 1:
                raise ValueError(f"ReplicaOptions({name}={getattr(self, name)}): give at least 1")


@dataclass(frozen=True, slots=True)
class BoxSplit:
    """The division of each box of an array into pieces, which its replicas write.

    Attributes:
        axis: the axis that is cut.
        count: the number of pieces of a box; each piece is a cell.
    """

    axis: int
    count: int


_EMPTY: Final[Mapping[int, Any]] = {}


class SplitTree(NamedTuple):
    """A tree whose large boxes are cut for their replicas.

    Attributes:
        tree: the tree, with the additional cuts.
        splits: by array, the split of each of its boxes; arrays that were not cut are left out.
        replicas: by array, the number of processes that hold each box, if it is known.
    """

    tree: TreeMetadata
    splits: Mapping[int, BoxSplit] = _EMPTY
    replicas: Mapping[int, int] = _EMPTY


class Owners(NamedTuple):
    """A rule for the replica that writes each cell of an array. Its size does not depend on the number of cells.

    Attributes:
        numbers: by piece of a box, the replica that writes this piece of the first box. For another box, add the
            sum of its indices along all axes, modulo the number of replicas.
        axis: the axis along which boxes are cut into pieces.
    """

    numbers: tuple[int, ...]
    axis: int = 0

    def of(self, cell: Sequence[int]) -> int:
        """Return the number of the replica that writes a cell, before taking the modulus.

        Args:
            cell: the index of the cell along each axis; empty for an array without axes.
        """
        if not cell:
            return self.numbers[0]
        box, piece = divmod(cell[self.axis], len(self.numbers))
        return self.numbers[piece] + sum(cell) - cell[self.axis] + box


def cut_for_replicas(
    tree: TreeMetadata, options: ReplicaOptions, *, size: int, replicas: Mapping[int, int] | None = None
) -> SplitTree:
    """Cut large boxes that several processes hold, so that each process can write a piece.

    Every process computes the same cuts. If the number of replicas of an array is not known, all of its boxes are
    assumed to have the same number, provided that the number of boxes divides the number of processes. A wrong
    assumption costs a few more chunks; the written elements are the same.

    Args:
        tree: the tree, as leaf handlers describe it.
        options: limits of pieces.
        size: number of processes in the job.
        replicas: by array, the number of processes that hold each box, if it is known.
    """
    known = replicas or {}

    def cut(leaf: int, record: ArrayRecord) -> tuple[_Cuts | None, BoxSplit | None]:
        count = known.get(leaf)
        return _cut(record, options, _replicas(_count(record), size) if count is None else count)

    leaves = list(tree.leaves)
    splits = {}
    for number, record in enumerate(tree.leaves):
        if isinstance(record, ArrayRecord) and number not in tree.aliases:
            cuts, split = cut(number, record)
            if split is not None:
                leaves[number], splits[number] = record._replace(cuts=cuts), split
    for alias, target in tree.aliases.items():
        record = tree.leaves[alias]
        if target in splits and isinstance(record, ArrayRecord):
            cuts, split = cut(alias, record)  # a rank may have the alias without its target
            if split is not None:
                leaves[alias], splits[alias] = record._replace(cuts=cuts), split
    return SplitTree(replace(tree, leaves=tuple(leaves)), splits, known)


def owners_of(split: SplitTree, *, rank: int, size: int) -> Mapping[int, Owners]:
    """Return the owners of the cells of each array that this process holds.

    Pieces are assigned as if each array had one box: the largest piece first, each to the replica that has the fewest
    bytes so far. This divides the bytes evenly among processes that hold one box of each of several arrays. Arrays
    that are cut into equally many boxes along each axis are divided together, because a process then holds the boxes at
    the same position of each; the assignment rotates among replicas from position to position. Every process computes
    the same result, in time that grows with the number of arrays, not of cells or processes.

    Args:
        split: the tree of the job, with the splits of the arrays that this process holds.
        rank: rank of this process.
        size: number of processes in the job.
    """
    tree = split.tree
    groups: dict[tuple[tuple[int, ...] | None, int, tuple[int, ...]], list[tuple[int, int, int]]] = {}
    numbers: dict[int, list[int]] = {}
    for leaf, record in enumerate(tree.leaves):
        held_by = tree.held_by.get(leaf)
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases or (held_by is not None and rank not in held_by):
            continue
        box_split = split.splits.get(leaf, BoxSplit(0, 1))
        replicas = split.replicas.get(leaf)
        if replicas is None:
            replicas = _replicas(_count(record) // box_split.count, size if held_by is None else len(held_by))
        if replicas > 1:
            numbers[leaf] = [0] * box_split.count
            entries = [(-nbytes, leaf, piece) for piece, nbytes in enumerate(_first_box_bytes(record, box_split))]
            groups.setdefault((held_by, replicas, _boxes(record, box_split)), []).extend(entries)
    for (_, replicas, _), entries in groups.items():
        loads = [(0, replica) for replica in range(min(replicas, len(entries)))]  # further replicas would get no piece
        for nbytes, leaf, piece in sorted(entries):
            load, replica = loads[0]
            numbers[leaf][piece] = replica
            heapq.heapreplace(loads, (load - nbytes, replica))
    return {leaf: Owners(tuple(of_pieces), split.splits.get(leaf, BoxSplit(0, 1)).axis)
            for leaf, of_pieces in numbers.items()}  # fmt: skip


def _first_box_bytes(record: ArrayRecord, split: BoxSplit) -> list[int]:
    """Return the bytes of each piece of the first box of an array. Other boxes have about the same sizes."""
    axes = record.cuts or ((),) * len(record.spec.shape)
    rest = record.spec.numpy_dtype.itemsize
    extents = [1]
    for axis, (boundaries, extent) in enumerate(zip(axes, record.spec.shape, strict=True)):
        if axis == split.axis:
            bounds = [0, *boundaries[: split.count], extent][: split.count + 1]
            extents = [stop - start for start, stop in itertools.pairwise(bounds)]
        else:
            rest *= boundaries[0] if boundaries else extent
    return [rest * extent for extent in extents]


def written_boxes(record: ArrayRecord, shards: Sequence[Shard], owners: Owners | None) -> tuple[Box, ...]:
    """Return the boxes that a process writes.

    A box without other replicas is written whole. A box that does not match the cuts of the array, because its handler
    did not describe it, is written whole by replica 0. Each replica of any other box writes the cells that it owns.

    Args:
        record: the array.
        shards: the boxes that this process holds.
        owners: the owners of the cells, from `owners_of`; None: replica 0 owns all.
    """
    if owners is None:
        return tuple([shard.box for shard in shards if shard.replica == 0])
    written: list[Box] = []
    for shard in shards:
        if shard.replicas == 1:
            written.append(shard.box)
            continue
        written.extend([cell for cell, replica in owned_cells(record, shard, owners) if replica == shard.replica])
    return tuple(written)


def owned_cells(record: ArrayRecord, shard: Shard, owners: Owners | None) -> Iterator[tuple[Box, int]]:
    """Yield the cells of a box, each with the number of the replica that writes it.

    Args:
        record: the array.
        shard: the box.
        owners: as for `written_boxes`.
    """
    ranges = None if owners is None else _cells_within(record, shard.box)
    if owners is None or ranges is None:
        yield shard.box, 0
        return
    for cell in itertools.product(*[range(len(axis)) for _, axis in ranges]):
        position = [first + number for (first, _), number in zip(ranges, cell, strict=True)]
        bounds = [axis[number] for (_, axis), number in zip(ranges, cell, strict=True)]
        box = Box(tuple([low for low, _ in bounds]), tuple([high for _, high in bounds]))
        yield box, owners.of(position) % shard.replicas


def _cells_within(record: ArrayRecord, box: Box) -> list[tuple[int, list[tuple[int, int]]]] | None:
    """Return, for each axis, the first cell in a box and the bounds of its cells; None if cells do not fill the box."""
    axes = record.cuts or ((),) * len(record.spec.shape)
    ranges = []
    for boundaries, extent, start, stop in zip(axes, record.spec.shape, box.start, box.stop, strict=True):
        first = bisect.bisect_right(boundaries, start)  # boundaries up to `start` belong to cells before the box
        last = bisect.bisect_left(boundaries, stop)
        begins = start == (boundaries[first - 1] if first else 0)
        ends = stop == (boundaries[last] if last < len(boundaries) else extent)
        if not (begins and ends):
            return None
        ranges.append((first, list(itertools.pairwise([start, *boundaries[first:last], stop]))))
    return ranges


def _count(record: ArrayRecord) -> int:
    """Return the number of cells between the cuts of an array."""
    return math.prod([len(boundaries) + 1 for boundaries in record.cuts or ()])


def _boxes(record: ArrayRecord, split: BoxSplit) -> tuple[int, ...]:
    """Return the number of boxes along each axis of an array; empty if it is one box."""
    cells = [len(boundaries) + 1 for boundaries in record.cuts or ()]
    boxes = [count // split.count if axis == split.axis else count for axis, count in enumerate(cells)]
    return tuple(boxes) if any(count > 1 for count in boxes) else ()


def _replicas(cells: int, holders: int) -> int:
    """Estimate the number of processes that hold each cell, from the number of cells."""
    return holders // cells if cells and holders % cells == 0 else 1


def _cut(record: ArrayRecord, options: ReplicaOptions, replicas: int) -> tuple[_Cuts | None, BoxSplit | None]:
    """Return the cuts of an array with additional ones, and the split of each box; None if boxes are not split."""
    axes = record.cuts or ((),) * len(record.spec.shape)
    cells = _count(record)
    wanted = min(replicas, options.most, record.spec.nbytes // cells // options.piece_bytes) if cells else 1
    best: tuple[int, tuple[int, ...], int] | None = None
    for axis, (boundaries, extent) in enumerate(zip(axes, record.spec.shape, strict=True)):
        if wanted > 1:
            count, finer = _finer(boundaries, extent, wanted)
            # Prefer the leading axis if others allow no more pieces: contiguous ranges stay long.
            if count > 1 and (best is None or count > best[0]):
                best = count, finer, axis
    if best is None:
        return record.cuts, None
    count, finer, axis = best
    return (*axes[:axis], finer, *axes[axis + 1 :]), BoxSplit(axis, count)


def _finer(boundaries: Sequence[int], extent: int, wanted: int) -> tuple[int, tuple[int, ...]]:
    """Cut an axis into up to `wanted` times as many pieces. All but the last are equal, as regular grids require."""
    if not boundaries:
        step = -(-extent // wanted)
        return -(-extent // step), tuple(range(step, extent, step))
    shard = boundaries[0]
    if list(boundaries) != list(range(shard, extent, shard)):
        return 1, ()
    count = next((count for count in range(wanted, 1, -1) if shard % count == 0 and extent % shard == 0), 1)
    return count, tuple(range(shard // count, extent, shard // count))


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
        owners: by leaf, the owners of its cells, from `owners_of`; None: replica 0 writes.
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
