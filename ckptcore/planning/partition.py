"""Division of boxes into disjoint boxes and flat ranges, and the check that boxes cover an array.

Plans have the boxes that each process writes and reads. The replicas of a box divide its writes.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, Box, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.transfer import ItemColumns, ReadItem, ReadPlan, Receipt, WriteItem, WritePlan
from ckptcore.model.tree import format_path


def cut_box(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Cut a box into pieces of about equal size, in C order. A piece has at least one element.

    Cuts along the first axis that is longer than one element, so that pieces stay as contiguous as the box.

    Args:
        box: the box to cut.
        itemsize: bytes per element.
        most_bytes: limit of a piece.
    """
    nbytes = box.size * itemsize
    if nbytes <= most_bytes or box.size <= 1:
        yield box
        return
    axis = next(axis for axis, extent in enumerate(box.shape) if extent > 1)
    extent = box.shape[axis]
    count = min(-(-nbytes // most_bytes), extent)
    for piece in box.bands(axis, -(-extent // count)):
        yield from cut_box(piece, itemsize, most_bytes)


def subtract(box: Box, other: Box) -> list[Box]:
    """Subtract `other` from `box`. Returns the rest as disjoint boxes, up to two per axis."""
    inner = box.intersect(other)
    if inner is None:
        return [box]
    parts = []
    start, stop = list(box.start), list(box.stop)
    for axis, (low, high) in enumerate(zip(inner.start, inner.stop, strict=True)):
        if start[axis] < low:
            parts.append(Box(tuple(start), (*stop[:axis], low, *stop[axis + 1 :])))
        if high < stop[axis]:
            parts.append(Box((*start[:axis], high, *start[axis + 1 :]), tuple(stop)))
        start[axis], stop[axis] = low, high
    return parts


_FEW_BOXES: Final = 16
"""Up to this number of boxes, comparing each pair is faster than computing `_moved_volumes`."""

_MAX_EXTENT: Final = 1 << 62
"""Maximum length of an axis. Tables of boxes have the same limit."""

_MAX_ELEMENTS: Final = 1 << 56
"""Maximum number of elements of an array, so that the sum of the sizes of `_FEW_BOXES` boxes fits into 64 bits."""

_PRIMES: Final[HostArray] = np.array([2147483647, 2147483629], np.uint64)
"""The two largest primes below 2**31, so that products of two remainders fit into 64 bits."""

_MOVED_ROWS: Final = 1 << 12
"""Number of boxes whose bounds are moved at a time, so that the arrays stay in the cache."""


def covers_exactly(shape: Sequence[int], starts: HostArray, stops: HostArray) -> bool:
    """Return True if boxes cover an array without gap and overlap.

    The time is proportional to the number of boxes and axes, even for the worst boxes of a hostile checkpoint.

    Let ``step(n)`` be the function of an index that is 0 below `n` and 1 from `n` on. For a box, the product of
    ``step(start) - step(stop)`` over the axes is 1 inside the box and 0 outside. The boxes cover the array exactly if
    the sum of their products equals the product of the whole array. Steps at different bounds are linearly independent.
    Therefore both sides are equal if and only if they are equal as polynomials with an unknown for each step. The
    polynomials are compared at random values of the unknowns, modulo two primes. Unequal polynomials have equal values
    in less than one of 2**50 calls (Schwartz-Zippel lemma).

    Args:
        shape: shape of the array, in elements.
        starts, stops: the boxes, with a row for each box and a column for each axis.
    """
    filled = (stops > starts).all(axis=1)
    if not filled.all():
        starts, stops = starts[filled], stops[filled]
    if not len(starts) or 0 in shape:
        return 0 in shape and not len(starts)
    if max(shape, default=0) > _MAX_EXTENT:
        return False
    ends: HostArray = np.array(shape, np.int64)
    if (starts < 0).any() or (stops > ends).any():
        return False
    if not shape:
        return len(starts) == 1
    if len(starts) <= _FEW_BOXES and math.prod(shape) <= _MAX_ELEMENTS:
        overlapping = ((starts[:, None] < stops) & (starts < stops[:, None])).all(axis=2)  # a box overlaps itself
        missing = math.prod(shape) - int((stops - starts).prod(axis=1).sum())
        return not missing and int(overlapping.sum()) == len(starts)
    import random  # only arrays in many boxes need it

    choices = random.SystemRandom()  # leaves the caller's generators unchanged
    keys = np.array([[[choices.getrandbits(64)] for _ in shape] for _ in _PRIMES], np.uint64)
    total = _moved_volumes(np.zeros((1, len(shape)), np.int64), ends[None], keys)
    for first in range(0, len(starts), _MOVED_ROWS):
        rows = slice(first, first + _MOVED_ROWS)
        total = total + _PRIMES - _moved_volumes(starts[rows], stops[rows], keys)
    return not (total % _PRIMES).any()


def _moved_volumes(starts: HostArray, stops: HostArray, keys: HostArray) -> HostArray:
    """Return the sum of the sizes of boxes, modulo each prime, after each bound was moved to a random position.

    Args:
        starts, stops: the boxes.
        keys: a random number for each prime and axis.
    """
    primes = _PRIMES[:, None, None]
    mixed = np.concatenate([starts, stops]).astype(np.uint64).T ^ keys  # SplitMix64 of prime, axis and bound
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    moved = (mixed ^ (mixed >> np.uint64(31))) % primes
    extents = (moved[:, :, len(starts) :] + primes - moved[:, :, : len(starts)]) % primes
    volumes = extents[:, 0]
    for axis in range(1, extents.shape[1]):
        volumes = volumes * extents[:, axis] % _PRIMES[:, None]
    sums: HostArray = volumes.sum(axis=1) % _PRIMES
    return sums


class WrittenBoxes:
    """The boxes of each array that the processes of a job wrote."""

    def __init__(self, leaves: Sequence[LeafRecord], written: Sequence[ItemColumns]) -> None:
        """Merge the columns of all processes."""
        axes: HostArray = np.array(
            [len(record.spec.shape) if isinstance(record, ArrayRecord) else 0 for record in leaves], np.int64
        )
        none = np.zeros(0, np.int64)  # `concatenate` refuses an empty list, which a tree without arrays has
        count = np.concatenate([none, *[columns.counts for columns in written]]).astype(np.int64)
        leaf = np.repeat(np.concatenate([none, *[columns.leaf for columns in written]]).astype(np.int64), count)
        self._bounds: HostArray = np.concatenate([none, *[columns.bounds for columns in written]])
        self._axes = axes
        widths = 2 * axes[leaf]
        self._order: HostArray = np.argsort(leaf, kind="stable")
        self._begins: HostArray = (np.cumsum(widths) - widths)[self._order]
        self._first_rows: HostArray = np.searchsorted(leaf[self._order], np.arange(len(leaves) + 1))

    def bounds(self, leaf: int) -> tuple[HostArray, HostArray]:
        """Return the starts and the stops of the boxes of an array, with a row for each box."""
        axes = int(self._axes[leaf])
        begins = self._begins[self._first_rows[leaf] : self._first_rows[leaf + 1]]
        rows = self._bounds[begins[:, None] + np.arange(2 * axes)].astype(np.int64)
        return rows[:, :axes], rows[:, axes:]

    def boxes(self, leaf: int) -> Iterator[Box]:
        """Iterate over the boxes of an array."""
        starts, stops = self.bounds(leaf)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield Box(tuple(start), tuple(stop))


def uncovered(spec: ArraySpec, boxes: Sequence[Box]) -> str | None:
    """Return why boxes do not cover an array exactly, as text for a message; None if they do.

    The time is proportional to the number of boxes. If they do not cover the array, it also grows with the logarithm of
    the number of elements.
    """
    whole = Box.whole(spec.shape)
    if len(boxes) == 1 and boxes[0] == whole:
        return None
    # Compare bounds, not sizes: a hostile box may end before it begins on two axes, so that its size is positive.
    filled = [box for box in boxes if all(map(operator.lt, box.start, box.stop))]
    for box in filled:
        if len(box.start) != len(spec.shape) or not whole.contains(box):
            return f"the box {_span(box)} is outside of the array"
    total = sum(box.size for box in filled)
    expected = math.prod(spec.shape)
    if total < expected:
        return f"{expected - total} of {expected} elements are in no box"
    if len(filled) <= _FEW_BOXES:
        for box, other in itertools.combinations(filled, 2):
            if box.intersect(other) is not None:
                return f"the boxes {_span(box)} and {_span(other)} overlap"
        return None
    starts, stops = (np.array(bounds, np.int64).reshape(len(filled), -1) for bounds in zip(*filled, strict=True))
    if covers_exactly(spec.shape, starts, stops):
        return None
    element = _not_in_one_box(spec.shape, starts, stops)
    inside = np.flatnonzero(((starts <= element) & (np.array(element, np.int64) < stops)).all(axis=1))
    if len(inside) > 1:
        return f"the boxes {_span(filled[inside[0]])} and {_span(filled[inside[1]])} overlap"
    return f"the element {list(element)} is in no box"


def _not_in_one_box(shape: tuple[int, ...], starts: HostArray, stops: HostArray) -> tuple[int, ...]:
    """Return an element that is in no box, or in several boxes. The boxes are not empty, and do not cover the array."""
    # Bisection: if the boxes cover the lower half exactly, the element is in the upper half.
    first, after = [0] * len(shape), list(shape)
    for axis in range(len(shape)):
        while after[axis] - first[axis] > 1:
            middle = (first[axis] + after[axis]) // 2
            half = [*after[:axis], middle, *after[axis + 1 :]]
            lower = tuple(map(operator.sub, half, first))
            if covers_exactly(lower, np.maximum(starts, first) - first, np.minimum(stops, half) - first):
                first[axis] = middle
            else:
                after = half
    return tuple(first)


def check_coverage(tree: TreeMetadata, receipts: Sequence[Receipt]) -> None:
    """Check that the boxes of all processes cover every array of the tree without gap and overlap.

    Raises:
        CorruptCheckpointError: names the first array that they do not cover.
    """
    arrays = [(leaf, record) for leaf, record in tree.arrays.items() if leaf not in tree.aliases]
    if any(isinstance(receipt.items, ItemColumns) for receipt in receipts):
        columns = WrittenBoxes(tree.leaves, [ItemColumns.of(tree.leaves, receipt.items) for receipt in receipts])
        for leaf, record in arrays:
            if covers_exactly(record.spec.shape, *columns.bounds(leaf)):
                continue
            if (reason := uncovered(record.spec, list(columns.boxes(leaf)))) is not None:
                raise _incomplete(tree, leaf, record, reason)
        return
    written: dict[int, list[Box]] = {}
    for receipt in receipts:
        for item in receipt.items:
            written.setdefault(item.leaf, []).extend(item.boxes)
    for leaf, record in arrays:
        if (reason := uncovered(record.spec, written.get(leaf, ()))) is not None:
            raise _incomplete(tree, leaf, record, reason)


def _incomplete(tree: TreeMetadata, leaf: int, record: ArrayRecord, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{format_path(tree.paths[leaf])} ({record.spec}) is incomplete: the written boxes do not cover it "
        f"exactly: {reason}; the save is not committed. The shards of its leaf handler do not match its description"
    )


def _span(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True)) + "]"


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Divide a range of the elements of an array, in C order, into boxes in this order. Each box is one run.

    There are at most two boxes for each axis except the last axis, plus one box.

    Args:
        shape: the shape of the array; no extent is 0.
        start, stop: the range, in elements.
    """
    boxes: list[Box] = []
    if start < stop:
        _divide_range(shape, 0, (), start, stop, boxes)
    return boxes


def _divide_range(
    shape: tuple[int, ...], axis: int, index: tuple[int, ...], start: int, stop: int, boxes: list[Box]
) -> None:
    """Divide the elements `start` to `stop` of the part of an array at `index` along the axes before `axis`."""
    if axis == len(shape):
        boxes.append(Box(index, tuple([i + 1 for i in index])))
        return
    rest = shape[axis + 1 :]
    inner = math.prod(rest)
    first, skipped = divmod(start, inner)
    last, kept = divmod(stop, inner)
    if first == last:
        _divide_range(shape, axis + 1, (*index, first), skipped, kept, boxes)
        return
    if skipped:
        _divide_range(shape, axis + 1, (*index, first), skipped, inner, boxes)
        first += 1
    if first < last:
        above = tuple([i + 1 for i in index])
        boxes.append(Box((*index, first, *(0,) * len(rest)), (*above, last, *rest)))
    if kept:
        _divide_range(shape, axis + 1, (*index, last), 0, kept, boxes)


_Cuts: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options that divide the writes of replicated data among processes, for layouts in which any replica can write.

    Every process of a job must use equal options.

    Attributes:
        piece_bytes: minimum size of the pieces into which a box is cut for its replicas, in bytes.
        most: maximum number of replicas that write parts of one box; 1: no box is cut. A limit can make saves faster,
            because more concurrent requests are not always faster.
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
        splits: by array, the split of its boxes. Arrays that were not cut are left out.
        replicas: by array, the number of processes that hold each box, if it is known.
    """

    tree: TreeMetadata
    splits: Mapping[int, BoxSplit] = _EMPTY
    replicas: Mapping[int, int] = _EMPTY


class Owners(NamedTuple):
    """A rule for the replica that writes each cell of an array. Its size does not depend on the number of cells.

    Attributes:
        numbers: for each piece of a box, the replica that writes this piece of the first box. For any other box, add
            the sum of the box's indices along all axes, and take the result modulo the number of replicas.
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

    Every process computes the same cuts. An unknown number of replicas is estimated: if the number of boxes of an array
    divides the number of processes, each box is assumed to have equally many replicas. A wrong estimate costs a few
    more chunks, but does not change the written elements.

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

    Pieces are assigned as if each array had one box. The largest piece comes first, and each piece goes to the replica
    that has the fewest bytes so far. This divides the bytes evenly among processes that hold one box of each of several
    arrays. Arrays with equal numbers of boxes along each axis are divided together, because a process then holds the
    box at the same position in each of them. From one position to the next, the assignment rotates among the replicas.
    Every process computes the same result. The time grows with the number of arrays, not of cells or processes.

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
    import heapq  # only jobs need it

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

    A box without other replicas is written whole. If the bounds of a box are not among the cuts of the array, because
    the leaf handler did not describe them, replica 0 writes the box whole. Of any other box, each replica writes the
    cells that it owns.

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
        owners: see `written_boxes`.
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
    """Return the cuts of an array with additional cuts, and the split of each box; None if boxes are not split."""
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
    for leaf, record in tree.arrays.items():
        if leaf in tree.aliases:
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
