"""The plan of a recovery: parcels of elements, and the processes that send them. Pure functions.

Every process computes the same plan from the same arguments. A message names a parcel by its number.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import ReadItem
from ckptcore.planning import boxes_of_range
from ckptcore.planning.partition import subtract
from ckptcore_recovery.peers.messages import PIECE_BYTES

WITNESSES: Final = 3
"""The number of holders that compute the digest of a parcel, if it has so many. Two of three are a majority."""

_LEAST_BYTES: Final = 1 << 16
"""Parcels are not made smaller than this to involve more holders: each costs a message."""

_MOST_BYTES: Final = PIECE_BYTES - 64
"""A parcel ends with the element that reaches this size, so it can be larger by one element."""

_FEW: Final = 16
"""Fewer boxes than these are compared one by one."""

ItemSizes: TypeAlias = Mapping[int, int]
"""Bytes per element of each array, by leaf."""

Needs: TypeAlias = Mapping[int, Sequence[ReadItem]]
"""The boxes that each rank needs, each once."""


class HeldBox(NamedTuple):
    """A box of an array, and the ascending ranks of the processes that hold it."""

    box: Box
    ranks: tuple[int, ...]


Held: TypeAlias = Mapping[int, Sequence[HeldBox]]
"""The boxes that processes hold, by leaf."""


class Piece(NamedTuple):
    """A part of a box that a process needs.

    Attributes:
        item: the array, and the box that the process needs.
        box: the part of it; its elements are sent in C order.
    """

    item: ReadItem
    box: Box

    @property
    def leaf(self) -> int:
        """The number of the array."""
        return self.item.leaf


@dataclass(frozen=True, slots=True)
class Parcel:
    """Elements that are sent in one message.

    Attributes:
        pieces: the elements, in this order.
        nbytes: their size.
        holders: the ranks that hold all of them.
        senders: for each rank that needs them, the rank that sends them unless it fails.
    """

    pieces: tuple[Piece, ...]
    nbytes: int
    holders: tuple[int, ...]
    senders: Mapping[int, int]

    @property
    def witnesses(self) -> tuple[int, ...]:
        """The holders that compute its digest: its senders, and the holders after the first of them."""
        chosen = set(self.senders.values())
        place, count = bisect.bisect(self.holders, min(chosen)), len(self.holders)
        while len(chosen) < min(WITNESSES, count):
            chosen.add(self.holders[place % count])
            place += 1
        return tuple(sorted(chosen))


def missing_boxes(needs: Sequence[ReadItem], index: HeldIndex) -> Iterator[ReadItem]:
    """Yield the parts of needed boxes that no process holds."""
    for item in needs:
        rest = [item.box]
        for present in index.overlapping(item):
            rest = [part for box in rest for part in subtract(box, present.box)]
        yield from [ReadItem(item.leaf, part) for part in rest if part.size]


def plan_parcels(itemsizes: ItemSizes, held: Held, needs: Needs) -> Sequence[Parcel]:
    """Divide the needed boxes into parcels, and choose the holder that sends each parcel.

    The work of all holders of the same boxes differs by at most one element, if there are enough bytes.

    Args:
        itemsizes: bytes per element of each needed array.
        held: the boxes of the processes that have their state. They cover the needed boxes.
        needs: the boxes of the processes that lost their state.
    """
    receivers: dict[ReadItem, list[int]] = {}
    for rank, items in sorted(needs.items()):
        for item in items:
            receivers.setdefault(item, []).append(rank)
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Piece]] = {}
    index = HeldIndex(held)
    for item, ranks in receivers.items():
        for part, holders in _held_parts(item.box, index.overlapping(item)):
            groups.setdefault((holders, tuple(ranks)), []).append(Piece(item, part))
    parcels: list[Parcel] = []
    loads: dict[int, int] = {}
    # Boxes with few holders first: those with more holders then go to the holders with less work.
    for (holders, needing), pieces in sorted(groups.items(), key=lambda group: (len(group[0][0]), group[0])):
        queue = [(loads.get(rank, 0), rank) for rank in holders]
        heapq.heapify(queue)
        for turn, (parcel_pieces, nbytes) in enumerate(_divide(pieces, itemsizes, len(holders))):
            senders = {}
            first = turn % len(needing)  # so that each process receives from all holders
            for rank in needing[first:] + needing[:first]:
                load, sender = heapq.heappop(queue)
                senders[rank] = sender
                heapq.heappush(queue, (load + nbytes, sender))
            parcels.append(Parcel(parcel_pieces, nbytes, holders, senders))
        loads.update({rank: load for load, rank in queue})
    return parcels


class HeldIndex:
    """Finds held boxes. A large job may have thousands for each array, of which a process needs few."""

    def __init__(self, held: Held) -> None:
        """Index nothing yet."""
        self._held = held
        self._bounds: dict[int, tuple[HostArray, HostArray]] = {}

    def overlapping(self, item: ReadItem) -> Sequence[HeldBox]:
        """Return the held boxes that have elements of a needed box."""
        boxes = self._held.get(item.leaf, ())
        if len(boxes) < _FEW or not item.box.start:
            return boxes
        if item.leaf not in self._bounds:
            starts, stops = ([getattr(present.box, name) for present in boxes] for name in ("start", "stop"))
            self._bounds[item.leaf] = np.array(starts), np.array(stops)
        lower, upper = self._bounds[item.leaf]
        overlaps = ((lower < np.array(item.box.stop)) & (upper > np.array(item.box.start))).all(axis=1)
        return [boxes[number] for number in np.flatnonzero(overlaps).tolist()]


def _held_parts(needed: Box, held: Collection[HeldBox]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Divide a needed box into disjoint parts, each with all ranks that hold it."""
    common = [(part, present.ranks) for present in held if (part := needed.intersect(present.box)) is not None]
    if sum([part.size for part, _ in common]) == needed.size:
        yield from common  # they cover the box, so they do not overlap
        return
    cells: list[tuple[Box, frozenset[int]]] = [(needed, frozenset())]
    for part, ranks in common:
        cut = []
        for cell, having in cells:
            inside = cell.intersect(part)
            if inside is None:
                cut.append((cell, having))
                continue
            cut.append((inside, having.union(ranks)))
            cut.extend([(outside, having) for outside in subtract(cell, part)])
        cells = cut
    yield from [(cell, tuple(sorted(having))) for cell, having in cells if having]


def _divide(pieces: Sequence[Piece], itemsizes: ItemSizes, holders: int) -> Iterator[tuple[tuple[Piece, ...], int]]:
    """Divide pieces into parcels of equal size. Their number is a multiple of the number of holders, if possible.

    Yields:
        The pieces of each parcel, and their bytes.
    """
    total = sum([piece.box.size * itemsizes[piece.leaf] for piece in pieces])
    count = -(-total // (holders * _MOST_BYTES)) * holders
    count = max(1, min(count, total // _LEAST_BYTES))
    current: list[Piece] = []
    start = position = 0  # bytes
    number = 1
    for piece in pieces:
        itemsize, first, size = itemsizes[piece.leaf], 0, piece.box.size
        while first < size:
            end = number * total // count
            stop = min(size, first + -(-(end - position) // itemsize))
            for part in boxes_of_range(piece.box.shape, first, stop):
                current.append(piece._replace(box=_moved(part, piece.box.start)))
            position += (stop - first) * itemsize
            first = stop
            while position >= number * total // count and number <= count:
                number += 1
            if current and position >= end:
                yield tuple(current), position - start
                current, start = [], position


def _moved(box: Box, origin: tuple[int, ...]) -> Box:
    """Return a box, given relative to an index of the array, in coordinates of the array."""
    return Box(
        tuple([place + offset for place, offset in zip(box.start, origin, strict=True)]),
        tuple([place + offset for place, offset in zip(box.stop, origin, strict=True)]),
    )
