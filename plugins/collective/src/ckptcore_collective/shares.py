"""Shares of a collective read: the process that reads each requested box, and the order of messages. Pure functions."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.model import BLOCK_BYTES
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.model.transfer import Chunk, ReadItem
from ckptcore.on_demand.pieces import ALIGNMENT, BatchSizes, ChunkLookup, Order, StoredPiece, batches_of, pieces_of
from ckptcore.planning.partition import subtract

RequestedBoxes: TypeAlias = Mapping[int, Sequence[Box]]
"""The boxes that a process requests, by number of the leaf (never an alias), without duplicates."""

ChunksOf: TypeAlias = Callable[[int], Iterable[Chunk]]
"""A function that returns the chunks of an array, by its leaf number; empty if they are unknown. Either all chunks of
an array are plain, or none is."""

ReaderSet: TypeAlias = frozenset[int]
"""The readers of a box: the numbers of the requests that contain it."""

_LEAST_BYTES: Final = 4 << 20
"""Data is not cut into messages of less than about this size, because each message costs a request, and ends at a
block."""

_TURNS: Final = 4
"""Minimum number of messages that each member reads, if they are larger than `_LEAST_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSizes:
    """Limits of messages and of memory, in bytes.

    Attributes:
        message: limit of a message, which has at least one element.
        round: limit of the data that a process requests in one round; a single array may exceed it. None: one round.
        block: size of a block. Messages end at multiples of it in an object, because blocks are read whole.
    """

    message: int = 32 << 20
    round: int | None = None
    block: int = BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Message:
    """Data that one process reads, and then sends in one broadcast.

    Attributes:
        reader: the rank that reads it.
        members: the ranks that request it, sorted, including the reader. A single member sends nothing.
        pieces: its boxes, in storage order. If several members request parts of a chunk that is read whole, a member
            may request only some of the boxes.
        nbytes: its length, with the padding between pieces.
        order: the sort key of its first piece in storage order.
    """

    reader: int
    members: tuple[int, ...]
    pieces: tuple[ReadItem, ...]
    nbytes: int
    order: Order


@dataclass(frozen=True, slots=True)
class Round:
    """A part of an exchange that ends before the next one begins.

    Attributes:
        leaves: the arrays of the round, which are complete after it.
        direct: requested boxes that no other process requests; read directly into their destination.
        messages: the messages of this process, in the same order on all members.
    """

    leaves: frozenset[int]
    direct: tuple[ReadItem, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """The part of one process in an exchange.

    Attributes:
        rounds: the rounds, in order.
        groups: the distinct members of the messages of this process, in the same order on all processes.
    """

    rounds: tuple[Round, ...]
    groups: tuple[tuple[int, ...], ...]


def plan_shares(
    specs: Mapping[int, ArraySpec],
    requests: Sequence[RequestedBoxes],
    request_of: Mapping[int, int],
    rank: int,
    sizes: MessageSizes,
    chunks: ChunksOf,
) -> SharedPlan:
    """Plan the part of one process in an exchange, in which each requested element is read once.

    Data that several processes request is divided among them in contiguous parts of about the same size. Every process
    computes the same plan from the same arguments, and takes its own part.

    Args:
        specs: the requested arrays, by number of the leaf.
        requests: the distinct requests.
        request_of: for each rank of the exchange, the number of its request.
        rank: the rank to plan for.
        sizes: limits of messages and rounds.
        chunks: returns the chunks of an array. Messages split neither blocks nor chunks that can only be read whole.
    """
    ranks_of: dict[int, list[int]] = {}
    for member, number in sorted(request_of.items()):
        ranks_of.setdefault(number, []).append(member)
    planning = _ReaderAssignment(ranks_of)
    rounds = []
    groups: dict[tuple[int, ...], None] = {}
    for leaves in _rounds(specs, {number: requests[number] for number in ranks_of}, sizes.round):
        direct: list[ReadItem] = []
        shared: dict[tuple[int, ...], list[StoredPiece]] = {}
        for leaf in leaves:
            itemsize = specs[leaf].numpy_dtype.itemsize
            cells = [
                _Cell(box, planning.members(readers), is_whole)
                for box, readers, is_whole in _requested_cells(leaf, requests, ranks_of)
            ]
            index = _chunk_lookup(cells, chunks(leaf))
            for cell in cells if index.is_plain else _extend_to_chunks(cells, index):
                if cell.is_sent:
                    shared.setdefault(cell.members, []).extend(pieces_of(leaf, cell.box, itemsize, index))
                    continue
                planning.add(cell.members[0], cell.box.size * itemsize)
                if cell.members[0] == rank:
                    direct.append(ReadItem(leaf, cell.box))
        messages_of_round: list[Message] = []
        for members in sorted(shared, key=lambda members: (len(members), members)):
            pieces = shared[members]
            batches = batches_of(pieces, _batch_sizes(pieces, len(members), sizes))
            messages_of_round.extend(planning.assign(members, list(batches)))
        messages = _in_turns(messages_of_round)
        groups.update(dict.fromkeys([message.members for message in messages if len(message.members) > 1]))
        own = tuple([message for message in messages if rank in message.members])
        rounds.append(Round(frozenset(leaves), tuple(direct), own))
    return SharedPlan(tuple(rounds), tuple([group for group in groups if rank in group]))


def message_offsets(pieces: Sequence[ReadItem], itemsizes: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return the offsets of the pieces of a message and its length, in bytes.

    Args:
        pieces: the pieces.
        itemsizes: bytes per element of each piece.
    """
    offsets, end = [], 0
    for piece, itemsize in zip(pieces, itemsizes, strict=True):
        offsets.append(end)
        end += -(-piece.box.size * itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


class _ReaderAssignment:
    """The distribution of reads among ranks."""

    def __init__(self, ranks_of: Mapping[int, Sequence[int]]) -> None:
        self._ranks_of = ranks_of
        self._load = dict.fromkeys([rank for ranks in ranks_of.values() for rank in ranks], 0)
        self._members: dict[ReaderSet, tuple[int, ...]] = {}

    def members(self, readers: ReaderSet) -> tuple[int, ...]:
        """Return the ranks with one of these requests."""
        members = self._members.get(readers)
        if members is None:
            members = tuple(sorted([rank for number in readers for rank in self._ranks_of[number]]))
            self._members[readers] = members
        return members

    def add(self, rank: int, nbytes: int) -> None:
        """Add bytes that a rank reads."""
        self._load[rank] += nbytes

    def assign(self, members: tuple[int, ...], batches: Sequence[Sequence[StoredPiece]]) -> list[Message]:
        """Assign ordered batches to members, so that all members read about the same number of bytes in total.

        Each member gets consecutive batches, so that few blocks are read by two members.
        """
        sizes = [sum([piece.nbytes for piece in pieces]) for pieces in batches]
        level = self._level(members, sum(sizes))
        readers = deque(members)
        messages = []
        for pieces, nbytes in zip(batches, sizes, strict=True):
            # A batch goes to a member with room for at least half of it.
            while len(readers) > 1 and self._load[readers[0]] + nbytes / 2 > level:
                readers.popleft()
            self._load[readers[0]] += nbytes
            items = tuple([ReadItem(piece.leaf, piece.box) for piece in pieces])
            messages.append(Message(readers[0], members, items, nbytes, pieces[0].order))
        return messages

    def _level(self, members: tuple[int, ...], nbytes: int) -> float:
        """Return the number of bytes that each member reads in total, unless it already reads more."""
        loads = sorted([self._load[rank] for rank in members])
        held = 0
        for count, load in enumerate(loads, 1):
            held += load
            level = (held + nbytes) / count
            if count == len(loads) or level <= loads[count]:
                return level
        raise AssertionError("a group has members")


def _rounds(
    specs: Mapping[int, ArraySpec], requests: Mapping[int, RequestedBoxes], most: int | None
) -> list[list[int]]:
    """Divide arrays into rounds in which no process requests more than `most` bytes."""
    leaves = sorted({leaf for request in requests.values() for leaf in request})
    if most is None:
        return [leaves] if leaves else []
    rounds: list[list[int]] = []
    held: dict[int, int] = {}
    for leaf in leaves:
        itemsize = specs[leaf].numpy_dtype.itemsize
        taken = {number: sum([box.size for box in request.get(leaf, ())]) for number, request in requests.items()}
        if not rounds or any(held[number] and held[number] + size * itemsize > most for number, size in taken.items()):
            rounds.append([])
            held = dict.fromkeys(requests, 0)
        rounds[-1].append(leaf)
        for number, size in taken.items():
            held[number] += size * itemsize
    return rounds


def _requested_cells(
    leaf: int, requests: Sequence[RequestedBoxes], ranks_of: Mapping[int, Sequence[int]]
) -> list[tuple[Box, ReaderSet, bool]]:
    """Cut the requested boxes of an array into disjoint boxes.

    Returns:
        Each box with the numbers of the requests that contain it, and True if it was not cut.
    """
    readers_of: dict[Box, set[int]] = {}
    for number in ranks_of:
        for box in requests[number].get(leaf, ()):
            readers_of.setdefault(box, set()).add(number)
    cells = cut_by_readers({box: frozenset(numbers) for box, numbers in readers_of.items()})
    return [(box, readers, box in readers_of) for box, readers in cells]


def cut_by_readers(requests: Mapping[Box, ReaderSet]) -> list[tuple[Box, ReaderSet]]:
    """Cut overlapping boxes at each other's boundaries into disjoint boxes.

    Boxes that do not overlap are not cut. Takes about ``n log n`` time for n boxes of a grid.

    Args:
        requests: boxes of one array, each with its readers; empty boxes are skipped.

    Returns:
        Disjoint boxes in order of their starts, each with the readers of all boxes that contain it.
    """
    boxes = [box for box in requests if box.size]
    if len(boxes) <= 1:
        return [(box, requests[box]) for box in boxes]
    axis = _sweep_axis(boxes)
    done: list[tuple[Box, ReaderSet]] = []
    active: list[tuple[Box, ReaderSet]] = []
    for box in sorted(boxes, key=lambda box: (box.start[axis], box.start, box.stop)):
        still: list[tuple[Box, ReaderSet]] = []
        for cell in active:
            (still if cell[0].stop[axis] > box.start[axis] else done).append(cell)
        active = _overlay(still, box, requests[box])
    return sorted([*done, *active], key=lambda cell: cell[0].start)


def _sweep_axis(boxes: Sequence[Box]) -> int:
    """Return the axis with the most different starts: a sweep along it has the fewest active boxes."""
    counts = [len({box.start[axis] for box in boxes}) for axis in range(len(boxes[0].start))]
    return counts.index(max(counts))


def _overlay(cells: Sequence[tuple[Box, ReaderSet]], box: Box, readers: ReaderSet) -> list[tuple[Box, ReaderSet]]:
    """Add a box to disjoint cells, and cut both where they overlap."""
    overlaid: list[tuple[Box, ReaderSet]] = []
    rest = [box]
    for cell, before in cells:
        common = cell.intersect(box)
        if common is None:
            overlaid.append((cell, before))
            continue
        overlaid.append((common, before | readers))
        overlaid.extend([(part, before) for part in subtract(cell, box)])
        rest = [part for piece in rest for part in subtract(piece, common)]
    overlaid.extend([(part, readers) for part in rest])
    return overlaid


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box of an array.

    Attributes:
        members: the ranks that request it.
        is_whole: True if it is a requested box, not a part of one.
    """

    box: Box
    members: tuple[int, ...]
    is_whole: bool

    @property
    def is_sent(self) -> bool:
        """True if it is a part of a message, False if it is read directly."""
        return len(self.members) > 1 or not self.is_whole


def _chunk_lookup(cells: Sequence[_Cell], chunks: Iterable[Chunk]) -> ChunkLookup:
    """Return the chunks of an array if its cells must be cut at them; otherwise no chunks."""
    if len(cells) == 1 and not cells[0].is_sent:
        return ChunkLookup(())
    candidates = iter(chunks)
    first = next(candidates, None)
    if first is None or (first.is_plain and not any(cell.is_sent for cell in cells)):
        return ChunkLookup(())
    return ChunkLookup(itertools.chain([first], candidates))


def _extend_to_chunks(cells: Sequence[_Cell], index: ChunkLookup) -> list[_Cell]:
    """Split cells at chunk boundaries. Every rank that requests a cell of a chunk becomes a member of all its cells."""
    parts = [list(index.parts(cell.box)) for cell in cells]
    members: dict[Box, set[int]] = {}
    for cell, of_cell in zip(cells, parts, strict=True):
        if sum([part.size for part, _ in of_cell]) != cell.box.size:
            return list(cells)  # the chunks do not cover the array
        for _, chunk in of_cell:
            members.setdefault(chunk.box, set()).update(cell.members)
    sent = _sent_chunks(cells, [{chunk.box for _, chunk in of_cell} for of_cell in parts], members)
    extended: list[_Cell] = []
    for cell, of_cell in zip(cells, parts, strict=True):
        has_its_members = all(len(members[chunk.box]) == len(cell.members) for _, chunk in of_cell)
        if has_its_members and (cell.is_sent or not any(chunk.box in sent for _, chunk in of_cell)):
            extended.append(cell)
        else:
            extended.extend([_Cell(part, tuple(sorted(members[chunk.box])), False) for part, chunk in of_cell])
    return extended


def _sent_chunks(cells: Sequence[_Cell], chunks_of: Sequence[set[Box]], members: Mapping[Box, set[int]]) -> set[Box]:
    """Return the chunks that are sent. If one part of a chunk is sent, all its parts are, so that it is read once."""
    sent: set[Box] = set()
    count = -1
    while count < len(sent):  # a cell that is sent because of one chunk also sends its parts of other chunks
        count = len(sent)
        for cell, chunks in zip(cells, chunks_of, strict=True):
            if cell.is_sent or not chunks.isdisjoint(sent) or any(len(members[chunk]) > 1 for chunk in chunks):
                sent |= chunks
    return sent


def _batch_sizes(pieces: Sequence[StoredPiece], members: int, sizes: MessageSizes) -> BatchSizes:
    """Return the sizes of messages, so that each member reads the same number of messages."""
    total = sum([piece.nbytes for piece in pieces])
    most = min(sizes.message, max(_LEAST_BYTES, -(-total // (_TURNS * members))))
    count = -(-total // most)
    if count > members:
        count += -count % members
    return BatchSizes(aim=-(-total // count), most=sizes.message, block=sizes.block)


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Return messages in sending order: readers take turns, so that all of them read at the same time."""
    of_reader: dict[int, list[Message]] = {}
    for message in messages:
        of_reader.setdefault(message.reader, []).append(message)
    turns = []
    for reader, own in of_reader.items():
        own.sort(key=lambda message: (message.order, message.members))
        turns.extend([(turn, reader, message) for turn, message in enumerate(own)])
    return [message for _, _, message in sorted(turns, key=lambda entry: entry[:2])]
