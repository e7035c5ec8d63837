"""Replicas of boxes: which process writes and reads which."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ckptcore.model.arrays import Box, Shard
from ckptcore.model.metadata import ArrayRecord, TreeMetadata

__all__ = [
    "READS",
    "Owners",
    "Pieces",
    "ReadGroups",
    "Reads",
    "ReplicaOptions",
    "Shares",
    "cells_of",
    "cut_for_replicas",
    "group_of",
    "owned_cells",
    "owners_of",
    "written_boxes",
]


@dataclass(frozen=True, slots=True)
class ReadGroups:
    """Groups of processes that read for each other: one process of a group reads what several request, and sends it.

    Attributes:
        groups: ranks, each in at most one group; who is in none reads for itself.
    """

    groups: tuple[tuple[int, ...], ...]

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """`groups` may be any sequences of ranks."""
        made = tuple([tuple(sorted(group)) for group in groups])
        ranks = [rank for group in made for rank in group]
        if len(set(ranks)) != len(ranks) or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ValueError(f"ReadGroups({groups!r}): give each rank once, in one group, as an int of 0 or more")
        object.__setattr__(self, "groups", made)


Reads: TypeAlias = Literal["all", "alone", "broadcast", "per_node"] | ReadGroups
"""Readers: each process for itself, this process without the others, one of the job, one of each host, or one of each
given group."""

READS: Final = ("all", "alone", "broadcast", "per_node")


def group_of(rank: int, reads: Reads, hosts: Sequence[str]) -> tuple[int, ...]:
    """The ranks that read for each other, of which `rank` is one.

    Args:
        rank: whose group.
        reads: who reads.
        hosts: by rank, the name of its host.
    """
    if isinstance(reads, ReadGroups):
        return next((group for group in reads.groups if rank in group), (rank,))
    if reads == "broadcast":
        return tuple(range(len(hosts)))
    if reads == "per_node":
        return tuple([other for other, host in enumerate(hosts) if host == hosts[rank]])
    return (rank,)


_Cuts: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How processes that hold the same elements share the work of writing them, in layouts that take them from any.

    Every process of a job gives the same.

    Attributes:
        piece_bytes: a box is cut for its replicas into pieces of at least so many bytes.
        most: how many replicas share one box at most; 1: none is cut. More requests at once are not always faster.
        objects: how to save objects with a state, such as a data loader or a wrapper of a model with ``state_dict``, in
            a tree that several processes save together. ``"refuse"``: raise an error, because the states may differ
            between processes. ``"lowest_rank"``: as torch.distributed.checkpoint does. The keys of all processes are
            saved, and each process writes its shards of distributed arrays. Of any other array or value, that of the
            lowest rank that has it is saved.
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
class Pieces:
    """How each box of an array is cut for its replicas.

    Attributes:
        axis: which axis is cut.
        count: into how many pieces, each a cell.
    """

    axis: int
    count: int


_EMPTY: Final[Mapping[int, Any]] = {}


class Shares(NamedTuple):
    """A tree whose large boxes are cut for their replicas.

    Attributes:
        tree: with the further cuts.
        pieces: by array that was cut, how each of its boxes is.
        replicas: by array, how many processes hold each box, where that is known.
    """

    tree: TreeMetadata
    pieces: Mapping[int, Pieces] = _EMPTY
    replicas: Mapping[int, int] = _EMPTY


class Owners(NamedTuple):
    """Which replicas write the cells of an array: a rule, so that nothing is listed that other processes hold.

    Attributes:
        numbers: by piece of a box, the replica that writes this piece of the first box. For another box, add its
            position among the boxes, and take the sum modulo the number of replicas.
        axis: the axis along which the pieces of a box follow each other.
    """

    numbers: tuple[int, ...]
    axis: int = 0

    def of(self, cell: Sequence[int]) -> int:
        """The number of the replica that writes a cell; of an array without axes, that of the only one.

        Args:
            cell: the place of the cell among those of the array, along each axis.
        """
        if not cell:
            return self.numbers[0]
        box, piece = divmod(cell[self.axis], len(self.numbers))
        return self.numbers[piece] + sum(cell) - cell[self.axis] + box


def cut_for_replicas(
    tree: TreeMetadata, options: ReplicaOptions, *, size: int, replicas: Mapping[int, int] | None = None
) -> Shares:
    """Cut large boxes that several processes hold, so that each can write a piece.

    Every process cuts alike, and so goes by what is the same on each. Of an array that does not say how many processes
    hold its boxes, those between its cuts are taken to be held by equally many, if their number divides that of all
    processes. Where that is not so an array has a few more chunks, and the elements that are written are the same.

    Args:
        tree: as leaf handlers describe it.
        options: how to share.
        size: processes of the job.
        replicas: by array, how many processes hold each box, of those that say so.
    """
    known = replicas or {}

    def cut(leaf: int, record: ArrayRecord) -> tuple[_Cuts | None, Pieces | None]:
        count = known.get(leaf)
        return _cut(record, options, _replicas(_count(record), size) if count is None else count)

    leaves = list(tree.leaves)
    pieces = {}
    for number, record in enumerate(tree.leaves):
        if isinstance(record, ArrayRecord) and number not in tree.aliases:
            cuts, found = cut(number, record)
            if found is not None:
                leaves[number], pieces[number] = record._replace(cuts=cuts), found
    for alias, target in tree.aliases.items():
        record = tree.leaves[alias]
        if target in pieces and isinstance(record, ArrayRecord):
            cuts, found = cut(alias, record)  # as its own, for a rank that has it without the other
            if found is not None:
                leaves[alias], pieces[alias] = record._replace(cuts=cuts), found
    return Shares(replace(tree, leaves=tuple(leaves)), pieces, known)


def owners_of(shares: Shares, *, rank: int, size: int) -> Mapping[int, Owners]:
    """By array, which replica writes each of the cells between its cuts.

    The largest pieces come first, and each goes to the replica that has the fewest bytes so far, as if each array had
    one box. So processes that hold one box of each of several arrays share them evenly, whichever boxes they are.
    Arrays that are cut into equally many boxes along each axis are divided together, because a process then holds boxes
    at one position; from position to position the replicas take turns. Every process computes the same result, in time
    that grows with the number of arrays, not with that of cells or processes.

    Args:
        shares: the tree of the job, and the pieces of the arrays that this process holds.
        rank, size: which process of how many this is.

    Returns:
        Of what this process has.
    """
    tree = shares.tree
    groups: dict[tuple[tuple[int, ...] | None, int, tuple[int, ...]], list[tuple[int, int, int]]] = {}
    numbers: dict[int, list[int]] = {}
    for leaf, record in enumerate(tree.leaves):
        held_by = tree.held_by.get(leaf)
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases or (held_by is not None and rank not in held_by):
            continue
        pieces = shares.pieces.get(leaf, Pieces(0, 1))
        replicas = shares.replicas.get(leaf)
        if replicas is None:
            replicas = _replicas(_count(record) // pieces.count, size if held_by is None else len(held_by))
        if replicas > 1:
            numbers[leaf] = [0] * pieces.count
            entries = [(-nbytes, leaf, piece) for piece, nbytes in enumerate(_first_box_bytes(record, pieces))]
            groups.setdefault((held_by, replicas, _boxes(record, pieces)), []).extend(entries)
    for (_, replicas, _), entries in groups.items():
        loads = [(0, replica) for replica in range(min(replicas, len(entries)))]  # no others come to have any
        for nbytes, leaf, piece in sorted(entries):
            load, replica = loads[0]
            numbers[leaf][piece] = replica
            heapq.heapreplace(loads, (load - nbytes, replica))
    return {leaf: Owners(tuple(of_pieces), shares.pieces.get(leaf, Pieces(0, 1)).axis)
            for leaf, of_pieces in numbers.items()}  # fmt: skip


def _first_box_bytes(record: ArrayRecord, pieces: Pieces) -> list[int]:
    """The bytes of each piece of the first box of an array; the other boxes are about the same."""
    axes = record.cuts or ((),) * len(record.spec.shape)
    rest = record.spec.numpy_dtype.itemsize
    extents = [1]
    for axis, (boundaries, extent) in enumerate(zip(axes, record.spec.shape, strict=True)):
        if axis == pieces.axis:
            bounds = [0, *boundaries[: pieces.count], extent][: pieces.count + 1]
            extents = [stop - start for start, stop in itertools.pairwise(bounds)]
        else:
            rest *= boundaries[0] if boundaries else extent
    return [rest * extent for extent in extents]


def cells_of(record: ArrayRecord) -> Sequence[Box]:
    """The boxes between the cuts of an array, in C order."""
    axes = record.cuts or ((),) * len(record.spec.shape)
    ranges = [
        list(itertools.pairwise([0, *boundaries, extent]))
        for boundaries, extent in zip(axes, record.spec.shape, strict=True)
    ]
    return [
        Box(tuple([low for low, _ in cell]), tuple([high for _, high in cell])) for cell in itertools.product(*ranges)
    ]


def written_boxes(record: ArrayRecord, shards: Sequence[Shard], owners: Owners | None) -> tuple[Box, ...]:
    """The boxes that a process writes of those that it holds.

    A box that nobody else holds is written whole, and so is one that the cuts go around: its handler has not said where
    it lies. Of any other, each replica writes the cells that it owns.

    Args:
        record: the array.
        shards: the boxes that this process holds.
        owners: of the cells of the array, as `owners_of` gives them; None where replica 0 owns all.
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
    """The pieces in which the replicas of a box write it, each with the number of the replica that does.

    Args:
        record: the array.
        shard: the box, as any process holds it.
        owners: as for `written_boxes`.
    """
    ranges = None if owners is None else _cells_within(record, shard.box)
    if owners is None or ranges is None:
        yield shard.box, 0
        return
    for cell in itertools.product(*[range(len(axis)) for _, axis in ranges]):
        place = [first + number for (first, _), number in zip(ranges, cell, strict=True)]
        bounds = [axis[number] for (_, axis), number in zip(ranges, cell, strict=True)]
        box = Box(tuple([low for low, _ in bounds]), tuple([high for _, high in bounds]))
        yield box, owners.of(place) % shard.replicas


def _cells_within(record: ArrayRecord, box: Box) -> list[tuple[int, list[tuple[int, int]]]] | None:
    """Return, for each axis, the first cell in a box and the bounds of its cells; None if cells do not fill the box."""
    axes = record.cuts or ((),) * len(record.spec.shape)
    ranges = []
    for boundaries, extent, start, stop in zip(axes, record.spec.shape, box.start, box.stop, strict=True):
        first = bisect.bisect_right(boundaries, start)  # each boundary up to the start ends a cell before the box
        last = bisect.bisect_left(boundaries, stop)
        begins = start == (boundaries[first - 1] if first else 0)
        ends = stop == (boundaries[last] if last < len(boundaries) else extent)
        if not (begins and ends):
            return None
        ranges.append((first, list(itertools.pairwise([start, *boundaries[first:last], stop]))))
    return ranges


def _count(record: ArrayRecord) -> int:
    """How many cells an array has between its cuts."""
    return math.prod([len(boundaries) + 1 for boundaries in record.cuts or ()])


def _boxes(record: ArrayRecord, pieces: Pieces) -> tuple[int, ...]:
    """Into how many boxes an array is cut along each axis; nothing where it is not cut."""
    cells = [len(boundaries) + 1 for boundaries in record.cuts or ()]
    boxes = [count // pieces.count if axis == pieces.axis else count for axis, count in enumerate(cells)]
    return tuple(boxes) if any(count > 1 for count in boxes) else ()


def _replicas(cells: int, holders: int) -> int:
    """How many processes hold each cell, as far as the number of cells tells."""
    return holders // cells if cells and holders % cells == 0 else 1


def _cut(record: ArrayRecord, options: ReplicaOptions, replicas: int) -> tuple[_Cuts | None, Pieces | None]:
    """The cuts of an array with the further ones, and how these cut each box; None if there are none."""
    axes = record.cuts or ((),) * len(record.spec.shape)
    cells = _count(record)
    wanted = min(replicas, options.most, record.spec.nbytes // cells // options.piece_bytes) if cells else 1
    found: tuple[int, tuple[int, ...], int] | None = None
    for axis, (boundaries, extent) in enumerate(zip(axes, record.spec.shape, strict=True)):
        if wanted > 1:
            count, finer = _finer(boundaries, extent, wanted)
            # The leading axis where others give no more: runs stay long.
            if count > 1 and (found is None or count > found[0]):
                found = count, finer, axis
    if found is None:
        return record.cuts, None
    count, finer, axis = found
    return (*axes[:axis], finer, *axes[axis + 1 :]), Pieces(axis, count)


def _finer(boundaries: Sequence[int], extent: int, wanted: int) -> tuple[int, tuple[int, ...]]:
    """Cut an axis into up to `wanted` times as many pieces, equal but for the last, as regular grids need."""
    if not boundaries:
        step = -(-extent // wanted)
        return -(-extent // step), tuple(range(step, extent, step))
    shard = boundaries[0]
    if list(boundaries) != list(range(shard, extent, shard)):
        return 1, ()
    count = next((count for count in range(wanted, 1, -1) if shard % count == 0 and extent % shard == 0), 1)
    return count, tuple(range(shard // count, extent, shard // count))
